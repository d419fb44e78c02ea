"""How far an attention came before the forward failed: its stages, and what each dimension of a tensor is.

`graph.attention` starts from a softmax that is followed by the product with the values, and `naming.axes` from the
product of the scores. Here there may be neither yet. The walk starts from what there is: a softmax, the product of the
scores, or the operands of the call that failed. The evidence that is left for axes: what a projection takes in is
`batch sequence embed`, the view that divides what it gives is `heads head_dim`, and once a call says which operand is
the query and which the key, the sequence of each has its own name. What a variable is called is no evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from typing import Literal

from ...graph.attention import Graph
from ...graph.axis import Axis, Dim, resolve
from ...graph.pairing import as_written, score_product
from ...graph.products import Product
from ...graph.projections import Projections
from ...naming.axes import AxisNames
from ...naming.stages import STAGES
from ...naming.subject import Run
from ...naming.tokens import name_dimension, write_dimension
from ...record.ops import Op, TensorRef
from .operand import ATTENTION, LAYERS, SDPA, Operand

Side = Literal["", "query", "key", "scores"]
"""Whose sequence a tensor has: unknown, the queries', the keys', or queries in rows and keys in columns."""

PRODUCTS = {"matmul", "bmm", "mm", "baddbmm"}
"""Calls that multiply two tensors, by their names without underscores."""

_FAR = 60
"""Tensors that are looked at for the nearest stage."""
_PARTS = ("query", "key", "value")


def side_of_stage(stage: str) -> Side:
    """Return whose sequence a stage has."""
    if stage in _PARTS or stage[1] == "_":
        return "query" if stage[0] == "q" else "key"
    return "scores"


class PartialAxes:
    """The names of axes in a recording that ends early."""

    def __init__(self, graph: Graph, *, batch_first: bool = True, first: Iterable[TensorRef] = ()) -> None:
        self._graph = graph
        self._order = ("batch", "sequence") if batch_first else ("sequence", "batch")
        self._groups: list[tuple[str, Dim]] = []
        self._known: set[Axis] = set()
        self._query: set[Axis] = set()
        self._query_heads = 0
        projections = [op for op in graph.recording.ops if graph.is_projection(op)]
        for op in projections:
            self._learn_heads(graph.after_call(op))
        for tensor in first:
            self._learn_activation(tensor)
        # Only the failing layer is known to take its sequence first: elsewhere the batch is.
        self._order = ("batch", "sequence")
        for op in projections:
            source = graph.before_call(op, graph.projected(op))
            origin = graph.before_moves(source)
            self._learn_activation(origin if len(origin.shape) == 3 else source)
        for op in graph.recording.ops:
            if op.base_name == "embedding":
                self._learn_positions(self._dims(op.inputs[1]))

    def of(self, tensor: TensorRef, side: Side = "") -> str:
        """Return what each dimension is, as an einops pattern."""
        groups = [(self._called(name, group, side), group) for name, group in self._groups]
        dims = self._dims(tensor)
        for axis in {axis for dim in dims for axis in resolve(dim)}:
            if any(set(resolve(axis.twins)) & group for group in self._named("sequence")):
                groups.append(("key", (axis,)))  # the other sequence of a self-attention
        return " ".join(write_dimension(name_dimension(dim, groups)) for dim in dims)

    def _called(self, name: str, group: Dim, side: Side) -> str:
        axes = resolve(group)
        if name == "sequence" and side == "scores":
            return "query" if set(axes) & self._query else "key"
        if name == "heads" and side == "key" and self._query_heads not in (0, prod(axis.size for axis in axes)):
            return "kv_heads"
        return side or name if name == "sequence" else name

    def learn_order(self, operand: TensorRef) -> None:
        """Learn from an operand with heads which axis is the batch: it is with the heads, the sequence is not."""
        dims = self._dims(operand)
        before, after = ({axis for dim in part for axis in dim} for part in (dims[:-2], dims[-2:]))
        heads, batch, sequence = (set().union(*self._named(name)) for name in ("heads", "batch", "sequence"))
        if heads & before and sequence & before and batch & after:
            other = {"batch": "sequence", "sequence": "batch"}
            self._groups = [(other.get(name, name), group) for name, group in self._groups]

    def learn_query(self, operand: TensorRef) -> None:
        """Learn which sequence is the queries', and how many heads they have."""
        inside = {axis for dim in self._dims(operand) for axis in dim}
        heads = next((group for group in self._named("heads") if inside & group), None)
        self._query_heads = 0 if heads is None else prod(axis.size for axis in heads)
        self._query |= inside & set().union(*self._named("sequence"))

    def _named(self, name: str) -> list[set[Axis]]:
        return [set(resolve(group)) for known, group in self._groups if known == name]

    def _learn_activation(self, tensor: TensorRef) -> None:
        """Take a tensor as what a layer takes in: batch, sequence, embed."""
        dims = self._dims(tensor)
        if 2 <= len(dims) <= 3:
            self._learn_positions(dims[:-1])
            self._add("embed", dims[-1])

    def _dims(self, tensor: TensorRef) -> tuple[Dim, ...]:
        return self._graph.dimensions.of(tensor)

    def _add(self, name: str, axes: Iterable[Axis]) -> None:
        dim = resolve(tuple(axes))
        # Of what has one element only a batch is told, by where it is: a view puts others anywhere.
        one = name == "batch" and len(dim) == 1
        if dim and (one or prod(axis.size for axis in dim) > 1) and self._known.isdisjoint(dim):
            self._groups.append((name, dim))
            self._known.update(dim)

    def _learn_positions(self, dims: Sequence[Dim]) -> None:
        """Name what stands before the width: batch and sequence, side by side in one dimension or each in its own."""
        axes = [axis for dim in dims for axis in dim]
        if len(dims) == 2:
            known = {name for name, group in self._groups if not set(axes).isdisjoint(resolve(group))}
            for name, dim in zip(self._order, dims, strict=True):
                if name not in known:
                    self._add(name, dim)
        elif len(dims) == 1 and len(axes) == 2:
            for name, axis in zip(self._order, axes, strict=True):
                self._add(name, (axis,))
        elif len(axes) == 1:
            self._add("sequence", axes)

    def _learn_heads(self, projected: TensorRef) -> None:
        """Name the parts of a width from the first view that divides it."""
        dims = self._dims(projected)
        width = set(dims[-1]) if dims else set()
        for op, _ in self._graph.forward(projected, lambda op: op.kind in ("view", "copy") or op.pointwise):
            if op.kind != "view" or op.base_name in ("split", "split_with_sizes") or op.output.id == projected.id:
                continue
            parts, read = (
                [part for dim in self._dims(tensor) if (part := tuple(axis for axis in dim if axis in width))]
                for tensor in (op.output, op.inputs[0])
            )
            if len(parts) == len(read):
                continue
            sizes = [prod(axis.size for axis in part) for part in parts]
            if len(parts) == 3 and sizes[0] in (2, 3):
                parts = parts[1:]
            elif len(parts) == 3 and sizes[1] in (2, 3):
                parts = [parts[0], parts[2]]
            elif len(parts) == 2 and len(parts[1]) > 1 and parts[1][0].size == 3:
                parts[1] = parts[1][1:]  # query, key and value of a head side by side
            if len(parts) == 2:
                self._add("heads", parts[0])
                self._add("head_dim", parts[1])
                return


@dataclass
class Reached:
    """The stages that there are, and the axes of any tensor."""

    graph: Graph
    axes: PartialAxes
    names: AxisNames | None = None
    """The axes of the attention that the failure belongs to, where that had been computed up to its context."""
    stages: dict[str, TensorRef] = field(default_factory=dict)
    sides: dict[int, Side] = field(default_factory=dict)
    roles: dict[int, str] = field(default_factory=dict)
    """TensorRef id to the side of an operand of the failing call: `query`, `key`, `value`, `weights`."""
    completed: int = 0
    """How many attentions were completed before."""

    def of(self, tensor: TensorRef) -> str:
        """Return what each dimension of a tensor is, as a pattern: its sequence is that of the nearest stage behind."""
        side: Side = next((self.sides[now.id] for now in islice(self.behind(tensor), _FAR) if now.id in self.sides), "")
        return self.axes.of(tensor, side)

    def named(self, operand: Operand) -> Operand:
        """Return an operand with its axes, and what it is to the attention."""
        tensor = operand.tensor
        return replace(
            operand,
            pattern=self.of(tensor),
            part=self.roles.get(tensor.id, ""),
            from_scores=self.is_of_scores(tensor),
            from_parameters=any(self.graph.is_weight(behind) for behind in self.behind(tensor)),
        )

    def of_stage(self, stage: str) -> str:
        """Return the axes of a stage."""
        if self.names is not None:
            return self.names.of_stage(stage)
        return self.axes.of(self.stages[stage], side_of_stage(stage))

    def behind(self, tensor: TensorRef) -> Iterator[TensorRef]:
        """Yield the tensor, and every one that it was made from, the nearest first."""
        return (step.tensor for step in self.graph.back(tensor, lambda _: True))

    def is_made_of(self, tensor: TensorRef, *ids: int) -> bool:
        """Whether one of these tensors went into a tensor."""
        return any(behind.id in ids for behind in self.behind(tensor))

    def is_of_scores(self, tensor: TensorRef) -> bool:
        """Whether this is the scores, scaled or masked at most: not the context, which is a product as well."""
        scores = self.stages.get("scores")
        steps = self.graph.back(tensor, self.graph.carries)
        return scores is not None and any(step.tensor.id == scores.id for step in steps)

    def steps_back(self, tensor: TensorRef) -> Iterator[TensorRef]:
        """Yield a tensor, and what it was before it was moved and scaled."""
        yield tensor
        while (op := self.graph.recording.producer(tensor)) and (self.graph.moves(op) or self.graph.is_scale(op)):
            tensor = op.inputs[0]
            yield tensor


def reach(seen: Run, base: str, operands: Sequence[Operand], *, batch_first: bool = True) -> Reached:
    """Find the stages of the attention that a failing call belongs to.

    Args:
        seen: the run as far as it came.
        base: name of the call, without namespace and underscores.
        operands: what it was given; empty where nothing is known of it.
        batch_first: whether it takes its batch first.
    """
    graph, found = seen.graph, seen.attentions
    first = [operand.tensor for operand in operands if _is_activation(base, operand)]
    reached = Reached(graph, PartialAxes(graph, batch_first=batch_first, first=first))
    reached.completed = len(found)
    contexts = [own.value_product.op.output.id for own, _ in found[-1:] if "output" not in own.projections]
    if contexts and (not operands or any(reached.is_made_of(operand.tensor, *contexts) for operand in operands)):
        # What failed was made from the context of the last one.
        last, reached.names = found[-1]
        # What follows the context may be a part of the very call that failed: a product flattens what it is given.
        reached.stages = {name: tensor for name, tensor in last.stages.items() if name != "concat"}
        reached.completed -= 1
        for name, tensor in last.stages.items():
            reached.sides.setdefault(tensor.id, side_of_stage(name))
        for product in (last.value_product, last.score_product):
            reached.sides[product.op.output.id] = "scores"
        reached.axes.learn_query(last.stages["q_heads"])
        return reached
    _walk(reached, found[-1][0].value_product.op.index + 1 if found else 0, base, operands)
    return reached


def _is_activation(base: str, operand: Operand) -> bool:
    """Whether this is what a layer takes in: batch, sequence, features."""
    if base in LAYERS:
        return operand.role in (*_PARTS, "src", "tgt")
    return base == "linear" and operand.role == "input" and operand.value.is_floating_point()


def _walk(reached: Reached, start: int, base: str, operands: Sequence[Operand]) -> None:
    graph = reached.graph
    tail = graph.recording.ops[start:]
    softmax = next((op for op in reversed(tail) if graph.is_softmax(op)), None)
    product = _score_product(graph, tail, softmax)
    factors: dict[str, TensorRef] = {}
    if product is not None:
        query, key = (as_written(graph, product, tensor) for tensor in (product.left, product.right))
        factors = {"query": query, "key": key}
        _name_scores(reached, product, softmax)
    given = _parts(reached, base, operands, softmax, product)
    reached.roles.update({tensor.id: role for role, tensor in given.items()})
    factors.update({role: tensor for role, tensor in given.items() if role in _PARTS})
    if base == ATTENTION:
        factors = {}
        for operand in operands:
            if operand.role in _PARTS:
                reached.stages[operand.role] = operand.tensor
                reached.sides.setdefault(operand.tensor.id, side_of_stage(operand.role))
    _name_sides(reached, factors)
    for tensor in factors.values():
        reached.axes.learn_order(tensor)
    if "query" in factors:
        reached.axes.learn_query(factors["query"])
    reached.stages = {name: reached.stages[name] for name in STAGES if name in reached.stages}


def _score_product(graph: Graph, tail: tuple[Op, ...], softmax: Op | None) -> Product | None:
    """Return the product of the scores: the one before the softmax, or where there is none yet, the last one."""
    if softmax is not None:
        meeting = score_product(graph, *(graph.softmax(softmax) or (softmax.inputs[0], -1)))
        return None if meeting is None else meeting.product
    last = next((product for op in reversed(tail) if (product := graph.product(op)) is not None), None)
    factors = () if last is None else (last.left, last.right)
    behind = {step.tensor.id for factor in factors for step in graph.back(factor, graph.carries)}
    # What another product goes into is no scores: a softmax was left out, or there is none to come.
    return None if any(graph.product(op) and op.output.id in behind for op in tail) else last


def _name_scores(reached: Reached, product: Product, softmax: Op | None) -> None:
    graph = reached.graph
    scores = graph.after_call(product.op)
    reached.sides[product.op.output.id] = reached.sides[scores.id] = "scores"
    while len(followers := graph.recording.consumers.get(scores.id, ())) == 1 and graph.is_scale(followers[0]):
        scores = followers[0].output
    reached.stages["scores"] = scores
    if softmax is not None:
        masked, _ = graph.softmax(softmax) or (softmax.inputs[0], 0)
        if masked.id != scores.id:
            reached.stages["masked_scores"] = masked
        reached.stages["weights"] = softmax.output


def _parts(
    reached: Reached, base: str, operands: Sequence[Operand], softmax: Op | None, product: Product | None
) -> dict[str, TensorRef]:
    """Return what each operand of the failing call is to the attention, by its place in the call."""
    if base == SDPA:
        return {operand.role: operand.tensor for operand in operands if operand.role in _PARTS}
    if base not in {"einsum", *PRODUCTS} or len(operands) < 2:
        return {}
    if any(operand.is_parameter or reached.graph.is_weight(operand.tensor) for operand in operands[-2:]):
        return {}
    left, right = (operand.tensor for operand in operands[-2:])
    made = softmax or (product.op if product is not None else None)
    if made is None:
        return {"query": left, "key": right}
    for weights, value in ((left, right), (right, left)):
        if reached.is_made_of(weights, made.output.id):
            return {"weights": weights, "value": value}
    return {}


def _name_sides(reached: Reached, factors: dict[str, TensorRef]) -> None:
    """Walk from the operands of products back to what came in, and name what is met."""
    graph, stages = reached.graph, dict[str, TensorRef]()
    for role, tensor in factors.items():
        side = side_of_stage(role)
        reached.sides[tensor.id] = side
        swaps = role == "key"
        while (op := graph.recording.producer(tensor)) is not None and (
            (swaps and op.swaps_last_two) or graph.is_scale(op)
        ):
            tensor, swaps = op.inputs[0], False
            reached.sides[tensor.id] = side
        stages[f"{role[0]}_heads"] = tensor
    projections = Projections(graph)
    projections.put_before(stages, projections.behind(stages, "", {role: set() for role in ("query", *factors)}))
    for name, tensor in stages.items():
        projected = stages.get(f"{name[0]}_proj")
        if not name.endswith("_heads") or projected is None or projected.id != tensor.id:
            reached.stages[name] = tensor
        # One product may serve all three: then it is nobody's own.
        side = side_of_stage(name)
        reached.sides[tensor.id] = side if reached.sides.get(tensor.id) in (None, side) else ""
