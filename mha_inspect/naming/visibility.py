"""Say who sees whom in an attention, from its weights, and what kind that makes it: self or cross, causal, grouped.

Seen is which queries give weight to which keys, and which to none. No mask is looked for, and none is computed again:
what a softmax gave is noted while it runs (`record.sight`), whether or not tensors are kept. On meta, and where a
kernel has too many scores, there is nothing to read.
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
from ..record.sight import MASKED_BELOW, Sight
from .axes import AxisNames
from .canonical import canonical, sizes_in
from .named_run import NamedRun
from .pattern import dims_of

_FAR = 60
"""Operations after which a walk gives up: a mask is made of less."""
_LARGEST = 1 << 24
"""Elements of a mask up to which its content is looked at."""

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
    return any(
        bool(seen.any(0)[1 + shift :].any())
        and not bool(seen.triu(1 + shift).any())
        and bool(seen.diagonal(shift).any())
        for shift in ({0, max(keys - queries, 0)} if shifts is None else shifts)
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
    whole = len(pairs) == len(known) and len({seen.shape for seen in pairs}) == 1
    blind = sorted({row for turn in known for row in turn.blind})
    return Visibility(torch.stack(pairs).any(0) if whole else None, tuple(blind))


def _of_turn(graph: Graph, turn: Attention, attention: Attention, names: AxisNames) -> Visibility | None:
    """Return who sees whom in one turn of a loop over heads, or in an attention that is none."""
    sight = _noted(graph, turn)
    if sight is None or "weights" not in turn.stages:
        return None
    axes, shape = names.of_stage("weights"), turn.stages["weights"].shape
    dims, sizes = dims_of(axes), sizes_in(attention, names, "weights")
    queries, keys = ([place for place, dim in enumerate(dims) if name in dim] for name in ("query", "key"))
    if len(queries) != 1 or len(keys) != 1 or queries == keys:
        return None
    query, key = queries[0], keys[0]
    seen = _pair(sight, query, key)
    if not sight.pairs:
        seen = torch.ones(names.lengths, dtype=torch.bool)
    elif seen is not None:
        of_query = _by_position(seen, dims[query], "query", sizes)
        of_both = None if of_query is None else _by_position(of_query.T, dims[key], "key", sizes)
        seen = None if of_both is None else of_both.T
    blind: Rows = ()
    if sight.blind is not None and sight.blind.shape[key] == 1:  # else the softmax is over another axis
        whole = sight.blind.expand([1 if place == key else size for place, size in enumerate(shape)])
        rows = canonical(whole, "weights", axes, sizes)
        blind = () if rows is None else tuple((row, at) for row, at in rows.any(1)[..., 0].nonzero().tolist())
    return Visibility(seen, blind)


def _pair(sight: Sight, first: int, second: int) -> Tensor | None:
    """Return where two dimensions of weights have any weight."""
    pair = sight.pairs.get((min(first, second), max(first, second)))
    return pair if pair is None or first < second else pair.T


def _noted(graph: Graph, turn: Attention) -> Sight | None:
    """Return what was noted of the weights of an attention, or of the exponentials that they were made of by hand."""
    sights, queue = graph.recording.sights, [turn.softmax.output]
    first, shape = turn.score_product.op.index, turn.softmax.output.shape
    for tensor, _ in zip(queue, range(_FAR), strict=False):  # which grows meanwhile
        if tensor.id in sights and tensor.shape == shape:
            return sights[tensor.id]
        op = graph.recording.producer(tensor)
        if op is not None and op.index > first:
            queue += [read for read in op.inputs if read.shape == shape]
    return None


def _by_position(seen: Tensor, dim: list[str], name: str, sizes: dict[str, int]) -> Tensor | None:
    """Return a bool whose first dimension is the positions of one name alone, of which any other may see."""
    known = [sizes.get(word, -1) for word in dim]
    if len(dim) == 1 or known.count(-1) > 1:
        return seen if len(dim) == 1 else None
    return seen.reshape(*known, seen.shape[-1]).any([place for place, word in enumerate(dim) if word != name])


# -- causal -----------------------------------------------------------------------------------------------------------


def _is_causal_attention(graph: Graph, attention: Attention, names: AxisNames) -> bool:
    """Return whether no query of an attention sees its future.

    Without weights to read, as on meta, it counts that a triangle was cut out where a mask was made.
    """
    queries, keys = names.lengths
    if queries < 2 or keys < 2:
        return False
    known = visibility(graph, attention, names)
    if known is None or known.seen is None:
        masks = (tensor for op in attention.masks for tensor in _masks_of(graph, attention, op))
        return any(op.base_name.startswith(("tril", "triu")) for tensor in masks for op in _makers(graph, tensor))
    if names.num_windows > 1:
        return is_causal(known.seen, _shifts_of_windows(graph, attention, names))
    # Keys of the layer's own have no position; nor have sinks, which stand beside the scores.
    axes = dims_of(names.of_stage("key")) if "key" in attention.stages else []
    given = attention.stages["key"].shape[axes.index(["key"])] if ["key"] in axes else keys
    return any(map(is_causal, (known.seen, known.seen[:, :given], known.seen[:, -given:])))


def _shifts_of_windows(graph: Graph, attention: Attention, names: AxisNames) -> list[int]:
    """Return the keys at which the queries of a window may begin: among those beside it, which the first has not all.

    With `[before, own, after]` for keys the first window sees none of those before, and so shows where its own begin.
    """
    queries, keys = names.lengths
    dims, sight = dims_of(names.of_stage("weights")), _noted(graph, attention)
    named = sight is not None and ["windows"] in dims and ["key"] in dims
    pair = _pair(sight, dims.index(["windows"]), dims.index(["key"])) if sight is not None and named else None
    seen = [] if pair is None else pair[0].nonzero().flatten().tolist()
    start = seen[0] // queries * queries if seen else 0
    return [start] if start else list(range(0, keys - queries + 1, queries))


def _masks_of(graph: Graph, attention: Attention, op: Op) -> list[TensorRef]:
    """Return what an operation that masks scores reads besides them."""
    product = attention.score_product.op
    mixing = {mixing.op.index for mixing in attention.mixed_scores}

    def through(op: Op) -> bool:
        return (graph.passes_on(op) and not op.base_name.endswith("_like")) or op.index in mixing

    def is_scores(tensor: TensorRef) -> bool:
        return any(step.tensor.id == product.output.id for step in graph.back(tensor, through))

    return [op.inputs[0]] if op is product else [tensor for tensor in op.inputs if not is_scores(tensor)]


def _makers(graph: Graph, tensor: TensorRef) -> Iterator[Op]:
    """Yield the operations that have a part in a tensor, as far as a mask is made of."""
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

    Self is where query and key are of one tensor. Causal is where no query gives weight to a key behind its own
    position.
    """
    kinds = []
    for attention, names in run.attentions:
        causal = "causal" if _is_causal_attention(run.graph, attention, names) else ""
        grouped = "grouped" if names.num_kv_heads < names.num_heads else ""
        kinds.append(tuple(word for word in (_source(run, attention), causal, grouped) if word))
    return kinds


def mask_notes(run: NamedRun, leaves: Mapping[int, Tensor]) -> tuple[str, ...]:
    """Return a line where a mask of 0 and 1, one of the `leaves` or of a kept run, is added to the scores."""
    for attention, _ in run.attentions:
        for op in attention.masks:
            masks = [] if op.does("fills") else _masks_of(run.graph, attention, op)
            if len(masks) == 1 and masks[0].dtype != "bool" and 1 < masks[0].numel <= _LARGEST:
                value = leaves.get(run.graph.before_moves(masks[0]).id)
                if value is None or value.is_meta:
                    continue
                if bool(((value == 0) | (value == 1)).all()) and bool((value == 1).any()):
                    return (
                        "The mask is of the numbers 0 and 1 and is added to the scores: it bars no key. Give bool, or "
                        "-inf where a key is barred.",
                    )
    return ()


def _source(run: NamedRun, attention: Attention) -> str:
    """`self`, `cross`, or nothing where the recording does not show what the query and the key are made of."""
    stages, before = attention.stages, run.graph.before_moves
    query, key = stages.get("query", stages["q_heads"]), stages.get("key", stages["k_heads"])
    left, right = before(query), before(key)
    memory = {(side.storage, side.offset, side.shape, side.stride) for side in (left, right)}
    if left.id == right.id or len(memory) == 1 or _within(run, attention, query) & _within(run, attention, key):
        return "self"
    if "query" in stages and "key" in stages:
        return "cross"
    given = [run.graph.inputs_of(side) for side in (query, key)]
    # Heads that both came in may have been projected from one tensor.
    made = "query" in stages or "key" in stages or not any(own <= {left.id, right.id} for own in given)
    return "cross" if made and all(given) and given[0] != given[1] else ""


def _within(run: NamedRun, attention: Attention, side: TensorRef) -> set[int]:
    """Return the ids of what a query or a key is made of inside the attention's own module, position by position.

    Norms, projections down to something narrower, and what makes fewer positions, may stand before what is called its
    input.
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
        if graph.is_projection(op):
            queue.append(graph.projected(op))
        elif op.does("pools") or axes_rule(op.base_name) == "reduce":
            queue.append(op.inputs[0])
        elif graph.moves(op) or op.pointwise or op.does("norms"):
            queue += [read for read in op.inputs if read.numel == tensor.numel or graph.moves(op)]
    return reached
