"""Attentions that a loop over heads computed one by one are one attention of many heads."""

from __future__ import annotations

from dataclasses import replace

from ..record.ops import Op, TensorRef
from .attention import Attention, positions_of
from .axis import setting
from .dataflow import Graph
from .dimensions import wide


def merge_branches(graph: Graph, attentions: list[Attention]) -> list[Attention]:
    """Put together those that come from the same line and module and meet where heads are joined.

    A head may be a module of its own. Turns of a loop over pieces of a sequence come from one line too, and are joined
    along it: they stay apart.
    """
    groups: dict[tuple[object, ...], list[tuple[Attention, Op | None]]] = {}
    for place, attention in enumerate(attentions):
        meeting = _meeting(graph, attention) if _is_whole(graph, attention) else None
        key: tuple[object, ...] = (place,)
        if meeting is not None:
            written = meeting.base_name == "copy_"
            joined = ("written", meeting.output.storage) if written else ("joined", meeting.index)
            axes = attention.score_product.axes(graph.dimensions)
            # The queries of one softmax: of other pieces of an image they are others.
            queries = frozenset(wide(axes.right_columns if attention.key_first else axes.left_rows))
            lines = attention.softmax.source, attention.score_product.op.source
            key = (*lines, _owner(graph, attention, meeting), joined, queries)
        groups.setdefault(key, []).append((attention, meeting))
    merged = [attention for group in groups.values() for attention in _merge(group)]
    return sorted(merged, key=lambda attention: attention.softmax.index)


def _is_whole(graph: Graph, attention: Attention) -> bool:
    """Return whether the scores have everything that comes in, and not one query or a piece of the sequence."""
    if "query" not in attention.stages or not attention.stages["query"].shape:
        return True
    axes = attention.score_product.axes(graph.dimensions)
    queries = set(wide(axes.columns if attention.key_first else axes.rows))
    outside = set(wide(*positions_of(attention, graph.dimensions, "query")))
    return queries <= outside <= {*axes.batch, *axes.rows, *axes.columns}


def _owner(graph: Graph, attention: Attention, meeting: Op) -> str | int:
    """Return what turns of a loop have in common: their module, or where that is a head's what its query is made of."""
    if meeting.module == attention.module or "query" not in attention.projections:
        return attention.module
    outside = set(wide(*positions_of(attention, graph.dimensions, "query")))
    several = set(wide(attention.score_product.axes(graph.dimensions).batch)) - outside
    return attention.module if several else graph.before_moves(attention.stages["query"]).id


def _meeting(graph: Graph, attention: Attention) -> Op | None:
    """Return the operation that puts this context beside others, head by head; None where there is none."""

    def through(op: Op) -> bool:
        return graph.moves(op) or op.base_name == "native_dropout"

    for op, step in graph.forward(attention.stages["context"], through):
        if not op.outputs or len(op.inputs) < 2:
            continue
        if op.base_name == "stack":
            return op
        if op.base_name == "cat" and _has_features(graph, attention, step.tensor, setting(op, 1, "dim", 0)):
            return op
        if op.base_name == "copy_" and op.inputs[0].id != step.tensor.id:
            cut = _cut(graph, op.inputs[0])
            if cut is None:
                continue
            same_rank = len(cut.output.shape) == len(step.tensor.shape)
            if cut.base_name == "select" or (
                same_rank and _has_features(graph, attention, step.tensor, setting(cut, 1, "dim", 0))
            ):
                return op
    return None


def _cut(graph: Graph, written: TensorRef) -> Op | None:
    """Return the operation that cut what is written to out of a larger tensor; None where nothing did."""
    op = graph.recording.producer(written)
    while op is not None and op.kind == "view" and op.inputs:
        if op.base_name in ("select", "slice") and op.output.numel < op.inputs[0].numel:
            return op
        op = graph.recording.producer(op.inputs[0])
    return None


def _has_features(graph: Graph, attention: Attention, context: TensorRef, place: int) -> bool:
    """Return whether a dimension of the context, as it was moved, holds the features of the head."""
    axes = attention.value_product.axes(graph.dimensions)
    features = set(axes.rows if attention.value_first else axes.columns)
    dims = graph.dimensions.of(context)
    return bool(dims) and bool(features & set(dims[place % len(dims)]))


def _merge(group: list[tuple[Attention, Op | None]]) -> list[Attention]:
    """Return one attention of all its turns; each for itself where two have the same scores."""
    turns = [attention for attention, _ in group]
    (first, meeting), last = group[0], turns[-1]
    scores = {(turn.stages["q_heads"].id, turn.stages["k_heads"].id) for turn in turns}
    if len(turns) == 1 or len(scores) < len(turns):
        return turns
    apart = len({turn.module for turn in turns}) > 1
    # The last turn is the one whose walk reaches what comes after the loop, also where a buffer is filled.
    after = {name: last.stages[name] for name in ("concat", "output") if name in last.stages}
    output = {"output": last.projections["output"]} if "output" in last.projections else {}
    return [
        replace(
            first,
            stages=first.stages | after,
            projections=first.projections | output,
            branches=tuple(turns),
            joined_in=meeting.module if apart and meeting is not None else None,
        )
    ]
