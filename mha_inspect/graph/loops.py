"""Attentions that a loop over heads computed one by one are one attention of many heads."""

from __future__ import annotations

from dataclasses import replace

from ..record.ops import Op, TensorRef
from .attention import Attention, positions_of
from .axis import setting
from .dataflow import Graph
from .dimensions import Axis, wide

_CUTS = ("select", "slice", "unbind", "split", "split_with_sizes")
"""Operations that take a part of one dimension."""


def merge_branches(graph: Graph, found: list[Attention]) -> list[Attention]:
    """Put together those that come from the same line and module and meet where heads are joined.

    A head may be a module of its own. Turns of a loop over pieces of a sequence come from one line too, and are joined
    along it: they stay apart.
    """
    groups: dict[tuple[object, ...], list[Attention]] = {}
    for place, attention in enumerate(found):
        joined = _joined(graph, attention) if _is_whole(graph, attention) else None
        lines = attention.softmax.source, attention.score_product.op.source
        key = (*lines, _owner(graph, attention), joined, _queries(graph, attention))
        groups.setdefault((place,) if joined is None else key, []).append(attention)
    merged = [one for group in groups.values() for one in _merge(graph, group)]
    return sorted(merged, key=lambda attention: attention.softmax.index)


def _owner(graph: Graph, found: Attention) -> str | int:
    """What turns of one loop have in common: their module, or where that is a head's own what its query is made of."""
    meeting = _meeting(graph, found)
    if meeting is None or meeting.module == found.module or "query" not in found.projections:
        return found.module
    outside = set(wide(*positions_of(found, graph.dimensions, "query")))
    several = set(wide(found.score_product.axes(graph.dimensions).batch)) - outside
    return found.module if several else graph.before_moves(found.stages["query"]).id


def _queries(graph: Graph, found: Attention) -> frozenset[Axis]:
    """The axes of the queries of one softmax: of other pieces of an image they are others."""
    axes = found.score_product.axes(graph.dimensions)
    return frozenset(wide(axes.right_columns if found.key_first else axes.left_rows))


def _joined(graph: Graph, found: Attention) -> tuple[str, int] | None:
    """Where this context is put beside others, head by head: by which operation, or into which memory."""
    op = _meeting(graph, found)
    if op is None:
        return None
    return ("written", op.output.storage) if op.base_name == "copy_" else ("joined", op.index)


def _meeting(graph: Graph, found: Attention) -> Op | None:
    """The operation that puts this context beside others, head by head."""

    def through(op: Op) -> bool:
        return graph.moves(op) or (op.kind == "compute" and op.base_name == "native_dropout")

    for op, step in graph.forward(found.stages["context"], through):
        if not op.outputs or len(op.inputs) < 2:
            continue
        if op.base_name in ("cat", "stack"):
            place = setting(op, 1, "dim", 0) % len(op.output.shape)
            if op.base_name == "stack" or _has_features(graph, found, step.tensor, place):
                return op
        if op.base_name == "copy_" and op.inputs[0].id != step.tensor.id:
            cut = _cut(graph, op.inputs[0])
            if cut is not None and (cut.base_name == "select" or _cuts_features(graph, found, cut, step.tensor)):
                return op
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


def _merge(graph: Graph, group: list[Attention]) -> list[Attention]:
    """One attention of all its turns; each for itself where they are not all of them."""
    first = group[0]
    if len({(own.stages["q_heads"].id, own.stages["k_heads"].id) for own in group}) < len(group) or len(group) == 1:
        return group  # the same scores, for another part of the values
    meeting = _meeting(graph, first) if len({own.module for own in group}) > 1 else None
    # The last turn is the one whose walk reaches what comes after the loop, also where a buffer is filled.
    last = group[-1]
    merged = replace(
        first,
        stages={**first.stages, **{name: last.stages[name] for name in ("concat", "output") if name in last.stages}},
        projections={**first.projections, **{n: op for n, op in last.projections.items() if n == "output"}},
        branches=tuple(group),
        joined_in=None if meeting is None else meeting.module,
    )
    return [merged]
