"""Describe one attention found in a recording, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..record.ops import Op, TensorRef
from .dimensions import Axis, Dim, Dimensions, DimensionsOf, wide
from .products import Product


@dataclass(frozen=True)
class Mixing:
    """A projection that mixes the heads of scores or weights."""

    op: Op
    source: TensorRef
    """The projected tensor."""
    place: int
    """The dimension of `source` that is summed over; the result has the new heads in the same place."""


@dataclass(frozen=True)
class Attention:
    """One attention of a recording: the scores of queries and keys, the weights computed from them, and the values."""

    softmax: Op
    score_product: Product
    value_product: Product
    stages: dict[str, TensorRef]
    """Stage name to its tensor, in the order of `pattern.STAGES`. A stage that the attention lacks is absent."""
    scale: float | None
    """The factor of q·kᵀ before the softmax, wherever it is applied: on q after its projection, on k, on the scores, or
    together with the mask. None if the number is unknown, e.g. one for each head."""
    softmax_dim: int
    key_first: bool
    """Whether the keys are the left operand of the scores product."""
    masks: tuple[Op, ...]
    """The operations that add or fill in a mask or a bias."""
    projections: dict[str, Op] = field(default_factory=dict)
    """`query`, `key`, `value` or `output` to its product with the weight matrix; absent without a projection."""
    scores_scale: float | None = None
    """The part of `scale` between `q_heads · k_headsᵀ` and the stage `scores`. None if unknown."""
    early_scales: dict[str, float | None] = field(default_factory=dict)
    """`q_heads` or `k_heads` to the part of `scale` that these heads include; None if unknown."""
    over_queries: bool = False
    """Whether the softmax runs over the queries, which then compete for each key, instead of over the keys."""
    value_first: bool = False
    """Whether the values are the left operand of the product with the weights."""
    scoring: tuple[tuple[str, float | None], ...] = ()
    """The steps from the scores to the softmax, in order: `Scoring.steps`."""
    sinks: Op | None = None
    """The operation that appends sinks to the scores: keys that take a part of the weight and have no value."""
    divided: Op | None = None
    """The operation that divides the context by the sum of the exponentials, if the weights are never computed; else
    None."""
    average_of_ones: tuple[float, float] | None = None
    """The lowest and highest result for values that are all one, on drawn scores, if `divided` divides by other numbers
    than the sum of what the values are multiplied by; None if it divides by that sum, or if this is unknown."""
    mixed_scores: tuple[Mixing, ...] = ()
    """The projections that mix the heads of the scores before the softmax, in order."""
    mixed_weights: tuple[Mixing, ...] = ()
    """The projections that mix the heads of the weights before the product with the values, in order."""
    weights_path: tuple[Op, ...] = ()
    """The operations from the weights to the product with the values, in order."""
    earlier: dict[str, tuple[Op, ...]] = field(default_factory=dict)
    """`query`, `key`, `value` to the low-rank projections before the one in `projections`, in order."""
    summed: tuple[Op, ...] = ()
    """The output projections of single heads, if their results are added up; otherwise empty."""
    before_repeats: dict[str, TensorRef] = field(default_factory=dict)
    """`key` to the tensor whose heads were repeated; the heads themselves if they were not repeated."""
    weighing: tuple[Op, ...] = ()
    """The operations that compute weights without a softmax, in order; `softmax` is the last of them."""
    branches: tuple[Attention, ...] = ()
    """The attention of each iteration, if the implementation loops over its heads; otherwise empty. The stages are
    those of the first iteration, except the shared ones: query, key, value, concat and output."""
    pieces: tuple[Attention, ...] = ()
    """The attention of each piece of the queries, of the keys or of the batch, if they are computed in turn; otherwise
    empty. The stages, and the results of both products and of the softmax, are put together from the pieces."""
    is_over_memory: bool = False
    """Whether the keys depend on no input: they are parameters, or computed from parameters."""
    seen: Any = field(default=None, compare=False)
    """A bool tensor in the layout of the softmax's result: the weights that are not set to zero after the exponentials.
    None if none is, or if it is unknown."""
    shifts: tuple[Op, ...] = ()
    """The operations in `masks` that add one number for each softmax, which changes no weight."""
    has_factors: bool = False
    """Whether exponentials are multiplied by numbers other than 0 and 1, which is a bias of the scores."""
    weights_scale: float = 1.0
    """The number that the input of the softmax is multiplied by in it, e.g. log(2) where powers of two are taken."""
    module: str = ""
    """Path of the module whose forward computes the scores, or calls one module for each head."""

    def feature_place(self, side: str, rank: int) -> int:
        """Return the dimension of the features, among `rank` dimensions, in the input and output of a projection."""
        return features_place(self.projections.get(side), rank)

    def first_projection(self, side: str) -> Op | None:
        """Return the first of the successive projections of a side; None if there is no projection."""
        earlier = self.earlier.get(side)
        return earlier[0] if earlier else self.projections.get(side)

    @property
    def turns(self) -> tuple[Attention, ...]:
        """The turns of a loop over heads, the pieces, or the attention itself: all tensors of a turn are real."""
        turns: list[Attention] = []
        for turn in self.branches or self.pieces:
            turns += turn.turns
        return tuple(turns) or (self,)

    @property
    def is_dot(self) -> bool:
        """Whether the scores are dot products, for which the usual scale is 1/√head_dim."""
        return self.score_product.is_dot

    @property
    def weights_changed(self) -> bool:
        """Whether the weights are gated, masked or picked before the product with the values."""
        return any(map(_changes_weights, self.weights_path))


def _changes_weights(op: Op) -> bool:
    """Return whether an operation gates, masks or picks weights."""
    if op.does("picks"):
        return True
    return op.kind == "compute" and op.pointwise and op.base_name != "_to_copy"


def features_place(projection: Op | None, rank: int) -> int:
    """Return the dimension of the features, among `rank` dimensions, in the input and output of a projection."""
    return 1 if projection is not None and projection.base_name == "convolution" and rank > 2 else -1


def positions_of(attention: Attention, dimensions: Dimensions, side: str) -> list[Dim]:
    """Return the dimensions of a projection's input without its features; all dimensions without a projection."""
    dims = list(dimensions.of(attention.stages[side]))
    if side in attention.projections and dims:
        del dims[given_features(attention, dimensions, side)]
    return dims


def given_features(attention: Attention, dimensions: DimensionsOf, side: str) -> int:
    """Return which dimension of a query, key or value has the features, before any projection."""
    dims = dimensions.of(attention.stages[side])
    op = attention.first_projection(side)
    if op is None:
        return -1
    # Features that were moved before their projection are in another dimension here.
    summed = _summed_axes(dimensions, op)
    moved = []
    for place, dim in enumerate(dims):
        if place and dim and summed.issuperset(dim):
            moved.append(place)
    if len(moved) == 1:
        return moved[0]
    return 1 if op.base_name == "convolution" and len(dims) > 2 else -1


def _summed_axes(dimensions: DimensionsOf, projection: Op) -> set[Axis]:
    """Return the axes of the features of what a projection reads, in any of its operands."""
    if projection.base_name == "convolution":
        source = dimensions.of(projection.inputs[0])
        return set(wide(source[1])) if len(source) > 1 else set()
    sources = [dimensions.of(tensor) for tensor in projection.inputs]
    return set(wide(*(source[-1] for source in sources if source)))
