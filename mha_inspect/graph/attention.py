"""One attention as it stands in a recording: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..record.ops import Op, TensorRef
from .dimensions import Dim, Dimensions, wide
from .products import Product


@dataclass(frozen=True)
class Mixing:
    """A projection of scores or weights from heads to heads."""

    op: Op
    source: TensorRef
    """What is projected."""
    place: int
    """The dimension of it that is summed over, and of what comes out the one that stands there instead."""


@dataclass(frozen=True)
class Attention:
    """One attention, as it stands in a recording: scores of queries and keys, weights of these, and values."""

    softmax: Op
    score_product: Product
    value_product: Product
    stages: dict[str, TensorRef]
    """Stage name to the tensor it is, in the order of `pattern.STAGES`; those that there are."""
    scale: float | None
    """What q·kᵀ is multiplied by before the softmax, wherever that is done: on q after its projection, on k, on the
    scores, or together with the mask. None where the number is not known, as with one for each head."""
    softmax_dim: int
    key_first: bool
    """Whether the keys are the left operand of the product of scores."""
    masks: tuple[Op, ...]
    """The operations that add, or fill in, a mask or a bias."""
    projections: dict[str, Op] = field(default_factory=dict)
    """`query`, `key`, `value`, `output` to the product with the weight matrix that projects it."""
    scores_scale: float | None = None
    """The part of `scale` between `q_heads · k_headsᵀ` and the stage `scores`; the heads may hold another part."""
    over_queries: bool = False
    """Whether the softmax runs over the queries, which compete for each key, and not over the keys."""
    value_first: bool = False
    """Whether the values are the left operand of the product with the weights."""
    scoring: tuple[tuple[str, float | None], ...] = ()
    """What is done to the scores before the softmax, in order: `Scoring.steps`."""
    sinks: Op | None = None
    """The operation that puts sinks beside the scores: keys that take a part of the weight and have no value."""
    divided: Op | None = None
    """Where the weights are never formed: the operation that divides the context by the sum of the exponentials."""
    mixed_scores: tuple[Mixing, ...] = ()
    """What mixes the scores of the heads before the softmax, in order."""
    mixed_weights: tuple[Mixing, ...] = ()
    """What mixes the weights of the heads before they meet the values, in order."""
    weights_path: tuple[Op, ...] = ()
    """What is done to the weights before they meet the values, in order."""
    earlier: dict[str, tuple[Op, ...]] = field(default_factory=dict)
    """`query`, `key`, `value` to the projections before the one in `projections`, down to something narrower."""
    before_repeats: dict[str, TensorRef] = field(default_factory=dict)
    """`key` to what its heads were repeated from; the heads themselves where they were not."""
    weighing: tuple[Op, ...] = ()
    """What makes weights of the scores where that is no softmax, in order; `softmax` is the last of them."""
    branches: tuple[Attention, ...] = ()
    """Where an implementation loops over its heads, the attention of each turn; empty for all others. The stages are
    those of the first turn, but for what they share: query, key, value, concat and output."""
    module: str = ""
    """Path of the module whose forward computes the scores, or runs those that do for a head each."""

    def feature_place(self, side: str, rank: int) -> int:
        """Return where among so many dimensions of what a projection takes or gives the features are."""
        op = self.projections.get(side)
        return 1 if op is not None and op.base_name == "convolution" and rank > 2 else -1

    def first_projection(self, side: str) -> Op | None:
        """Return the first of the products that project a side one after the other; None where there is none."""
        return next(iter(self.earlier.get(side, ())), self.projections.get(side))

    @property
    def is_dot(self) -> bool:
        """Whether the scores are dot products, which a scale of 1/√head_dim is for."""
        return self.score_product.is_dot

    @property
    def weights_changed(self) -> bool:
        """Whether other weights than those that are shown meet the values: gated, masked or picked since."""
        return any(
            op.does("picks") or (op.kind == "compute" and op.pointwise and op.base_name != "_to_copy")
            for op in self.weights_path
        )


def positions_of(attention: Attention, dimensions: Dimensions, side: str) -> list[Dim]:
    """Return the dimensions of what a projection takes in, but for its features; all where nothing projects it."""
    dims = list(dimensions.of(attention.stages[side]))
    if side in attention.projections and dims:
        del dims[given_features(attention, dimensions, side)]
    return dims


def given_features(attention: Attention, dimensions: Dimensions, side: str) -> int:
    """Return which dimension of a query, key or value are the features, that is projected or comes in as it is."""
    dims, op = dimensions.of(attention.stages[side]), attention.first_projection(side)
    if op is None:
        return -1
    # Features that were moved before they were projected stand elsewhere than there.
    convolved = op.base_name == "convolution"
    read = [dimensions.of(tensor) for tensor in (op.inputs[:1] if convolved else op.inputs)]
    summed = set(wide(*(source[1 if convolved else -1] for source in read if len(source) > convolved)))
    moved = [place for place, dim in enumerate(dims) if place and dim and set(dim) <= summed]
    return moved[0] if len(moved) == 1 else 1 if convolved and len(dims) > 2 else -1
