"""Say who sees whom in an attention, from its weights: which queries give weight to which keys, and which to none.

No mask is looked for, and none is computed again: what a softmax gave is noted while it runs (`record.sight`), whether
or not tensors are kept. On meta, and where a kernel has too many scores, there is nothing to read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import Graph
from ..record.ops import Op, TensorRef
from ..record.sight import MASKED_BELOW, Sight
from .axes import AxisNames
from .canonical import canonical, sizes_in
from .pattern import dims_of

_FAR = 60
"""Operations after which a walk gives up: a mask is made of less."""

Rows = tuple[tuple[int, int], ...]
"""(batch, query) of each."""


def sees(weights: Tensor, scores: Tensor | None = None) -> Tensor:
    """Return which query gives weight to which key, in any head: `batch heads query key` as a bool `batch query key`.

    Queries without a key that is left see nothing, whatever their weights are: `scores`, masks included, tell those.
    """
    seen = weights.nan_to_num(0.0) != 0
    if scores is not None and scores.shape == weights.shape:
        seen &= scores.amax(-1, keepdim=True) > MASKED_BELOW
    return seen.any(1)


def is_causal(seen: Tensor, shifts: Iterable[int] | None = None) -> bool:
    """Return whether no query sees behind its own position, and some see that: of a bool `query key`.

    The queries begin at one of the keys in `shifts`; where none are given they are the first or the last of more keys,
    as with a cache. Where no query at all sees a later key it is padding that masks them.
    """
    queries, keys = seen.shape
    if queries < 2 or keys < 2:
        return False
    shifts = {0, max(keys - queries, 0)} if shifts is None else shifts
    return any(
        bool(seen.any(0)[1 + shift :].any())
        and not bool(seen.triu(1 + shift).any())
        and bool(seen.diagonal(shift).any())
        for shift in shifts
    )


@dataclass(frozen=True, eq=False)
class Visibility:
    """Who sees whom in one attention."""

    seen: Tensor | None
    """`query key`: whether a query of any row and head sees the key; None where there are too many to keep."""
    blind: Rows
    """The queries to which no key is left in at least one head, in order."""


def visibility(graph: Graph, attention: Attention, names: AxisNames) -> Visibility | None:
    """Return who sees whom in an attention of a run; None where its weights were never made, or have unnamed axes."""
    turns = [_of_turn(graph, turn, attention, names) for turn in attention.branches or (attention,)]
    known = [turn for turn in turns if turn is not None]
    if not known or len(known) < len(turns):
        return None
    pairs = [turn.seen for turn in known if turn.seen is not None]
    whole = len(pairs) == len(known) and all(own.shape == pairs[0].shape for own in pairs)
    return Visibility(
        torch.stack(pairs).any(0) if whole else None, tuple(sorted({row for turn in known for row in turn.blind}))
    )


def is_causal_attention(graph: Graph, attention: Attention, names: AxisNames) -> bool:
    """Return whether no query of an attention sees its future.

    Without weights to read, as on meta, it counts that a triangle was cut out where a mask was made.
    """
    queries, keys = names.lengths
    if queries < 2 or keys < 2:
        return False
    known = visibility(graph, attention, names)
    if known is None or known.seen is None:
        return any(_is_cut(graph, tensor) for op in attention.masks for tensor in masks_of(graph, attention, op))
    if names.num_windows > 1:
        return is_causal(known.seen, _shifts_of_windows(graph, attention, names))
    # Keys of the layer's own have no position; nor have sinks, which stand beside the scores.
    given = _given_keys(attention, names) or keys
    first, last = known.seen[:, :given], known.seen[:, -given:]
    return any(is_causal(part) for part in (known.seen, first, last))


def _shifts_of_windows(graph: Graph, attention: Attention, names: AxisNames) -> list[int]:
    """Return the keys at which the queries of a window may begin: among those beside it, which the first has not all.

    With `[before, own, after]` for keys the first window sees none of those before, and so shows where its own begin.
    """
    queries, keys = names.lengths
    starts = list(range(0, keys - queries + 1, queries))
    dims = dims_of(names.of_stage("weights"))
    sight = _noted(graph, attention)
    if sight is None or ["windows"] not in dims or ["key"] not in dims:
        return starts
    window, key = dims.index(["windows"]), dims.index(["key"])
    pair = sight.pairs.get((min(window, key), max(window, key)))
    if pair is None:
        return starts
    seen = (pair if window < key else pair.T)[0].nonzero()
    start = int(seen[0]) // queries * queries if len(seen) else 0
    return [start] if start else starts


def _given_keys(attention: Attention, names: AxisNames) -> int | None:
    """Return how many keys come in; None where the recording does not show it."""
    if "key" not in attention.stages:
        return None
    axes = dims_of(names.of_stage("key"))
    return attention.stages["key"].shape[axes.index(["key"])] if ["key"] in axes else None


def _of_turn(graph: Graph, turn: Attention, attention: Attention, names: AxisNames) -> Visibility | None:
    if "weights" not in turn.stages:
        return None
    weights, axes = turn.stages["weights"], dims_of(names.of_stage("weights"))
    sight = _noted(graph, turn)
    queries, keys = ([place for place, dim in enumerate(axes) if name in dim] for name in ("query", "key"))
    if sight is None or len(queries) != 1 or len(keys) != 1 or queries == keys:
        return None
    sizes = sizes_in(attention, names, "weights")
    pair = (queries[0], keys[0])
    seen = sight.pairs.get((min(pair), max(pair)))
    if not sight.pairs:
        seen = torch.ones(names.lengths, dtype=torch.bool)
    elif seen is not None:
        seen = _by_position(seen if pair[0] < pair[1] else seen.T, axes[pair[0]], "query", sizes)
        seen = None if seen is None else _by_position(seen.T, axes[pair[1]], "key", sizes)
        seen = None if seen is None else seen.T
    blind: Rows = ()
    if sight.blind is not None and sight.blind.shape[pair[1]] == 1:  # else the softmax is over another axis
        shape = [1 if place == pair[1] else size for place, size in enumerate(weights.shape)]
        rows = canonical(sight.blind.expand(shape), "weights", names.of_stage("weights"), sizes)
        if rows is not None:
            blind = tuple((batch, query) for batch, query in rows.any(1)[..., 0].nonzero().tolist())
    return Visibility(seen, blind)


def _noted(graph: Graph, turn: Attention) -> Sight | None:
    """Return what was noted of the weights of an attention, or of the exponentials that they were made of by hand."""
    sights, queue = graph.recording.sights, [turn.softmax.output]
    first, shape = turn.score_product.op.index, turn.softmax.output.shape
    for _ in range(_FAR):
        if not queue:
            return None
        tensor = queue.pop(0)
        if tensor.id in sights and tensor.shape == shape:
            return sights[tensor.id]
        op = graph.recording.producer(tensor)
        if op is not None and op.index > first:
            queue += [read for read in op.inputs if read.shape == shape]
    return None


def _by_position(seen: Tensor, dim: list[str], name: str, sizes: dict[str, int]) -> Tensor | None:
    """Return a bool whose first dimension is the positions of one name alone, of which any other may see."""
    if len(dim) == 1:
        return seen
    known = [sizes.get(word, -1) for word in dim]
    if known.count(-1) > 1:
        return None
    split = seen.reshape(*known, seen.shape[-1])
    others = [place for place, word in enumerate(dim) if word != name]
    return split.any(others)


def masks_of(graph: Graph, attention: Attention, op: Op) -> list[TensorRef]:
    """Return what an operation that masks scores reads besides them."""
    product = attention.score_product.op
    mixing = {mixing.op.index for mixing in attention.mixed_scores}

    def through(op: Op) -> bool:
        return (graph.carries(op) and not op.base_name.endswith("_like")) or op.index in mixing

    def is_scores(tensor: TensorRef) -> bool:
        return any(step.tensor.id == product.output.id for step in graph.back(tensor, through))

    return [op.inputs[0]] if op is product else [tensor for tensor in op.inputs if not is_scores(tensor)]


def _is_cut(graph: Graph, tensor: TensorRef) -> bool:
    """Return whether a tensor was made with a triangle."""
    queue, looked_at = [tensor], set[int]()
    while queue and len(looked_at) < _FAR:
        op: Op | None = graph.recording.producer(queue.pop())
        if op is None or op.index in looked_at:
            continue
        if op.base_name.startswith(("tril", "triu")):
            return True
        looked_at.add(op.index)
        queue += op.inputs
    return False
