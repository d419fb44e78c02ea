"""Find which query attends to which key, from the weights, and the kind of an attention: self, cross, causal, grouped.

No mask is searched for or recomputed: the result of each softmax is noted during the run (`record.sight`), even if no
tensors are kept. On meta, and in kernels with too many scores, there are no weights to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph.attention import Attention
from ..graph.dataflow import Graph, inside
from ..graph.kernels import places_of
from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from ..record.sight import MASKED_BELOW, OPEN, Sight, any_along, joined_sight, narrowed
from ..reports.trace import PIECES_OF_TOKENS, WITHIN_TOKENS
from .axes import AxisNames
from .canonical import canonical, sizes_in
from .named_run import NamedRun
from .operand_path import OperandPath, fills_memory
from .pattern import Dims, dims_of

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
    if scores is None or scores.shape != weights.shape:
        return seen
    has_keys = scores.amax(-1, keepdim=True) > MASKED_BELOW
    return (seen & has_keys) | scores.isnan()


def is_causal(seen: Tensor, shifts: Iterable[int] | None = None) -> bool:
    """Return whether no query attends to a later position, and some attend to their own: of a bool `query key`.

    The first query is at one of the keys in `shifts`. By default the queries are the first or the last of the keys, as
    with a cache. Later keys to which no query attends at all are padding.
    """
    queries, keys = seen.shape
    if queries < 2 or keys < 2:
        return False
    if shifts is None:
        shifts = {0, max(keys - queries, 0)}
    return any(_is_causal_at(seen, shift) for shift in shifts)


def _is_causal_at(seen: Tensor, shift: int) -> bool:
    """Return whether no query attends to a later position, if the first query is at this key."""
    if bool(seen.triu(1 + shift).any()):
        return False
    # Keys after the first query that no query attends to at all are padding: then nothing is masked out.
    if not bool(seen.any(0)[1 + shift :].any()):
        return False
    diagonal = seen.diagonal(shift)
    if shift == 0:
        return bool(diagonal.any())
    # A query without any key says nothing about its position.
    sees_nothing = ~seen.any(1)[: len(diagonal)]
    return bool(diagonal.any() and (diagonal | sees_nothing).all())


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
    is_alike: bool = True
    """Whether all turns of a loop over heads see the same keys; True without a loop."""


def visibility(graph: Graph, attention: Attention, names: AxisNames) -> Visibility | None:
    """Return which query attends to which key in a run; None if the weights were never made, or an axis has no name."""
    turns: list[Visibility] = []
    for turn in attention.branches or (attention,):
        visible = _of_turn(graph, turn, attention, names)
        if visible is None:
            return None
        turns.append(visible)
    blind: set[tuple[int, int]] = set()
    for visible in turns:
        blind.update(visible.blind)
    heads = turns[0].blind_heads
    if len(turns) > 1:
        heads = _blind_heads_of_turns(turns, attention, names)
    whole = _seen_in_any(turns)
    is_alike = whole is None or all(turn.seen is not None and torch.equal(turn.seen, whole) for turn in turns)
    return Visibility(whole, tuple(sorted(blind)), heads, is_alike)


def _seen_in_any(turns: Iterable[Visibility]) -> Tensor | None:
    """Return which query attends to which key in any turn of a loop; None if it is unknown in one, or sizes differ."""
    whole: Tensor | None = None
    for turn in turns:
        if turn.seen is None:
            return None
        if whole is None:
            whole = turn.seen
        elif whole.shape != turn.seen.shape:
            return None
        else:
            whole = whole | turn.seen
    return whole


def _blind_heads_of_turns(
    turns: list[Visibility],
    attention: Attention,
    names: AxisNames,
) -> tuple[int, ...] | None:
    """Return `Visibility.blind_heads` of a loop over heads, from that of each turn."""
    heads: list[int] = []
    distinct: set[Rows] = set()
    for head, turn in enumerate(turns):
        if turn.blind:
            heads.append(head)
            distinct.add(turn.blind)
    if len(turns) != names.num_heads or not attention.branches or len(distinct) != 1:
        return None
    return () if len(heads) == len(turns) else tuple(heads)


def _blind_heads(rows: Tensor) -> tuple[int, ...] | None:
    """Return `Visibility.blind_heads` of marked rows, `batch heads query`."""
    distinct: set[tuple[int, ...]] = set()
    for item, query in rows.any(1).nonzero().tolist():
        of_query = rows[item, :, query]
        distinct.add(tuple(of_query.nonzero().flatten().tolist()))
    if len(distinct) != 1:
        return None
    (heads,) = distinct
    return () if len(heads) == rows.shape[1] else heads


def _of_turn(
    graph: Graph,
    turn: Attention,
    attention: Attention,
    names: AxisNames,
) -> Visibility | None:
    """Return which query attends to which key in one turn of a loop over heads, or in an attention without a loop."""
    sight = noted(graph, turn)
    present = [stage for stage in ("weights", "scores") if stage in turn.stages]
    if sight is None or not present:
        return None
    stage = present[0]
    shape = turn.stages[stage].shape
    dims = dims_of(names.of_stage(stage))
    queries, keys = _places_of("query", dims), _places_of("key", dims)
    if len(keys) != 1 or len(queries) > 1 or queries == keys:
        return None
    (key,) = keys
    if not queries:  # a single query has no axis
        if names.lengths != (1, shape[key]):
            return None
        pair = _pair(sight, 0, key) if key else None
        return Visibility(None if pair is None else pair.any(0)[None], ())
    (query,) = queries
    sizes = sizes_in(attention, names, stage)
    seen = _seen_by_position(sight, dims, query, key, sizes, names.lengths)
    blind = _blind_rows(sight, stage, shape, key, sizes, names)
    if blind is None:
        return Visibility(seen, ())
    rows: list[list[int]] = blind.any(1).nonzero().tolist()
    pairs = tuple((item, row) for item, row in rows)
    return Visibility(seen, pairs, _blind_heads(blind))


def _places_of(name: str, dims: Dims) -> list[int]:
    """Return the dimensions with a name in them: 1 for `query` in `batch (query positions) key`."""
    return [place for place, dim in enumerate(dims) if name in dim]


def _seen_by_position(
    sight: Sight,
    dims: Dims,
    query: int,
    key: int,
    sizes: dict[str, int],
    lengths: tuple[int, int],
) -> Tensor | None:
    """Return `query key`: whether the query attends to the key; None if it is unknown."""
    if not sight.pairs:
        return torch.ones(*lengths, dtype=torch.bool)
    seen = _pair(sight, query, key)
    if seen is not None:
        seen = _by_position(seen, dims[query], "query", sizes)
    if seen is not None:
        seen = _by_position(seen.T, dims[key], "key", sizes)
    return None if seen is None else _without_sinks(seen.T, lengths[1])


def _without_sinks(seen: Tensor, keys: int) -> Tensor:
    """Return `query key` without sinks, which are no keys, and come last or first."""
    if seen.shape[1] <= keys:
        return seen
    are_last = bool(seen[:, keys:].all())
    return seen[:, :keys] if are_last else seen[:, -keys:]


def _blind_rows(
    sight: Sight,
    stage: str,
    shape: tuple[int, ...],
    key: int,
    sizes: dict[str, int],
    names: AxisNames,
) -> Tensor | None:
    """Return `batch heads query`: whether every key is masked out; None if it is for no query, or unknown."""
    if sight.blind is None or sight.blind.shape[key] != 1:  # the softmax is over another axis
        return None
    one_key = list(shape)
    one_key[key] = 1
    whole = sight.blind.expand(one_key)
    rows = canonical(whole, stage, names.of_stage(stage), sizes, names.head_order)
    return None if rows is None else rows[..., 0]


def _pair(sight: Sight, first: int, second: int) -> Tensor | None:
    """Return for two dimensions of the weights where any weight is not zero."""
    if first < second:
        return sight.pairs.get((first, second))
    pair = sight.pairs.get((second, first))
    return None if pair is None else pair.T


def noted(graph: Graph, turn: Attention) -> Sight | None:
    """Return the note about the weights of an attention, or about the exponentials of a softmax written by hand."""
    if turn.pieces:
        return _noted_in_pieces(graph, turn)
    sights = graph.recording.sights
    first = turn.score_product.op.index
    weights = turn.softmax.output
    shape = weights.shape
    queue = [weights]
    for tensor, _ in zip(queue, range(_FAR), strict=False):  # the queue grows in this loop
        if tensor.id in sights and tensor.shape == shape:
            sight = sights[tensor.id]
            if turn.seen is None:
                return sight
            return narrowed(sight, turn.seen, turn.softmax_dim)
        op = graph.recording.producer(tensor)
        if op is not None and op.index > first:
            queue += [read for read in op.inputs if read.shape == shape]
    # Nothing was noted of e.g. squares: what is set to zero afterwards was measured.
    return None if turn.seen is None else narrowed(OPEN, turn.seen, turn.softmax_dim)


def _noted_in_pieces(graph: Graph, turn: Attention) -> Sight | None:
    """Return the note about weights that are computed in pieces; None if it lacks one, or their place is unknown."""
    whole = turn.softmax.output.shape
    sights: list[Sight] = []
    shapes: list[tuple[int, ...]] = []
    for piece in turn.pieces:
        sight = noted(graph, piece)
        if sight is None:
            return None
        sights.append(sight)
        shapes.append(piece.softmax.output.shape)
    if len(shapes[0]) != len(whole):
        return None
    for place, size in enumerate(whole):
        if size != shapes[0][place]:
            return joined_sight(sights, shapes, place, turn.softmax_dim % len(whole))
    return None


def _by_position(
    seen: Tensor,
    dim: list[str],
    name: str,
    sizes: dict[str, int],
) -> Tensor | None:
    """Return a bool whose first dimension is the positions of one name; other axes of it are joined by or."""
    if len(dim) == 1:
        return seen
    shape = [sizes.get(word, -1) for word in dim]
    if shape.count(-1) > 1:
        return None
    others = [place for place, word in enumerate(dim) if word != name]
    split = seen.reshape(*shape, seen.shape[-1])
    return split.any(others)


# -- causal -----------------------------------------------------------------------------------------------------------


def _is_causal_attention(graph: Graph, attention: Attention, names: AxisNames) -> bool:
    """Return whether no query of an attention attends to a later position.

    Without weights to read, e.g. on meta, a mask made with tril or triu counts as causal.
    """
    queries, keys = names.lengths
    if queries < 2 or keys < 2:
        return False
    visible = visibility(graph, attention, names)
    if visible is None or visible.seen is None:
        return _has_triangular_mask(graph, attention)
    seen = visible.seen
    if names.num_windows > 1:
        return is_causal(seen, _shifts_of_windows(graph, attention, names))
    # Keys that the layer appends have no position, and sinks have none either.
    given = keys
    if "key" in attention.stages:
        axes = dims_of(names.of_stage("key"))
        if ["key"] in axes:
            given = attention.stages["key"].shape[axes.index(["key"])]
    filled = filled_slots(graph, attention, seen)
    first = seen[:, :given]
    last = seen[:, -given:]
    return is_causal(filled) or is_causal(first) or is_causal(last)


def _has_triangular_mask(graph: Graph, attention: Attention) -> bool:
    """Return whether a mask is made with tril or triu."""
    for op in attention.masks:
        if _is_triangular(op):
            return True
        for tensor in masks_of(graph, attention, op):
            if any(map(_is_triangular, _makers(graph, tensor))):
                return True
    return False


def _is_triangular(op: Op) -> bool:
    return op.base_name.startswith(("tril", "triu")) or places_of(op).are_plainly_causal


def filled_slots(graph: Graph, attention: Attention, seen: Tensor) -> Tensor:
    """Return the columns of `query key` up to the last seen key, if keys are written into memory of fixed size."""
    if bool(seen[:, -1:].any()):
        return seen
    turn = attention.turns[0]
    path = OperandPath(graph, turn, "key", from_first="key" in turn.earlier)
    is_cache = any(fills_memory(path, op) for op in path.ops)
    if not is_cache or not bool(seen.any()):
        return seen
    last = int(seen.any(0).nonzero().max())
    return seen[:, : last + 1]


def window_of(seen: Tensor) -> int | None:
    """Return how many keys, its own included, a query sees back, of a bool `query key`; None without a limit.

    The queries are the first or the last of the keys. Keys that no query sees are padding.
    """
    queries, keys = seen.shape
    is_used = any_along(seen, [0])
    if queries < 2 or bool((seen | ~is_used).all()):
        return None
    used = is_used.nonzero().flatten()
    rows = any_along(seen, [1]).nonzero().flatten()
    if bool(seen[rows[-1], used[0]]):
        return None  # the last query sees all of them back
    numbers = seen[rows].to(torch.uint8)
    first = numbers.argmax(1)
    last = keys - 1 - numbers.flip(1).argmax(1)
    for shift in sorted({0, keys - queries}):
        places = rows + shift
        back = int((places - first).max())
        ahead = int((last - places).max())
        is_limited_before = int(used[0]) < int(places[-1]) - back
        is_limited_after = ahead == 0 or int(used[-1]) > int(places[0]) + ahead
        if back < 0 or ahead < 0 or not (is_limited_before and is_limited_after):
            continue
        band = torch.ones(queries, keys, dtype=torch.bool).tril(shift + ahead).triu(shift - back)
        if bool((band & is_used)[rows].equal(seen[rows])):
            return back + 1
    return None


def _shifts_of_windows(graph: Graph, attention: Attention, names: AxisNames) -> list[int]:
    """Return the keys at which the queries of a window may begin, if a window also has keys of its neighbours.

    With keys `[before, own, after]` the first window has no keys before it, so it shows where its own keys begin.
    """
    queries, keys = names.lengths
    start = _first_key_of_windows(graph, attention, names) // queries * queries
    if start:
        return [start]
    return list(range(0, keys - queries + 1, queries))


def _first_key_of_windows(graph: Graph, attention: Attention, names: AxisNames) -> int:
    """Return the first key that the queries of the first window see; 0 if it is unknown."""
    stage = "weights" if "weights" in attention.stages else "scores"
    dims = dims_of(names.of_stage(stage))
    sight = noted(graph, attention)
    if sight is None or ["windows"] not in dims or ["key"] not in dims:
        return 0
    windows, keys = dims.index(["windows"]), dims.index(["key"])
    pair = _pair(sight, windows, keys)
    if pair is None or not bool(pair[0].any()):
        return 0
    return int(pair[0].nonzero()[0])


def masks_of(graph: Graph, attention: Attention, op: Op) -> list[TensorRef]:
    """Return the tensors that a masking operation reads besides the scores."""
    if op.is_step:
        # Where packed sequences start is named, and is no number that is added.
        return list(op.inputs[1 : len(op.args)])
    product = attention.turns[0].score_product.op
    mixing = {mixing.op.index for mixing in attention.mixed_scores}

    def through(op: Op) -> bool:
        if op.index in mixing:
            return True
        return graph.passes_on(op) and not op.base_name.endswith("_like")

    def is_scores(tensor: TensorRef) -> bool:
        steps = graph.back(tensor, through)
        return any(step.tensor.id == product.output.id for step in steps)

    return [tensor for tensor in op.inputs if not is_scores(tensor)]


def _makers(graph: Graph, tensor: TensorRef) -> Iterator[Op]:
    """Yield the operations behind a tensor, as many as a mask needs at most."""
    queue = [tensor]
    passed: set[int] = set()
    while queue and len(passed) < _FAR:
        op = graph.recording.producer(queue.pop())
        if op is not None and op.index not in passed:
            yield op
            passed.add(op.index)
            queue += op.inputs


# -- kinds ------------------------------------------------------------------------------------------------------------


def kinds_of(run: NamedRun) -> list[tuple[str, ...]]:
    """Return the kind of each attention of a run, in order.

    In self attention, query and key come from one tensor. In causal attention, no query attends to a later key. If
    heads attend to heads, no key is later.
    """
    return run.read_once(_kind_of)


def _kind_of(run: NamedRun, attention: Attention, names: AxisNames) -> tuple[str, ...]:
    """Return the words for the kind of one attention: `self`, `causal`."""
    within = ""
    if names.within_tokens:
        within = WITHIN_TOKENS
    elif names.mixes_positions and names.num_heads > 1:
        within = PIECES_OF_TOKENS
    words = [_source(run, attention), within]
    if not names.within_tokens and _is_causal_attention(run.graph, attention, names):
        words.append("causal")
    if names.num_kv_heads < names.num_heads:
        words.append("grouped")
    return tuple(word for word in words if word)


def mask_notes(run: NamedRun, leaves: Mapping[int, Tensor]) -> tuple[str, ...]:
    """Return a sentence if a mask of 0 and 1 is added to the scores; its numbers are in `leaves` or in a kept run."""
    added: set[int] = set()
    for masks in run.read_once(_added_masks):
        added.update(tensor.id for tensor in masks)
    for number in leaves.keys() & added:
        value = leaves[number]
        if value.is_meta:
            continue
        # Ones alone change no weight: a bias may start as ones.
        numbers = torch.unique(value.float()).tolist()
        if numbers == [0.0, 1.0]:
            return (
                "The mask has the numbers 0 and 1 and is added to the scores, so it masks out no key. "
                "Use bool, or -inf for each masked key.",
            )
    return ()


def _added_masks(run: NamedRun, attention: Attention, names: AxisNames) -> tuple[TensorRef, ...]:
    """Return the masks that are added to the scores, as they were before they were viewed or copied."""
    added: list[TensorRef] = []
    for op in attention.masks:
        masks = [] if op.does("fills") else masks_of(run.graph, attention, op)
        if len(masks) != 1:
            continue
        mask = masks[0]
        if mask.dtype != "bool" and 1 < mask.numel <= _LARGEST:
            added.append(run.graph.before_moves(mask))
    return tuple(added)


def _source(run: NamedRun, attention: Attention) -> str:
    """Return `self` or `cross`; empty if the recording does not show the origin of query and key."""
    graph, stages = run.graph, attention.stages
    query = stages.get("query", stages["q_heads"])
    key = stages.get("key", stages["k_heads"])
    if not _within(run, attention, query).isdisjoint(_within(run, attention, key)):
        return "self"
    if "query" in stages and "key" in stages:
        return "cross"
    of_query = graph.inputs_of(query)
    of_key = graph.inputs_of(key)
    if not of_query or not of_key or of_query == of_key:
        return ""
    if "query" in stages or "key" in stages:
        return "cross"
    # If both came in as heads, they may have been projected from one tensor outside.
    heads = {graph.before_moves(query).id, graph.before_moves(key).id}
    return "" if of_query <= heads or of_key <= heads else "cross"


def _within(run: NamedRun, attention: Attention, side: TensorRef) -> set[int]:
    """Return the ids of the tensors that a query or a key is made of, position by position, in the attention's module.

    Norms, down-projections and a pooling of positions may come before the stage `query` or `key`.
    """
    modules = [attention.module]
    for name in ("query", "key"):
        if name in attention.projections:
            modules.append(attention.projections[name].module)
    for name in ("query", "key"):
        # Another projection may come before the module.
        op = run.graph.producer(run.graph.before_moves(attention.stages.get(name, side)))
        if op is not None and run.graph.is_projection(op):
            modules.append(op.module)
    owner = _common_owner(modules)
    reached: set[int] = set()
    queue = [side]
    while queue and len(reached) < _FAR:
        tensor = queue.pop()
        if tensor.id in reached:
            continue
        if run.graph.comes_from_inputs(tensor):
            reached.add(tensor.id)
        op = run.recording.producer(tensor)
        if op is not None and (inside(op.module, owner) or run.graph.moves(op)):
            queue += _with_same_positions(run.graph, op, tensor)
    return reached


def _common_owner(modules: Iterable[str]) -> str:
    """Return the innermost module with all of these inside: `block` of `block.attention` and `block.query`."""
    owner: list[str] = []
    for names in zip(*(module.split(".") for module in modules), strict=False):
        if len(set(names)) > 1:
            break
        owner.append(names[0])
    return ".".join(owner)


def _with_same_positions(graph: Graph, op: Op, tensor: TensorRef) -> Sequence[TensorRef]:
    """Return what an operation reads that has the positions of its result, before a pooling of these."""
    if graph.is_projection(op) or graph.is_by_channel(op):
        return [graph.projected(op)]
    if op.does("joins"):  # e.g. a learned token, and the tensors of an input
        given = [read for read in op.inputs if read.numel and graph.comes_from_inputs(read)]
        return given if len(given) == 1 else []
    if op.does("pools") or axes_rule(op.base_name) == "reduce":
        return op.inputs[:1]
    if graph.moves(op):
        return op.inputs
    if op.pointwise or op.does("norms"):
        return [read for read in op.inputs if read.numel == tensor.numel]
    return []
