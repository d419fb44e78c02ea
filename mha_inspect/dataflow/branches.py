"""Attentions that a loop over heads computed one by one are one attention of many heads."""

from __future__ import annotations

from dataclasses import replace

from ..ops import Op, Tensor
from ..stages import STAGES
from .found import Found
from .graph import Graph

_SHARED = ("query", "key", "value", "concat", "output")


def merge_branches(graph: Graph, found: list[Found]) -> list[Found]:
    """Put together those that come from the same line and module and meet where heads are joined.

    Turns of a loop over pieces of a sequence come from one line too, and are joined along it: they stay apart.
    """
    groups: dict[tuple[object, ...], list[tuple[Found, Tensor]]] = {}
    for place, attention in enumerate(found):
        joined = _joined(graph, attention)
        key = (
            (attention.softmax.source, attention.score_product.source, attention.module, joined[0].index)
            if joined is not None
            else (place,)
        )
        groups.setdefault(key, []).append((attention, joined[1] if joined is not None else attention.softmax.output))
    merged = [_merge([attention for attention, _ in group]) for group in groups.values()]
    return sorted(merged, key=lambda attention: attention.softmax.index)


def _joined(graph: Graph, found: Found) -> tuple[Op, Tensor] | None:
    """The operation that puts this context beside others, head by head, and the operand that it is there."""
    context = found.stages["context"]

    def through(op: Op) -> bool:
        return graph.moves(op) or (op.kind == "compute" and op.base_name == "native_dropout")

    for op, step in graph.forward(context, through):
        if op.base_name not in ("cat", "stack") or len(op.inputs) < 2 or not op.outputs:
            continue
        rank = len(op.output.shape)
        dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
        place = int(dim) % rank
        if op.base_name == "stack":
            return (op, step.tensor) if _whole_queries(graph, found) else None
        features = set(graph.dimensions.of(found.value_product.output)[-2 if found.value_first else -1])
        at = graph.dimensions.of(step.tensor)[place] if len(step.tensor.shape) == rank else ()
        return (op, step.tensor) if features & set(at) and any(atom.size > 1 for atom in at) else None
    return None


def _whole_queries(graph: Graph, found: Found) -> bool:
    """Whether every query is there, and not one piece of the sequence."""
    if "query" not in found.stages:
        return True
    rows = graph.dimensions.of(found.score_product.output)[-1 if found.key_first else -2]
    outside = {atom for dim in graph.dimensions.of(found.stages["query"]) for atom in dim}
    return all(atom in outside for atom in rows if atom.size > 1)


def _merge(group: list[Found]) -> Found:
    first = group[0]
    if len(group) == 1:
        return first
    last = group[-1]
    stages = dict(first.stages)
    for name in _SHARED:
        # The last turn is the one whose walk reaches what comes after the loop, also where a buffer is filled.
        if name in last.stages and name in ("concat", "output"):
            stages[name] = last.stages[name]
    ordered = {name: stages[name] for name in STAGES if name in stages}
    return replace(
        first,
        stages=ordered,
        projections={**first.projections, **{n: op for n, op in last.projections.items() if n == "output"}},
        branches=tuple(group),
    )
