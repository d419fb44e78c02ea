"""Find which query attends to which key, from the weights, and the kind of an attention: self, cross, causal, grouped.

No mask is searched for or recomputed: the result of each softmax is noted during the run (`record.sight`), even if no
tensors are kept. On meta, and in kernels with too many scores, there are no weights to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import Graph, inside
from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from ..record.sight import MASKED_BELOW, Sight, joined_sight, narrowed
from ..reports.trace import PIECES_OF_TOKENS, WITHIN_TOKENS
from .axes import AxisNames
from .canonical import canonical, sizes_in
from .named_run import NamedRun
from .operand_path import OperandPath
from .pattern import dims_of

_FAR = 60
"""Operations after which a walk gives up: masks need fewer."""
_LARGEST = 1 << 24
"""Largest number of elements of a mask whose content is read."""


Rows = tuple[tuple[int, int], ...]
"""(batch item, query) of each."""


def sees(weights: Tensor, scores: Tensor | None = None) -> Tensor:
    """Return which query attends to which key, in any head: `batch heads query key` as a bool `batch query key`.

    A query with every key masked out attends to none, whatever its weights. Masked `scores` show it; NaN is no mask.
    """
    return sees_by_head(weights, scores).any(1)


def sees_by_head(weights: Tensor, scores: Tensor | None = None) -> Tensor:
    """Return which query attends to which key in each head, as `sees` does: a bool `batch heads query key`."""
    seen = weights.nan_to_num(0.0) != 0
    if scores is not None and scores.shape == weights.shape:
        seen = seen & (scores.amax(-1, keepdim=True) > MASKED_BELOW) | scores.isnan()
    return seen


def is_causal(seen: Tensor, shifts: Iterable[int] | None = None) -> bool:
    """Return whether no query attends to a later position, and some attend to their own: of a bool `query key`.

    The first query is at one of the keys in `shifts`. By default the queries are the first or the last of the keys, as
    with a cache. Later keys to which no query attends at all are padding.
    """
    queries, keys = seen.shape
    if queries < 2 or keys < 2:
        return False
    return any(
        bool(seen.any(0)[1 + shift :].any())
        and not bool(seen.triu(1 + shift).any())
        and bool((own := seen.diagonal(shift)).any() and (shift == 0 or (own | ~seen.any(1)[: len(own)]).all()))
        for shift in ({0, max(keys - queries, 0)} if shifts is None else shifts)
    )


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which query attends to which key in one attention."""

    seen: Tensor | None
    """`query key`: whether the query attends to the key in any batch item and head; None if too large to keep."""
    blind: Rows
    """The queries with every key masked out in at least one head, in order."""
    blind_heads: tuple[int, ...] | None = None
    """The heads in which every query of `blind` has every key masked out, if it has a key in every other head; empty if
    these are all heads. None if they differ by query, or are unknown."""


def visibility(graph: Graph, attention: Attention, names: AxisNames) -> Visibility | None:
    """Return which query attends to which key in a run; None if the weights were never made, or an axis has no name."""
    turns = [_of_turn(graph, turn, attention, names) for turn in attention.branches or (attention,)]
    known = [turn for turn in turns if turn is not None]
    if not known or len(known) < len(turns):
        return None
    pairs = [turn.seen for turn in known if turn.seen is not None]
    whole = len(pairs) == len(known) and len({seen.shape for seen in pairs}) == 1
    blind = sorted({row for turn in known for row in turn.blind})
    heads = known[0].blind_heads if len(known) == 1 else _blind_heads_of_turns(known, attention, names)
    return Visibility(torch.stack(pairs).any(0) if whole else None, tuple(blind), heads)


def _blind_heads_of_turns(turns: list[Visibility], attention: Attention, names: AxisNames) -> tuple[int, ...] | None:
    """Return `Visibility.blind_heads` of a loop over heads, from that of each turn."""
    blind = {turn.blind for turn in turns if turn.blind}
    if len(turns) != names.num_heads or not attention.branches or len(blind) != 1:
        return None
    heads = tuple(head for head, turn in enumerate(turns) if turn.blind)
    return () if len(heads) == len(turns) else heads


def _blind_heads(rows: Tensor) -> tuple[int, ...] | None:
    """Return `Visibility.blind_heads` of marked rows, `batch heads query`."""
    heads = {tuple(rows[item, :, query].nonzero().flatten().tolist()) for item, query in rows.any(1).nonzero().tolist()}
    if len(heads) != 1:
        return None
    (same,) = heads
    return () if len(same) == rows.shape[1] else same


def _of_turn(graph: Graph, turn: Attention, attention: Attention, names: AxisNames) -> Visibility | None:
    """Return which query attends to which key in one turn of a loop over heads, or in an attention without a loop."""
    sight = noted(graph, turn)
    stage = next((name for name in ("weights", "scores") if name in turn.stages), None)
    if sight is None or stage is None:
        return None
    axes, shape = names.of_stage(stage), turn.stages[stage].shape
    dims, sizes = dims_of(axes), sizes_in(attention, names, stage)
    queries, keys = ([place for place, dim in enumerate(dims) if name in dim] for name in ("query", "key"))
    if len(keys) == 1 and not queries and names.lengths == (1, shape[keys[0]]):  # a single query has no axis
        pair = _pair(sight, 0, keys[0]) if keys[0] else None
        return Visibility(None if pair is None else pair.any(0)[None], ())
    if len(queries) != 1 or len(keys) != 1 or queries == keys:
        return None
    query, key = queries[0], keys[0]
    seen = _pair(sight, query, key)
    if not sight.pairs:
        seen = torch.ones(*names.lengths, dtype=torch.bool)
    elif seen is not None:
        of_query = _by_position(seen, dims[query], "query", sizes)
        of_both = None if of_query is None else _by_position(of_query.T, dims[key], "key", sizes)
        seen = None if of_both is None else of_both.T
    if seen is not None and seen.shape[1] > names.lengths[1]:  # sinks, which are no keys, come last or first
        is_last = bool(seen[:, names.lengths[1] :].all())
        seen = seen[:, : names.lengths[1]] if is_last else seen[:, -names.lengths[1] :]
    blind: Rows = ()
    heads: tuple[int, ...] | None = None
    if sight.blind is not None and sight.blind.shape[key] == 1:  # otherwise the softmax is over another axis
        whole = sight.blind.expand([1 if place == key else size for place, size in enumerate(shape)])
        rows = canonical(whole, stage, axes, sizes, names.head_order)
        if rows is not None:
            blind = tuple((row, at) for row, at in rows.any(1)[..., 0].nonzero().tolist())
            heads = _blind_heads(rows[..., 0])
    return Visibility(seen, blind, heads)


def _pair(sight: Sight, first: int, second: int) -> Tensor | None:
    """Return for two dimensions of the weights where any weight is not zero."""
    pair = sight.pairs.get((min(first, second), max(first, second)))
    return pair if pair is None or first < second else pair.T


def noted(graph: Graph, turn: Attention) -> Sight | None:
    """Return the note about the weights of an attention, or about the exponentials of a softmax written by hand."""
    if turn.pieces:
        known = [sight for piece in turn.pieces if (sight := noted(graph, piece)) is not None]
        whole, *shapes = (each.softmax.output.shape for each in (turn, *turn.pieces))
        if len(shapes[0]) != len(whole):
            return None
        place = next((at for at, size in enumerate(whole) if size != shapes[0][at]), None)
        dim, complete = turn.softmax_dim % len(whole), len(known) == len(shapes)
        return joined_sight(known, shapes, place, dim) if complete and place is not None else None
    sights, queue = graph.recording.sights, [turn.softmax.output]
    first, shape = turn.score_product.op.index, turn.softmax.output.shape
    for tensor, _ in zip(queue, range(_FAR), strict=False):  # the queue grows in this loop
        if tensor.id in sights and tensor.shape == shape:
            sight = sights[tensor.id]
            return sight if turn.seen is None else narrowed(sight, turn.seen, turn.softmax_dim)
        op = graph.recording.producer(tensor)
        if op is not None and op.index > first:
            queue += [read for read in op.inputs if read.shape == shape]
    return None


def _by_position(seen: Tensor, dim: list[str], name: str, sizes: dict[str, int]) -> Tensor | None:
    """Return a bool whose first dimension is the positions of one name; other axes of it are joined by or."""
    known = [sizes.get(word, -1) for word in dim]
    if len(dim) == 1 or known.count(-1) > 1:
        return seen if len(dim) == 1 else None
    return seen.reshape(*known, seen.shape[-1]).any([place for place, word in enumerate(dim) if word != name])


# -- causal -----------------------------------------------------------------------------------------------------------


def _is_causal_attention(graph: Graph, attention: Attention, names: AxisNames) -> bool:
    """Return whether no query of an attention attends to a later position.

    Without weights to read, e.g. on meta, a mask made with tril or triu counts as causal.
    """
    queries, keys = names.lengths
    if queries < 2 or keys < 2:
        return False
    known = visibility(graph, attention, names)
    if known is None or known.seen is None:
        masks = (tensor for op in attention.masks for tensor in masks_of(graph, attention, op))
        makers = (op for tensor in masks for op in _makers(graph, tensor))
        return any(op.base_name.startswith(("tril", "triu")) for op in (*attention.masks, *makers))
    if names.num_windows > 1:
        return is_causal(known.seen, _shifts_of_windows(graph, attention, names))
    filled = filled_slots(graph, attention, known.seen)
    # Keys that the layer appends have no position, and sinks have none either.
    axes = dims_of(names.of_stage("key")) if "key" in attention.stages else []
    given = attention.stages["key"].shape[axes.index(["key"])] if ["key"] in axes else keys
    return any(map(is_causal, (filled, known.seen[:, :given], known.seen[:, -given:])))


def filled_slots(graph: Graph, attention: Attention, seen: Tensor) -> Tensor:
    """Return the columns of `query key` up to the last seen key, if keys are written into memory of fixed size."""
    if bool(seen[:, -1:].any()):
        return seen
    path = OperandPath(graph, attention.turns[0], "key", from_first="key" in attention.turns[0].earlier)
    is_cache = any(op.kind == "write" and op.inputs and op.inputs[0].id not in path.reached for op in path.ops)
    return seen[:, : int(seen.any(0).nonzero().max()) + 1] if is_cache and bool(seen.any()) else seen


def window_of(seen: Tensor) -> int | None:
    """Return how many keys, its own included, a query sees back, of a bool `query key`; None without a limit.

    The queries are the first or the last of the keys. Keys that no query sees are padding.
    """
    queries, keys = seen.shape
    known = seen.any(0)
    if queries < 2 or bool(seen[:, known].all()):
        return None
    rows = seen.any(1).nonzero().flatten()
    numbers = seen.to(torch.uint8)
    first, last = numbers.argmax(1), keys - 1 - numbers.flip(1).argmax(1)
    number = torch.cat((torch.zeros(1, dtype=torch.long), known.cumsum(0)))  # of known keys before each
    if bool((number[last + 1] - number[first] != seen.sum(1))[rows].any()):
        return None
    for shift in sorted({0, keys - queries}):
        back, ahead = int((rows + shift - first[rows]).max()), int((last[rows] - rows - shift).max())
        lowest, highest = (rows + shift - back).clamp(0), (rows + shift + ahead + 1).clamp(0, keys)
        whole = bool((number[highest.clamp(lowest)] - number[lowest] == seen.sum(1)[rows]).all()) and back >= 0 <= ahead
        limited = bool((number[lowest] > 0).any()), bool((number[highest] < number[-1]).any())
        if whole and limited[0] and (ahead == 0 or limited[1]):
            return back + 1
    return None


def _shifts_of_windows(graph: Graph, attention: Attention, names: AxisNames) -> list[int]:
    """Return the keys at which the queries of a window may begin, if a window also has keys of its neighbours.

    With keys `[before, own, after]` the first window has no keys before it, so it shows where its own keys begin.
    """
    queries, keys = names.lengths
    stage = "weights" if "weights" in attention.stages else "scores"
    dims, sight = dims_of(names.of_stage(stage)), noted(graph, attention)
    named = sight is not None and ["windows"] in dims and ["key"] in dims
    pair = _pair(sight, dims.index(["windows"]), dims.index(["key"])) if sight is not None and named else None
    seen = [] if pair is None else pair[0].nonzero().flatten().tolist()
    start = seen[0] // queries * queries if seen else 0
    return [start] if start else list(range(0, keys - queries + 1, queries))


def masks_of(graph: Graph, attention: Attention, op: Op) -> list[TensorRef]:
    """Return the tensors that a masking operation reads besides the scores."""
    product = attention.turns[0].score_product.op
    mixing = {mixing.op.index for mixing in attention.mixed_scores}

    def through(op: Op) -> bool:
        return (graph.passes_on(op) and not op.base_name.endswith("_like")) or op.index in mixing

    def is_scores(tensor: TensorRef) -> bool:
        return any(step.tensor.id == product.output.id for step in graph.back(tensor, through))

    return [tensor for tensor in op.inputs if not is_scores(tensor)]


def _makers(graph: Graph, tensor: TensorRef) -> Iterator[Op]:
    """Yield the operations behind a tensor, as many as a mask needs at most."""
    queue, known = [tensor], set[int]()
    while queue and len(known) < _FAR:
        op = graph.recording.producer(queue.pop())
        if op is not None and op.index not in known:
            yield op
            known.add(op.index)
            queue += op.inputs


# -- kinds ------------------------------------------------------------------------------------------------------------


def kinds_of(run: NamedRun) -> list[tuple[str, ...]]:
    """Return the kind of each attention of a run, in order.

    In self attention, query and key come from one tensor. In causal attention, no query attends to a later key. If
    heads attend to heads, no key is later.
    """
    return run.read_once(_kind_of)


def _kind_of(run: NamedRun, attention: Attention, names: AxisNames) -> tuple[str, ...]:
    causal = "causal" if _is_causal_attention(run.graph, attention, names) else ""
    grouped = "grouped" if names.num_kv_heads < names.num_heads else ""
    within = ""
    if names.within_tokens:
        within, causal = WITHIN_TOKENS, ""
    elif names.mixes_positions and names.num_heads > 1:
        within = PIECES_OF_TOKENS
    return tuple(word for word in (_source(run, attention), within, causal, grouped) if word)


def mask_notes(run: NamedRun, leaves: Mapping[int, Tensor]) -> tuple[str, ...]:
    """Return a sentence if a mask of 0 and 1 is added to the scores; its numbers are in `leaves` or in a kept run."""
    added = {tensor.id for masks in run.read_once(_added_masks) for tensor in masks}
    for value in (leaves[number] for number in leaves.keys() & added):
        # Ones alone change no weight: a bias may start as ones.
        if not value.is_meta and torch.unique(value.float()).tolist() == [0.0, 1.0]:
            return (
                "The mask has the numbers 0 and 1 and is added to the scores, so it masks out no key. "
                "Use bool, or -inf for each masked key.",
            )
    return ()


def _added_masks(run: NamedRun, attention: Attention, names: AxisNames) -> tuple[TensorRef, ...]:
    """Return the masks that are added to the scores, as they were before they were viewed or copied."""
    added = []
    for op in attention.masks:
        masks = [] if op.does("fills") else masks_of(run.graph, attention, op)
        if len(masks) == 1 and masks[0].dtype != "bool" and 1 < masks[0].numel <= _LARGEST:
            added.append(run.graph.before_moves(masks[0]))
    return tuple(added)


def _source(run: NamedRun, attention: Attention) -> str:
    """Return `self` or `cross`; empty if the recording does not show the origin of query and key."""
    stages, before = attention.stages, run.graph.before_moves
    query, key = stages.get("query", stages["q_heads"]), stages.get("key", stages["k_heads"])
    left, right = before(query), before(key)
    memory = {(side.storage, side.offset, side.shape, side.stride) for side in (left, right)}
    makers = [run.recording.producer(side) for side in (left, right)]  # another projection may come before
    made_of = {before(run.graph.projected(op)).id if op and run.graph.is_projection(op) else None for op in makers}
    alike = left.id == right.id or len(memory) == 1 or (len(made_of) == 1 and None not in made_of)
    if alike or _within(run, attention, query) & _within(run, attention, key):
        return "self"
    if "query" in stages and "key" in stages:
        return "cross"
    given = [run.graph.inputs_of(side) for side in (query, key)]
    # If both came in as heads, they may have been projected from one tensor outside.
    made = "query" in stages or "key" in stages or not any(inputs <= {left.id, right.id} for inputs in given)
    return "cross" if made and all(given) and given[0] != given[1] else ""


def _within(run: NamedRun, attention: Attention, side: TensorRef) -> set[int]:
    """Return the ids of the tensors that a query or a key is made of, position by position, in the attention's module.

    Norms, down-projections and a pooling of positions may come before the stage `query` or `key`.
    """
    ops = [attention.projections[name] for name in ("query", "key") if name in attention.projections]
    paths = zip(*(path.split(".") for path in (attention.module, *(op.module for op in ops))), strict=False)
    owner = ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, paths))
    graph, reached, queue = run.graph, set[int](), [side]
    while queue and len(reached) < _FAR:
        tensor = queue.pop()
        if tensor.id in reached:
            continue
        if graph.comes_from_inputs(tensor):
            reached.add(tensor.id)
        op = run.recording.producer(tensor)
        if op is None or not inside(op.module, owner):
            continue
        if graph.is_projection(op) or graph.is_by_channel(op):
            queue.append(graph.projected(op))
        elif op.does("joins"):  # e.g. a learned token, and the tensors of an input
            given = [read for read in op.inputs if read.numel and graph.comes_from_inputs(read)]
            queue += given if len(given) == 1 else []
        elif op.does("pools") or axes_rule(op.base_name) == "reduce":
            queue.append(op.inputs[0])
        elif graph.moves(op) or op.pointwise or op.does("norms"):
            queue += [read for read in op.inputs if read.numel == tensor.numel or graph.moves(op)]
    return reached
