"""How far an attention came before the forward failed: its stages by name, as far as the dataflow shows them.

`attention` starts from a softmax that is followed by the product with the values. Here the walk starts from what there
is: a softmax, the product of the scores, or the operands of the call that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...graph.attention import Attention, Graph, Step
from ...graph.pairing import as_written
from ...graph.products import Product
from ...naming.axes import AxisNames
from ...naming.stages import STAGES
from ...record.ops import Op, TensorRef
from ...record.subject import Run
from .axes import PartialAxes, Side, Tokens

PRODUCTS = {"matmul", "bmm", "mm", "baddbmm"}
"""Calls that multiply two tensors, by their names without underscores."""

_FAR = 60
_SPLITS = {"split", "split_with_sizes", "slice", "select", "unbind"}


@dataclass(frozen=True)
class Failing:
    """The call that failed, as the recording knows it."""

    base_name: str
    """Name of the function, without namespace and underscores."""
    operands: tuple[tuple[str, TensorRef], ...]
    """Role (may be empty) and tensor of each."""
    parameters: frozenset[int] = frozenset()
    """Ids of the operands that are parameters."""
    batch_first: bool = True
    activations: tuple[TensorRef, ...] = ()
    """Operands that a layer takes in: a projection's input."""


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
    others: tuple[tuple[Attention, AxisNames], ...] = ()
    """Attentions that were completed before."""

    def of(self, tensor: TensorRef) -> tuple[Tokens, ...]:
        """What each dimension of a tensor is."""
        return self.axes.of(tensor, self.side(tensor))

    def behind(self, tensor: TensorRef) -> Iterator[TensorRef]:
        """The tensor, and every one that it was made from."""
        queue, seen = [tensor], {tensor.id}
        while queue:
            now = queue.pop()
            yield now
            op = self.graph.recording.producer(now)
            for earlier in op.inputs if op is not None else ():
                if earlier.id not in seen:
                    seen.add(earlier.id)
                    queue.append(earlier)

    def side(self, tensor: TensorRef) -> Side:
        """Whose sequence a tensor has: that of the nearest stage that it was made from."""
        queue, seen = [tensor], {tensor.id}
        for _ in range(_FAR):
            if not queue:
                break
            now = queue.pop(0)
            if now.id in self.sides:
                return self.sides[now.id]
            op = self.graph.recording.producer(now)
            for behind in op.inputs if op is not None else ():
                if behind.id not in seen:
                    seen.add(behind.id)
                    queue.append(behind)
        return ""


def reach(seen: Run, failing: Failing | None) -> Reached:
    """Find the stages of the attention that the failure belongs to."""
    graph = seen.graph
    first = () if failing is None else failing.activations
    reached = Reached(graph, PartialAxes(graph, batch_first=failing is None or failing.batch_first, first=first))
    found = seen.attentions
    if found and "output" not in found[-1][0].projections and _belongs(reached, found[-1][0], failing):
        reached.names, reached.stages = found[-1][1], dict(found[-1][0].stages)
        # What follows the context may be a part of the very call that failed: a product flattens what it is given.
        reached.stages.pop("concat", None)
        reached.others = found[:-1]
        _take_sides(reached, found[-1][0])
        return reached
    reached.others = found
    start = found[-1][0].value_product.op.index + 1 if found else 0
    _walk(reached, start, failing)
    return reached


def _take_sides(reached: Reached, found: Attention) -> None:
    for name, tensor in found.stages.items():
        side: Side = "scores"
        if name in ("query", "key", "value") or name[1] == "_":
            side = "query" if name[0] == "q" else "key"
        reached.sides.setdefault(tensor.id, side)
    for product in (found.value_product, found.score_product):
        reached.sides[product.op.output.id] = "scores"
    reached.axes.learn_query(found.stages["q_heads"])


def _belongs(reached: Reached, found: Attention, failing: Failing | None) -> bool:
    """Whether what failed was made from this attention's context."""
    if failing is None:
        return True
    context = found.value_product.op.output.id
    return any(behind.id == context for _, tensor in failing.operands for behind in reached.behind(tensor))


def _walk(reached: Reached, start: int, failing: Failing | None) -> None:
    graph = reached.graph
    tail = graph.recording.ops[start:]
    softmax = next((op for op in reversed(tail) if graph.is_softmax(op)), None)
    product = _score_product(graph, tail, softmax)
    operands: dict[str, TensorRef] = {}
    if product is not None:
        query, key = (as_written(graph, product, tensor) for tensor in (product.left, product.right))
        operands = {"query": query, "key": key}
        _name_scores(reached, product, softmax)
    if failing is not None:
        roles = dict(failing.operands)
        given = _given(reached, failing, softmax, product)
        reached.roles.update({tensor.id: role for role, tensor in given.items()})
        operands.update({role: tensor for role, tensor in given.items() if role in ("query", "key", "value")})
        if failing.base_name == "multi_head_attention":
            reached.stages.update({role: roles[role] for role in ("query", "key", "value") if role in roles})
            operands = {}
            for role in ("query", "key", "value"):
                if role in roles:
                    reached.sides.setdefault(roles[role].id, "query" if role == "query" else "key")
    for role, tensor in operands.items():
        _name_side(reached, role, tensor)
    for tensor in operands.values():
        reached.axes.learn_order(tensor)
    if "query" in operands:
        reached.axes.learn_query(operands["query"])
    reached.stages = {name: reached.stages[name] for name in STAGES if name in reached.stages}


def _score_product(graph: Graph, tail: tuple[Op, ...], softmax: Op | None) -> Product | None:
    """The product of the scores: the one before the softmax, or where there is none yet, the last one."""
    if softmax is None:
        last = next((product for op in reversed(tail) if (product := graph.product(op)) is not None), None)
        behind = () if last is None else _products_behind(graph, (last.left, last.right))
        # What another product goes into is no scores: a softmax was left out, or there is none to come.
        return None if any(one.op.index >= tail[0].index for one in behind) else last
    return next(_products_behind(graph, (softmax.inputs[0],)), None)


def _products_behind(graph: Graph, tensors: Iterable[TensorRef]) -> Iterator[Product]:
    """The products that tensors come from, with nothing between but what is done to scores."""
    for tensor in tensors:
        for step in graph.back(tensor, graph.carries):
            op = graph.recording.producer(step.tensor)
            if op is not None and (product := graph.product(op)) is not None:
                yield product


def _name_scores(reached: Reached, product: Product, softmax: Op | None) -> None:
    graph = reached.graph
    scores = graph.after_call(product.op)
    reached.sides[product.op.output.id] = reached.sides[scores.id] = "scores"
    follower = _only_scale(graph, scores)
    while follower is not None:
        scores = follower
        follower = _only_scale(graph, scores)
    reached.stages["scores"] = scores
    if softmax is None:
        return
    masked, _ = graph.softmax(softmax) or (softmax.inputs[0], 0)
    if masked.id != scores.id:
        reached.stages["masked_scores"] = masked
    reached.stages["weights"] = softmax.output


def _only_scale(graph: Graph, tensor: TensorRef) -> TensorRef | None:
    followers = graph.recording.consumers.get(tensor.id, ())
    return followers[0].output if len(followers) == 1 and graph.is_scale(followers[0]) else None


def _given(reached: Reached, failing: Failing, softmax: Op | None, product: Product | None) -> dict[str, TensorRef]:
    """What each operand of the failing call is to the attention, by its place in the call."""
    graph, named = reached.graph, dict(failing.operands)
    if failing.base_name == "scaled_dot_product_attention":
        return {role: named[role] for role in ("query", "key", "value") if role in named}
    tensors = [tensor for _, tensor in failing.operands]
    if failing.base_name == "einsum":
        tensors = tensors[-2:]
    elif failing.base_name not in PRODUCTS:
        return {}
    if len(tensors) < 2 or any(t.id in failing.parameters or graph.is_weight(t) for t in tensors[-2:]):
        return {}
    left, right = tensors[-2:]
    if softmax is not None:
        made = softmax.output.id
    elif product is not None:
        made = product.op.output.id
    else:
        return {"query": left, "key": right}
    for weights, value in ((left, right), (right, left)):
        if any(behind.id == made for behind in reached.behind(weights)):
            return {"weights": weights, "value": value}
    return {}


def _name_side(reached: Reached, role: str, operand: TensorRef) -> None:
    """Walk from an operand of a product back to what came in, and name what is met."""
    graph, letter = reached.graph, role[0]
    side: Side = "query" if role == "query" else "key"
    reached.sides[operand.id] = side
    tensor = operand
    while (op := graph.recording.producer(tensor)) is not None:
        swaps = role == "key" and op.swaps_last_two and tensor.id == operand.id
        if not (swaps or graph.is_scale(op)):
            break
        tensor = op.inputs[0]
        reached.sides[tensor.id] = side
    for step in graph.back(tensor, lambda op: not graph.operands(op)):
        op = graph.recording.producer(step.tensor)
        if op is None or not graph.is_projection(op):
            continue
        projected = graph.after_call(op)
        source = graph.before_call(op, graph.projected(op))
        reached.stages[role] = source
        piece = _piece(step, tensor)
        if piece is None or len(piece.shape) <= len(projected.shape):
            reached.stages[f"{letter}_proj"] = piece or projected
        # One product may serve all three: then it is nobody's own.
        for tensor_id in (projected.id, source.id):
            known = reached.sides.get(tensor_id)
            reached.sides[tensor_id] = side if known in (None, side) else ""
        if tensor.id != projected.id:
            reached.stages[f"{letter}_heads"] = tensor
        return
    reached.stages[f"{letter}_heads"] = tensor


def _piece(step: Step, heads: TensorRef) -> TensorRef | None:
    """What a shared projection was split into for one side alone; None where it was not split."""
    for place in range(len(step.path) - 1, -1, -1):
        if step.path[place].base_name in _SPLITS:
            reads = step.path[place - 1].inputs if place else (heads,)
            made = {tensor.id for tensor in step.path[place].outputs}
            return next((tensor for tensor in reads if tensor.id in made), None)
    return None
