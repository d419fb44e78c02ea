"""Attentions that a loop over heads computed one by one are one attention of many heads."""

from __future__ import annotations

from dataclasses import replace

from ..record.ops import Op, TensorRef
from .dimensions import wide
from .found import Attention, positions_of
from .pieces import setting
from .walk import Graph


def merge_branches(graph: Graph, found: list[Attention]) -> list[Attention]:
    """Put together those that come from the same line and module and meet where heads are joined.

    Turns of a loop over pieces of a sequence come from one line too, and are joined along it: they stay apart.
    """
    groups: dict[tuple[object, ...], list[Attention]] = {}
    for place, attention in enumerate(found):
        joined = _joined(graph, attention) if _is_whole(graph, attention) else None
        key = (attention.softmax.source, attention.score_product.op.source, attention.module, joined)
        groups.setdefault((place,) if joined is None else key, []).append(attention)
    return sorted(map(_merge, groups.values()), key=lambda attention: attention.softmax.index)


def _joined(graph: Graph, found: Attention) -> tuple[str, int] | None:
    """Where this context is put beside others, head by head: by which operation, or into which memory."""

    def through(op: Op) -> bool:
        return graph.moves(op) or (op.kind == "compute" and op.base_name == "native_dropout")

    for op, step in graph.forward(found.stages["context"], through):
        if not op.outputs or len(op.inputs) < 2:
            continue
        rank = len(op.output.shape)
        if op.base_name == "stack":
            return "joined", op.index
        if op.base_name == "cat" and _has_features(graph, found, step.tensor, setting(op, 1, "dim", 0) % rank):
            return "joined", op.index
        if op.base_name == "copy_" and op.inputs[0].id != step.tensor.id:
            cut = _cut(graph, op.inputs[0])
            if cut is not None and (cut.base_name == "select" or _cuts_features(graph, found, cut, step.tensor)):
                return "written", op.output.storage
    return None


def _cut(graph: Graph, written: TensorRef) -> Op | None:
    """The operation that cut what is written to out of a larger tensor."""
    op = graph.recording.producer(written)
    while op is not None and op.kind == "view" and op.inputs:
        if op.base_name in ("select", "slice") and op.output.numel < op.inputs[0].numel:
            return op
        op = graph.recording.producer(op.inputs[0])
    return None


def _cuts_features(graph: Graph, found: Attention, cut: Op, context: TensorRef) -> bool:
    rank = len(cut.output.shape)
    return rank == len(context.shape) and _has_features(graph, found, context, setting(cut, 1, "dim", 0) % rank)


def _has_features(graph: Graph, found: Attention, context: TensorRef, place: int) -> bool:
    """Whether a dimension of the context, as it was moved, holds the features of the head."""
    axes = found.value_product.axes(graph.dimensions)
    features = set(axes.rows if found.value_first else axes.columns)
    dims = graph.dimensions.of(context)
    return place < len(dims) and bool(features & set(dims[place]))


def _is_whole(graph: Graph, found: Attention) -> bool:
    """Whether the scores have everything that comes in, and not one query or a piece of the sequence."""
    if "query" not in found.stages or not found.stages["query"].shape:
        return True
    axes = found.score_product.axes(graph.dimensions)
    rows = axes.columns if found.key_first else axes.rows
    outside = set(wide(*positions_of(found, graph.dimensions, "query")))
    return outside <= {*axes.batch, *axes.rows, *axes.columns} and set(wide(rows)) <= outside


def _merge(group: list[Attention]) -> Attention:
    first = group[0]
    if len(group) == 1:
        return first
    # The last turn is the one whose walk reaches what comes after the loop, also where a buffer is filled.
    last = group[-1]
    return replace(
        first,
        stages={**first.stages, **{name: last.stages[name] for name in ("concat", "output") if name in last.stages}},
        projections={**first.projections, **{n: op for n, op in last.projections.items() if n == "output"}},
        branches=tuple(group),
    )
