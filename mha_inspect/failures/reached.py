"""Find how far an attention came before the forward failed: its completed stages, and the axes of any tensor.

`graph.attention` starts from a softmax followed by the product with the values. Here both may be missing, so the
search starts from a softmax, the product of the scores, or the operands of the failing call. Axes are named from the
remaining evidence: the input of a projection is `batch sequence embed`, and the view that splits its output gives
`heads head_dim`. A call that names its query operand also names the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import nn

from ..graph.axis import Axis, Dim, resolve, size_of
from ..graph.dataflow import Graph
from ..graph.meet import Meetings, as_written
from ..graph.products import Product
from ..graph.projections import projections_behind, with_projections
from ..naming.axes import AxisNames, name_dimension, write_dimension
from ..naming.pattern import STAGES
from ..record.ops import Named, Op, TensorRef
from ..running.subject import Run
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
        dims = self.graph.dimensions.of(tensor)
        groups: Groups = []
        for name, group in self.groups:
            if group:
                groups.append((self._called(name, group, side), resolve(group)))
        sequences = axes_named(self.groups, "sequence")
        for axis in _resolved(dims):
            if not sequences.isdisjoint(resolve(axis.twins)):
                groups.append(("key", (axis,)))  # the other sequence of a self-attention
        words = []
        for dim in dims:
            words.append(write_dimension(name_dimension(dim, groups)))
        return " ".join(words)

    def _called(self, name: str, group: Dim, side: Whose) -> str:
        """Return the name of an axis in a tensor of a sequence: `key` for `sequence`, `kv_heads` for fewer heads."""
        if name == "sequence":
            return self._called_sequence(group, side)
        if name == "heads" and side == "key":
            size = size_of(resolve(group))
            if size != self._size_of_query_heads(group):
                return "kv_heads"
        return name

    def _called_sequence(self, group: Dim, side: Whose) -> str:
        """Return whether a sequence is `query` or `key` in a tensor; `sequence` if that is unknown."""
        if not side:
            return "sequence"
        if side != "scores":
            return side
        axes = self._axes_of_query()
        if axes.isdisjoint(resolve(group)):
            return "key"
        return "query"

    def _axes_of_query(self) -> set[Axis]:
        if self.query is None:
            return set()
        dims = self.graph.dimensions.of(self.query)
        return axes_of(dims)

    def _size_of_query_heads(self, unknown: Dim) -> int:
        """Return the number of query heads; without queries that of the given heads."""
        axes = self._axes_of_query()
        for name, group in self.groups:
            heads = resolve(group)
            if name == "heads" and not axes.isdisjoint(heads):
                return size_of(heads)
        return size_of(resolve(unknown))

    @property
    def head_dims(self) -> set[int]:
        """The numbers of features of the heads that were split."""
        return {size_of(resolve(group)) for name, group in self.groups if name == "head_dim"}

    def is_of_scores(self, tensor: TensorRef) -> bool:
        """Return whether this is the scores, possibly scaled or masked; the context does not count."""
        scores = self.stages.get("scores")
        if scores is None:
            return False
        steps = self.graph.back(tensor, self.graph.passes_on)
        return any(step.tensor.id == scores.id for step in steps)

    def is_table(self, tensor: TensorRef) -> bool:
        """Return whether a tensor is computed from parameters or buffers and from no argument."""
        recording = self.graph.recording
        sources = _ids_behind(self.graph, tensor)
        if not sources.isdisjoint(_ids_of(recording.inputs)):
            return False
        weights = (*recording.parameters, *recording.buffers)
        return not sources.isdisjoint(_ids_of(weights))

    def is_learned(self, tensor: TensorRef) -> bool:
        """Return whether a parameter has a part in a tensor."""
        return not _ids_behind(self.graph, tensor).isdisjoint(_ids_of(self.graph.recording.parameters))

    def steps_back(self, tensor: TensorRef) -> Iterator[tuple[TensorRef, Op | None]]:
        """Yield a tensor and its operation, then the same for the tensors before each reshape and scaling."""
        op = self.graph.recording.producer(tensor)
        yield tensor, op
        while op is not None:
            if not self.graph.moves(op) and not self.graph.is_scale(op):
                return
            tensor = op.inputs[0]
            op = self.graph.recording.producer(tensor)
            yield tensor, op


def _resolved(dims: Iterable[Dim]) -> set[Axis]:
    """Return the axes that dimensions consist of."""
    axes: set[Axis] = set()
    for dim in dims:
        axes.update(resolve(dim))
    return axes


def _ids_of(tensors: Iterable[Named]) -> set[int]:
    return {named.tensor.id for named in tensors}


@dataclass(frozen=True)
class _Completed:
    """Stages, and the sequence of each tensor on the way to them."""

    stages: dict[str, TensorRef]
    sides: dict[int, Whose]

    def with_scores(self, graph: Graph, product: Product, softmax: Op | None) -> _Completed:
        """Return these with the stages from the product of the scores to the softmax."""
        sides = dict(self.sides)
        for scores in (product.op.output, graph.after_call(product.op)):
            sides[scores.id] = "scores"
        stages = {**self.stages, **_scores(graph, product, softmax)}
        return _Completed(stages, sides)

    def in_order(self) -> dict[str, TensorRef]:
        """Return the stages in the order in which an attention computes them."""
        return {name: self.stages[name] for name in STAGES if name in self.stages}


def reach(run: Run, call: Call, operands: Sequence[Given], *, has_roles: bool) -> Reached:
    """Return the completed stages of the attention that a failing call belongs to.

    `has_roles` is whether the place of a factor of a product says what it is.
    """
    inputs = _ids_of(run.recording.inputs)
    layers = [given.tensor for given in operands if _is_activation(call.base, given)]
    if call.base == "linear":
        layers = [tensor for tensor in layers if tensor.id in inputs and not _has_features_elsewhere(tensor, operands)]
    order = ("sequence", "batch")
    if call.batch_first:
        order = ("batch", "sequence")
    groups = groups_of(run.graph, layers, order)
    if _uses_last_context(run, operands):
        return _behind_context(run, groups)
    return _before_context(run, call.base, operands, groups, has_roles=has_roles)


def _has_features_elsewhere(x: TensorRef, operands: Sequence[Given]) -> bool:
    """Return whether another dimension than the last has the features that the failing layer takes."""
    for given in operands:
        if given.role == "weight":
            takes = given.tensor.shape[-1]
            return x.shape[-1] != takes and takes in x.shape[:-1]
    return False


def _uses_last_context(run: Run, operands: Sequence[Given]) -> bool:
    """Return whether the failing call uses the context of the last attention, which has no output yet."""
    if not run.attentions:
        return False
    last, _ = run.attentions[-1]
    if "output" in last.projections:
        return False
    if not operands:
        return True
    context = last.value_product.op.output
    return any(_is_made_of(run.graph, given.tensor, context) for given in operands)


def _behind_context(run: Run, groups: Groups) -> Reached:
    """Return the stages of the last attention, whose context was computed.

    Operations after the context may belong to the failing call, because a product flattens its operands, so concat
    does not count.
    """
    last, names = run.attentions[-1]
    sides = _sides_of(last.stages)
    for product in (last.value_product, last.score_product):
        sides[product.op.output.id] = "scores"
    stages = dict(last.stages)
    stages.pop("concat", None)
    return Reached(
        graph=run.graph,
        stages=stages,
        sides=sides,
        groups=groups,
        query=stages["q_heads"],
        completed=len(run.attentions) - 1,
        names=names,
    )


def _sides_of(stages: Mapping[str, TensorRef]) -> dict[int, Whose]:
    """Return the sequence of each tensor; that of its first stage for a tensor with several."""
    sides: dict[int, Whose] = {}
    for name, tensor in stages.items():
        sides.setdefault(tensor.id, _side(name))
    return sides


@dataclass(frozen=True)
class _Scoring:
    """The operations that make the scores and the weights, as far as they ran."""

    softmax: Op | None
    product: Product | None
    """The product of queries and keys."""

    @property
    def last(self) -> Op | None:
        """The softmax, or else the product of the scores; None without both."""
        if self.softmax is not None:
            return self.softmax
        if self.product is not None:
            return self.product.op
        return None

    @classmethod
    def of(cls, run: Run) -> _Scoring:
        """Return the last softmax after the attentions that are completed, and the product before it."""
        ops = _ops_after(run)
        softmax: Op | None = None
        for op in ops:
            if op.does("softmax"):
                softmax = op
        return cls(softmax, _score_product(run.graph, ops, softmax))


def _before_context(run: Run, base: str, operands: Sequence[Given], groups: Groups, *, has_roles: bool) -> Reached:
    """Return the stages of an attention that has no context yet."""
    graph = run.graph
    scoring = _Scoring.of(run)
    parts = _parts(graph, base, operands, scoring.last) if has_roles else {}
    if _is_of_features(graph, scoring, groups):
        scoring, parts = _Scoring(None, None), {}
    factors: dict[str, TensorRef] = {}
    if base == ATTENTION:
        completed = _given_to_layer(operands)
    else:
        factors = _factors(graph, scoring.product, parts)
        completed = _before_product(graph, factors)
    if scoring.product is not None:
        completed = completed.with_scores(graph, scoring.product, scoring.softmax)
    groups = in_order(groups, [graph.dimensions.of(factor) for factor in factors.values()])
    return Reached(
        graph=graph,
        stages=completed.in_order(),
        sides=completed.sides,
        groups=groups,
        query=factors.get("query"),
        roles={tensor.id: role for role, tensor in parts.items()},
        completed=len(run.attentions),
    )


def _is_of_features(graph: Graph, scoring: _Scoring, groups: Groups) -> bool:
    """Return whether a softmax is over queries or keys themselves, or a product is of keys and values: no scores."""
    features = axes_named(groups, "head_dim")
    if scoring.softmax is not None:
        matrix = graph.dimensions.of(scoring.softmax.output)[-2:]
        return any(not features.isdisjoint(resolve(dim)) for dim in matrix)
    if scoring.product is None or not features:
        return False
    matrix = graph.dimensions.of(graph.after_call(scoring.product.op))[-2:]
    return all(not features.isdisjoint(resolve(dim)) for dim in matrix)


def _ops_after(run: Run) -> Sequence[Op]:
    """Return the operations after the context of the last attention; all of them without one."""
    ops = run.graph.recording.ops
    if not run.attentions:
        return ops
    last, _ = run.attentions[-1]
    return ops[last.value_product.op.index + 1 :]


def _given_to_layer(operands: Sequence[Given]) -> _Completed:
    """Return the queries, keys and values that a layer of torch is given; one tensor may be all of them."""
    stages = _given_parts(operands)
    return _Completed(stages, _sides_of(stages))


def _given_parts(operands: Sequence[Given]) -> dict[str, TensorRef]:
    """Return the queries, keys and values among the arguments of a call, by argument."""
    return {given.role: given.tensor for given in operands if given.role in _PARTS}


def _factors(graph: Graph, product: Product | None, parts: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """Return the queries and keys of the product of the scores as written, and those of the failing call."""
    factors: dict[str, TensorRef] = {}
    if product is not None:
        factors["query"] = as_written(graph, product, product.left)
        factors["key"] = as_written(graph, product, product.right)
    for role, tensor in parts.items():
        if role in _PARTS:
            factors[role] = tensor
    return factors


def _side(stage: str) -> Whose:
    """Return the sequence of a stage."""
    if stage not in _PARTS and stage[1] != "_":
        return "scores"
    if stage[0] == "q":
        return "query"
    return "key"


def behind_of(graph: Graph, tensor: TensorRef) -> Iterator[TensorRef]:
    """Yield a tensor and all tensors that it is computed from, the nearest first."""
    for step in graph.back(tensor, lambda _: True):
        yield step.tensor


def _ids_behind(graph: Graph, tensor: TensorRef) -> set[int]:
    return {source.id for source in behind_of(graph, tensor)}


def _is_made_of(graph: Graph, tensor: TensorRef, source: TensorRef) -> bool:
    return any(behind.id == source.id for behind in behind_of(graph, tensor))


def _is_activation(base: str, given: Given) -> bool:
    """Return whether this is the input of a layer: batch, sequence, features."""
    if base in LAYERS:
        return given.role in (*_PARTS, "src", "tgt")
    if base == "linear" and given.role == "input":
        return given.value.is_floating_point()
    return False


def _score_product(graph: Graph, ops: Sequence[Op], softmax: Op | None) -> Product | None:
    """Return the product of the scores: the one before the softmax, or without a softmax the last; None without it."""
    if softmax is None:
        return _last_product(graph, ops)
    masked = softmax.inputs[0]
    over = graph.dimensions.along(masked, int(softmax.args[1]))
    return Meetings(graph).nearest_to(masked, frozenset(over))


def _last_product(graph: Graph, ops: Sequence[Op]) -> Product | None:
    """Return the last product of two activations, unless its factors come from another product."""
    products = [product for product in map(graph.product, ops) if product is not None]
    if not products:
        return None
    last = products[-1]
    sources: set[int] = set()
    for factor in (last.left, last.right):
        for step in graph.back(factor, graph.passes_on):
            sources.add(step.tensor.id)
    for product in products:
        if product.op.output.id in sources:
            return None  # it is not the scores: the softmax is missing
    return last


def _scores(graph: Graph, product: Product, softmax: Op | None) -> dict[str, TensorRef]:
    """Return the completed stages from the product of the scores to the softmax."""
    scores = _scaled(graph, graph.after_call(product.op))
    if softmax is None:
        return {"scores": scores}
    masked = softmax.inputs[0]
    stages = {"scores": scores, "weights": softmax.output}
    if masked.id != scores.id:
        stages["masked_scores"] = masked
    return stages


def _scaled(graph: Graph, scores: TensorRef) -> TensorRef:
    """Return the scores after every scaling that alone reads them."""
    while True:
        readers = graph.recording.consumers.get(scores.id, ())
        if len(readers) != 1:
            return scores
        if not graph.is_scale(readers[0]):
            return scores
        scores = readers[0].output


def _parts(graph: Graph, base: str, operands: Sequence[Given], scored: Op | None) -> dict[str, TensorRef]:
    """Return the operands of the failing call by their role in the attention, found from their positions.

    `scored` is the softmax, or else the product of the scores; None without both.
    """
    if base == SDPA:
        return _given_parts(operands)
    if base != "einsum" and base not in PRODUCTS:
        return {}
    if len(operands) < 2:
        return {}
    left, right = operands[-2:]
    if _is_weight(graph, left) or _is_weight(graph, right):
        return {}
    if scored is None:
        return {"query": left.tensor, "key": right.tensor}
    if _is_made_of(graph, left.tensor, scored.output):
        return {"weights": left.tensor, "value": right.tensor}
    if scored.does("softmax") and _is_made_of(graph, right.tensor, scored.output):
        return {"weights": right.tensor, "value": left.tensor}
    return {}


def _is_weight(graph: Graph, given: Given) -> bool:
    """Return whether an operand is a parameter, or computed from parameters alone."""
    if isinstance(given.value, nn.Parameter):
        return True
    return graph.is_weight(given.tensor)


def _before_product(graph: Graph, factors: Mapping[str, TensorRef]) -> _Completed:
    """Return the stages between the inputs and the factors of products, and the side of each tensor on the way."""
    heads: dict[str, TensorRef] = {}
    sides: dict[int, Whose] = {}
    for role, factor in factors.items():
        way = list(_to_heads(graph, factor, may_swap=role == "key"))
        for tensor in way:
            sides[tensor.id] = _side(role)
        heads[f"{role[0]}_heads"] = way[-1]
    positions: dict[str, set[Axis]] = {role: set() for role in ("query", *factors)}
    ends = projections_behind(graph, heads, "", positions)
    stages = with_projections(graph, heads, ends)
    for name, tensor in stages.items():
        side = _side(name)
        if sides.get(tensor.id, side) == side:
            sides[tensor.id] = side
        else:
            sides[tensor.id] = ""  # a packed projection of query, key and value
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
    while op is not None:
        is_swap = may_swap and op.swaps_last_two
        if not is_swap and not graph.is_scale(op):
            return
        may_swap = False
        yield op.inputs[0]
        op = graph.recording.producer(op.inputs[0])
