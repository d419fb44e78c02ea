"""Find how far an attention came before the forward failed: its completed stages, and the axes of any tensor.

`graph.attention` starts from a softmax followed by the product with the values. Here both may be missing, so the
search starts from a softmax, the product of the scores, or the operands of the failing call. Axes are named from the
remaining evidence: the input of a projection is `batch sequence embed`, and the view that splits its output gives
`heads head_dim`. A call that names its query operand also names the sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import nn

from ...graph.axis import Axis, Dim, resolve, size_of
from ...graph.dataflow import Graph
from ...graph.products import Product
from ...graph.projections import projections_behind, with_projections
from ...graph.scores import as_written, score_product
from ...naming.axes import AxisNames, name_dimension, write_dimension
from ...naming.pattern import STAGES
from ...record.ops import Op, TensorRef
from ...running.subject import Run
from .call import Call

ATTENTION, SDPA = "MultiheadAttention", "scaled_dot_product_attention"
LAYERS = (ATTENTION, "Transformer")
"""torch layers that contain attention."""
PRODUCTS = {"matmul", "bmm", "mm", "baddbmm"}
"""Matrix products, by name without underscores."""
Whose = Literal["", "query", "key", "scores"]
"""The sequence of a tensor: unknown, of queries, of keys, or queries in rows and keys in columns."""
Groups = list[tuple[str, Dim]]
"""Axis names with their axes."""

_PARTS = ("query", "key", "value")
_FAR = 60
"""The largest number of tensors to search for the nearest stage."""


class Given(NamedTuple):
    """One tensor argument of the failing call, and its argument name."""

    role: str
    value: torch.Tensor
    tensor: TensorRef


@dataclass(frozen=True)
class Reached:
    """The completed stages, and the axes of any tensor."""

    graph: Graph
    stages: Mapping[str, TensorRef]
    sides: Mapping[int, Whose]
    """TensorRef id to the sequence of the tensor."""
    groups: Groups
    query: TensorRef | None
    """The query heads; None if they are unknown."""
    roles: Mapping[int, str] = field(default_factory=dict)
    """TensorRef id to the role of an operand of the failing call: `query`, `key`, `value`, `weights`."""
    completed: int = 0
    """The number of attentions completed before this one."""
    names: AxisNames | None = None
    """The axes of the attention that failed, if its context was computed; else None."""

    def of(self, tensor: TensorRef) -> str:
        """Return the axes of a tensor as a pattern; its sequence is that of the nearest earlier stage."""
        nearest = (self.sides[t.id] for t in islice(behind_of(self.graph, tensor), _FAR) if t.id in self.sides)
        return self._pattern(tensor, next(nearest, ""))

    def of_stage(self, stage: str) -> str:
        """Return the axes of a stage."""
        if self.names is not None:
            return self.names.of_stage(stage)
        return self._pattern(self.stages[stage], _side(stage))

    def _pattern(self, tensor: TensorRef, side: Whose) -> str:
        dims, sequences = self.graph.dimensions.of(tensor), _axes_named(self.groups, "sequence")
        groups = [(self._called(name, group, side), resolve(group)) for name, group in self.groups if group]
        for axis in {axis for dim in dims for axis in resolve(dim)}:
            if not sequences.isdisjoint(resolve(axis.twins)):
                groups.append(("key", (axis,)))  # the other sequence of a self-attention
        return " ".join(write_dimension(name_dimension(dim, groups)) for dim in dims)

    def _called(self, name: str, group: Dim, side: Whose) -> str:
        if name not in ("sequence", "heads") or not side or (name == "heads" and side != "key"):
            return name
        axes, dims = resolve(group), () if self.query is None else self.graph.dimensions.of(self.query)
        queries = {axis for dim in dims for axis in dim}
        if name == "sequence":
            return side if side != "scores" else "key" if queries.isdisjoint(axes) else "query"
        heads = next((dim for known, dim in self.groups if known == name and queries.intersection(resolve(dim))), axes)
        return name if size_of(resolve(heads)) == size_of(axes) else "kv_heads"

    def is_of_scores(self, tensor: TensorRef) -> bool:
        """Return whether this is the scores, possibly scaled or masked; the context does not count."""
        scores = self.stages.get("scores")
        steps = self.graph.back(tensor, self.graph.passes_on)
        return scores is not None and any(step.tensor.id == scores.id for step in steps)

    def is_table(self, tensor: TensorRef) -> bool:
        """Return whether a tensor is computed from parameters or buffers and from no argument."""
        recording, behind = self.graph.recording, {source.id for source in behind_of(self.graph, tensor)}
        own, given = (*recording.parameters, *recording.buffers), recording.inputs
        return [any(named.tensor.id in behind for named in each) for each in (own, given)] == [True, False]

    def steps_back(self, tensor: TensorRef) -> Iterator[tuple[TensorRef, Op | None]]:
        """Yield a tensor and its operation, then the same for the tensors before each reshape and scaling."""
        op = self.graph.recording.producer(tensor)
        yield tensor, op
        while op is not None and (self.graph.moves(op) or self.graph.is_scale(op)):
            tensor = op.inputs[0]
            op = self.graph.recording.producer(tensor)
            yield tensor, op


def reach(run: Run, call: Call, operands: Sequence[Given]) -> Reached:
    """Return the completed stages of the attention that a failing call belongs to."""
    graph, attentions, base = run.graph, run.attentions, call.base
    layers = [given.tensor for given in operands if _is_activation(base, given)]
    groups = _groups(graph, layers, ("batch", "sequence") if call.batch_first else ("sequence", "batch"))
    contexts = [last.value_product.op.output.id for last, _ in attentions[-1:] if "output" not in last.projections]
    if contexts and (not operands or any(_is_made_of(graph, given.tensor, contexts) for given in operands)):
        # The failing call uses the context of the last attention. Operations after the context may belong to that
        # call, because a product flattens its operands, so concat does not count.
        last, names = attentions[-1]
        sides = {tensor.id: _side(name) for name, tensor in reversed(last.stages.items())}
        sides |= {product.op.output.id: "scores" for product in (last.value_product, last.score_product)}
        stages = {name: tensor for name, tensor in last.stages.items() if name != "concat"}
        return Reached(graph, stages, sides, groups, stages["q_heads"], {}, len(attentions) - 1, names)
    tail = graph.recording.ops[attentions[-1][0].value_product.op.index + 1 if attentions else 0 :]
    softmax = next((op for op in reversed(tail) if op.index in graph.softmaxes), None)
    product = _score_product(graph, tail, softmax)
    parts = _parts(graph, base, operands, softmax or (product.op if product is not None else None))
    factors: dict[str, TensorRef] = {}
    if base == ATTENTION:
        stages = {given.role: given.tensor for given in operands if given.role in _PARTS}
        sides = {tensor.id: _side(name) for name, tensor in reversed(stages.items())}
    else:
        if product is not None:
            written = (as_written(graph, product, tensor) for tensor in (product.left, product.right))
            factors = dict(zip(("query", "key"), written, strict=True))
        factors |= {role: tensor for role, tensor in parts.items() if role in _PARTS}
        stages, sides = _before_product(graph, factors)
    if product is not None:
        stages |= _scores(graph, product, softmax)
        sides |= dict.fromkeys((product.op.output.id, graph.after_call(product.op).id), "scores")
    for factor in factors.values():
        groups = _in_order(groups, graph.dimensions.of(factor))
    return Reached(
        graph,
        {name: stages[name] for name in STAGES if name in stages},
        sides,
        groups,
        factors.get("query"),
        {tensor.id: role for role, tensor in parts.items()},
        len(attentions),
    )


def _side(stage: str) -> Whose:
    """Return the sequence of a stage."""
    if stage in _PARTS or stage[1] == "_":
        return "query" if stage[0] == "q" else "key"
    return "scores"


def behind_of(graph: Graph, tensor: TensorRef) -> Iterator[TensorRef]:
    """Yield a tensor and all tensors that it is computed from, the nearest first."""
    return (step.tensor for step in graph.back(tensor, lambda _: True))


def _is_made_of(graph: Graph, tensor: TensorRef, ids: Collection[int]) -> bool:
    return any(source.id in ids for source in behind_of(graph, tensor))


def _is_activation(base: str, given: Given) -> bool:
    """Return whether this is the input of a layer: batch, sequence, features."""
    if base in LAYERS:
        return given.role in (*_PARTS, "src", "tgt")
    return base == "linear" and given.role == "input" and given.value.is_floating_point()


def _score_product(graph: Graph, tail: Sequence[Op], softmax: Op | None) -> Product | None:
    """Return the product of the scores: the one before the softmax, or without a softmax the last; None without it."""
    if softmax is not None:
        known = graph.softmaxes[softmax.index]
        meeting = score_product(graph, known.masked, known.dim, known.op.module)
        return None if meeting is None else meeting.product
    products = [product for op in tail if (product := graph.product(op)) is not None]
    last = products[-1] if products else None
    factors = () if last is None else (last.left, last.right)
    sources = {step.tensor.id for factor in factors for step in graph.back(factor, graph.passes_on)}
    # If its factors come from another product, it is not the scores: the softmax is missing.
    return None if any(product.op.output.id in sources for product in products) else last


def _scores(graph: Graph, product: Product, softmax: Op | None) -> dict[str, TensorRef]:
    """Return the completed stages from the product of the scores to the softmax."""
    scores = graph.after_call(product.op)
    while len(followers := graph.recording.consumers.get(scores.id, ())) == 1 and graph.is_scale(followers[0]):
        scores = followers[0].output
    if softmax is None:
        return {"scores": scores}
    masked = graph.softmaxes[softmax.index].masked
    stages = {"scores": scores, "weights": softmax.output}
    return stages if masked.id == scores.id else {**stages, "masked_scores": masked}


def _parts(graph: Graph, base: str, operands: Sequence[Given], scored: Op | None) -> dict[str, TensorRef]:
    """Return the operands of the failing call by their role in the attention, found from their positions.

    `scored` is the softmax, or else the product of the scores; None without both.
    """
    if base == SDPA:
        return {given.role: given.tensor for given in operands if given.role in _PARTS}
    if base not in {"einsum", *PRODUCTS} or len(operands) < 2:
        return {}
    if any(isinstance(given.value, nn.Parameter) or graph.is_weight(given.tensor) for given in operands[-2:]):
        return {}
    left, right = (given.tensor for given in operands[-2:])
    if scored is None:
        return {"query": left, "key": right}
    for weights, value in ((left, right), (right, left)):
        if _is_made_of(graph, weights, {scored.output.id}):
            return {"weights": weights, "value": value}
    return {}


def _before_product(graph: Graph, factors: Mapping[str, TensorRef]) -> tuple[dict[str, TensorRef], dict[int, Whose]]:
    """Return the stages between the inputs and the factors of products, and the side of each tensor on the way."""
    heads, sides = dict[str, TensorRef](), dict[int, Whose]()
    for role, tensor in factors.items():
        side = sides[tensor.id] = _side(role)
        swaps = role == "key"
        while (op := graph.recording.producer(tensor)) is not None and (
            (swaps and op.swaps_last_two) or graph.is_scale(op)
        ):
            tensor, swaps = op.inputs[0], False
            sides[tensor.id] = side
        heads[f"{role[0]}_heads"] = tensor
    ends = projections_behind(graph, heads, "", {role: set() for role in ("query", *factors)})
    stages = with_projections(graph, heads, ends)
    for name, tensor in stages.items():
        # A packed projection of query, key and value has no side.
        side = _side(name)
        sides[tensor.id] = side if sides.get(tensor.id) in (None, side) else ""
    unsplit = [name for name in heads if stages[name].id == getattr(stages.get(f"{name[0]}_proj"), "id", None)]
    return {name: tensor for name, tensor in stages.items() if name not in unsplit}, sides


def _groups(graph: Graph, layers: Iterable[TensorRef], order: tuple[str, str]) -> Groups:
    """Name heads from the views that split projections, then the positions and features of layer inputs.

    The first name of an axis wins. `order` is the order of batch and sequence in the failing layer.
    """
    groups: Groups = []

    def add(name: str, dim: Dim) -> None:
        dim = resolve(dim)
        # An axis of size one is named only if it is the batch: a view may put others anywhere.
        counts = size_of(dim) > 1 or (name == "batch" and len(dim) == 1)
        if dim and counts and not any(set(dim).intersection(group) for _, group in groups):
            groups.append((name, dim))

    def add_activation(tensor: TensorRef, order: tuple[str, str]) -> None:
        *positions, width = graph.dimensions.of(tensor) or ((),)
        if len(positions) == 2:
            axes = {axis for dim in positions for axis in dim}
            known = {name for name, group in groups if axes.intersection(group)}
            for name, dim in zip(order, positions, strict=True):
                add(name, () if name in known else dim)
        elif len(positions) == 1 and len(positions[0]) == 1:
            add("sequence", positions[0])
        if 1 <= len(positions) <= 2:
            add("embed", width)

    projections = [op for op in graph.recording.ops if graph.is_projection(op)]
    for op in projections:
        heads, head_dim = _divided(graph, graph.after_call(op))
        add("heads", heads)
        add("head_dim", head_dim)
    for tensor in layers:
        add_activation(tensor, order)
    for op in projections:
        source = graph.before_call(op, graph.projected(op))
        origin = graph.before_moves(source)
        add_activation(origin if len(origin.shape) == 3 else source, ("batch", "sequence"))
    return groups


def _divided(graph: Graph, projected: TensorRef) -> tuple[Dim, Dim]:
    """Return the axes of heads and head features from the first view that splits a width; empty without one."""
    dims = graph.dimensions.of
    width = set(dims(projected)[-1]) if projected.shape else set()
    for op, _ in graph.forward(projected, lambda op: op.kind in ("view", "copy") or op.pointwise):
        if op.kind != "view" or op.base_name in ("split", "split_with_sizes") or op.output.id == projected.id:
            continue
        parts, read = (
            [part for dim in dims(tensor) if (part := tuple(axis for axis in dim if axis in width))]
            for tensor in (op.output, op.inputs[0])
        )
        if len(parts) == len(read):
            continue
        packed = [size_of(part) in (2, 3) for part in parts[:2]]
        if len(parts) == 3 and any(packed):  # query, key and value are packed, before the heads or inside them
            del parts[packed.index(True)]
        elif len(parts) == 2 and len(parts[1]) > 1 and parts[1][0].size == 3:
            parts[1] = parts[1][1:]  # query, key and value are packed per head
        if len(parts) == 2:
            return parts[0], parts[1]
    return (), ()


def _in_order(groups: Groups, dims: Sequence[Dim]) -> Groups:
    """Swap the names if the last two dimensions of an operand contain the batch and not the sequence."""
    before, after = ({axis for dim in part for axis in dim} for part in (dims[:-2], dims[-2:]))
    heads, batch, sequence = (_axes_named(groups, name) for name in ("heads", "batch", "sequence"))
    if not (heads & before and sequence & before and batch & after):
        return groups
    swapped = {"batch": "sequence", "sequence": "batch"}
    return [(swapped.get(name, name), group) for name, group in groups]


def _axes_named(groups: Groups, name: str) -> set[Axis]:
    return {axis for known, group in groups if known == name for axis in resolve(group)}
