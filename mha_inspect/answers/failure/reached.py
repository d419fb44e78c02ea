"""Find how far an attention came before the forward failed: its completed stages, and the axes of any tensor.

`graph.attention` starts from a softmax followed by the product with the values. Here both may be missing, so the
search starts from a softmax, the product of the scores, or the operands of the failing call. Axes are named from the
remaining evidence: the input of a projection is `batch sequence embed`, and the view that splits its output gives
`heads head_dim`. A call that names its query operand also names the sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
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
from .axis_groups import Groups, axes_named, axes_of, groups_of, in_order
from .call import Call

ATTENTION, SDPA = "MultiheadAttention", "scaled_dot_product_attention"
LAYERS = (ATTENTION, "Transformer")
"""torch layers that contain attention."""
PRODUCTS = {"matmul", "bmm", "mm", "baddbmm"}
"""Matrix products, by name without underscores."""
Whose = Literal["", "query", "key", "scores"]
"""The sequence of a tensor: unknown, of queries, of keys, or queries in rows and keys in columns."""

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
        for source in islice(behind_of(self.graph, tensor), _FAR):
            if source.id in self.sides:
                return self._pattern(tensor, self.sides[source.id])
        return self._pattern(tensor, "")

    def of_stage(self, stage: str) -> str:
        """Return the axes of a stage."""
        if self.names is not None:
            return self.names.of_stage(stage)
        return self._pattern(self.stages[stage], _side(stage))

    def _pattern(self, tensor: TensorRef, side: Whose) -> str:
        dims, sequences = self.graph.dimensions.of(tensor), axes_named(self.groups, "sequence")
        groups = [(self._called(name, group, side), resolve(group)) for name, group in self.groups if group]
        for axis in set(chain.from_iterable(map(resolve, dims))):
            if not sequences.isdisjoint(resolve(axis.twins)):
                groups.append(("key", (axis,)))  # the other sequence of a self-attention
        return " ".join(write_dimension(name_dimension(dim, groups)) for dim in dims)

    def _called(self, name: str, group: Dim, side: Whose) -> str:
        """Return the name of an axis in a tensor of a sequence: `key` for `sequence`, `kv_heads` for fewer heads."""
        if name == "sequence" and side == "scores":
            return "key" if self._axes_of_query().isdisjoint(resolve(group)) else "query"
        if name == "sequence" and side:
            return side
        if name == "heads" and side == "key" and size_of(resolve(group)) != self._size_of_query_heads(group):
            return "kv_heads"
        return name

    def _axes_of_query(self) -> set[Axis]:
        return set() if self.query is None else axes_of(self.graph.dimensions.of(self.query))

    def _size_of_query_heads(self, unknown: Dim) -> int:
        """Return the number of query heads; without queries that of the given heads."""
        axes = self._axes_of_query()
        for name, heads in self.groups:
            if name == "heads" and axes.intersection(resolve(heads)):
                return size_of(resolve(heads))
        return size_of(resolve(unknown))

    def is_of_scores(self, tensor: TensorRef) -> bool:
        """Return whether this is the scores, possibly scaled or masked; the context does not count."""
        scores = self.stages.get("scores")
        if scores is None:
            return False
        return any(step.tensor.id == scores.id for step in self.graph.back(tensor, self.graph.passes_on))

    def is_table(self, tensor: TensorRef) -> bool:
        """Return whether a tensor is computed from parameters or buffers and from no argument."""
        recording = self.graph.recording
        behind = {source.id for source in behind_of(self.graph, tensor)}
        if any(named.tensor.id in behind for named in recording.inputs):
            return False
        return any(named.tensor.id in behind for named in (*recording.parameters, *recording.buffers))

    def steps_back(self, tensor: TensorRef) -> Iterator[tuple[TensorRef, Op | None]]:
        """Yield a tensor and its operation, then the same for the tensors before each reshape and scaling."""
        op = self.graph.recording.producer(tensor)
        yield tensor, op
        while op is not None and (self.graph.moves(op) or self.graph.is_scale(op)):
            tensor = op.inputs[0]
            op = self.graph.recording.producer(tensor)
            yield tensor, op


@dataclass(frozen=True)
class _Completed:
    """Stages, and the sequence of each tensor on the way to them."""

    stages: dict[str, TensorRef]
    sides: dict[int, Whose]


def reach(run: Run, call: Call, operands: Sequence[Given]) -> Reached:
    """Return the completed stages of the attention that a failing call belongs to."""
    layers = [given.tensor for given in operands if _is_activation(call.base, given)]
    order = ("batch", "sequence") if call.batch_first else ("sequence", "batch")
    groups = groups_of(run.graph, layers, order)
    if _uses_last_context(run, operands):
        return _behind_context(run, groups)
    return _before_context(run, call.base, operands, groups)


def _uses_last_context(run: Run, operands: Sequence[Given]) -> bool:
    """Return whether the failing call uses the context of the last attention, which has no output yet."""
    if not run.attentions:
        return False
    last, _ = run.attentions[-1]
    if "output" in last.projections:
        return False
    context = last.value_product.op.output.id
    return not operands or any(_is_made_of(run.graph, given.tensor, {context}) for given in operands)


def _behind_context(run: Run, groups: Groups) -> Reached:
    """Return the stages of the last attention, whose context was computed.

    Operations after the context may belong to the failing call, because a product flattens its operands, so concat
    does not count.
    """
    last, names = run.attentions[-1]
    sides = {tensor.id: _side(name) for name, tensor in reversed(last.stages.items())}
    sides |= {product.op.output.id: "scores" for product in (last.value_product, last.score_product)}
    stages = {name: tensor for name, tensor in last.stages.items() if name != "concat"}
    completed = len(run.attentions) - 1
    return Reached(run.graph, stages, sides, groups, stages["q_heads"], completed=completed, names=names)


def _before_context(run: Run, base: str, operands: Sequence[Given], groups: Groups) -> Reached:
    """Return the stages of an attention that has no context yet."""
    graph = run.graph
    tail = _ops_after(run)
    softmax = next((op for op in reversed(tail) if op.index in graph.softmaxes), None)
    product = _score_product(graph, tail, softmax)
    scored = product.op if softmax is None and product is not None else softmax
    parts = _parts(graph, base, operands, scored)
    factors: dict[str, TensorRef] = {}
    if base == ATTENTION:
        completed = _given_to_layer(operands)
    else:
        factors = _factors(graph, product, parts)
        completed = _before_product(graph, factors)
    stages, sides = completed.stages, completed.sides
    if product is not None:
        stages |= _scores(graph, product, softmax)
        sides |= dict.fromkeys((product.op.output.id, graph.after_call(product.op).id), "scores")
    for factor in factors.values():
        groups = in_order(groups, graph.dimensions.of(factor))
    return Reached(
        graph,
        stages={name: stages[name] for name in STAGES if name in stages},
        sides=sides,
        groups=groups,
        query=factors.get("query"),
        roles={tensor.id: role for role, tensor in parts.items()},
        completed=len(run.attentions),
    )


def _ops_after(run: Run) -> Sequence[Op]:
    """Return the operations after the context of the last attention; all of them without one."""
    ops = run.graph.recording.ops
    if not run.attentions:
        return ops
    last, _ = run.attentions[-1]
    return ops[last.value_product.op.index + 1 :]


def _given_to_layer(operands: Sequence[Given]) -> _Completed:
    """Return the queries, keys and values that a layer of torch is given; one tensor may be all of them."""
    stages = {given.role: given.tensor for given in operands if given.role in _PARTS}
    return _Completed(stages, {tensor.id: _side(name) for name, tensor in reversed(stages.items())})


def _factors(graph: Graph, product: Product | None, parts: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Return the queries and keys of the product of the scores as written, and those of the failing call."""
    factors: dict[str, TensorRef] = {}
    if product is not None:
        factors["query"] = as_written(graph, product, product.left)
        factors["key"] = as_written(graph, product, product.right)
    factors.update((role, tensor) for role, tensor in parts.items() if role in _PARTS)
    return factors


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
        scored = graph.softmaxes[softmax.index]
        meeting = score_product(graph, scored.masked, scored.dim, scored.op.module)
        return None if meeting is None else meeting.product
    products = [product for product in map(graph.product, tail) if product is not None]
    if not products:
        return None
    last, sources = products[-1], set[int]()
    for factor in (last.left, last.right):
        sources.update(step.tensor.id for step in graph.back(factor, graph.passes_on))
    # If its factors come from another product, it is not the scores: the softmax is missing.
    return None if any(product.op.output.id in sources for product in products) else last


def _scores(graph: Graph, product: Product, softmax: Op | None) -> dict[str, TensorRef]:
    """Return the completed stages from the product of the scores to the softmax."""
    scores = graph.after_call(product.op)
    while True:
        readers = graph.recording.consumers.get(scores.id, ())
        if len(readers) != 1 or not graph.is_scale(readers[0]):
            break
        scores = readers[0].output
    if softmax is None:
        return {"scores": scores}
    masked = graph.softmaxes[softmax.index].masked
    stages = {"scores": scores, "weights": softmax.output}
    if masked.id != scores.id:
        stages["masked_scores"] = masked
    return stages


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


def _before_product(graph: Graph, factors: Mapping[str, TensorRef]) -> _Completed:
    """Return the stages between the inputs and the factors of products, and the side of each tensor on the way."""
    heads, sides = dict[str, TensorRef](), dict[int, Whose]()
    for role, factor in factors.items():
        way = list(_to_heads(graph, factor, may_swap=role == "key"))
        sides.update(dict.fromkeys((tensor.id for tensor in way), _side(role)))
        heads[f"{role[0]}_heads"] = way[-1]
    ends = projections_behind(graph, heads, "", {role: set() for role in ("query", *factors)})
    stages = with_projections(graph, heads, ends)
    for name, tensor in stages.items():
        # A packed projection of query, key and value has no side.
        side = _side(name)
        sides[tensor.id] = side if sides.get(tensor.id) in (None, side) else ""
    for name in heads:
        # Heads that are the projection itself are not split yet.
        projected = stages.get(f"{name[0]}_proj")
        if projected is not None and projected.id == stages[name].id:
            del stages[name]
    return _Completed(stages, sides)


def _to_heads(graph: Graph, factor: TensorRef, *, may_swap: bool) -> Iterator[TensorRef]:
    """Yield a factor and the tensors before its scaling, and before the last two dimensions of keys were swapped."""
    yield factor
    op = graph.recording.producer(factor)
    while op is not None and ((may_swap and op.swaps_last_two) or graph.is_scale(op)):
        may_swap = False
        yield op.inputs[0]
        op = graph.recording.producer(op.inputs[0])
