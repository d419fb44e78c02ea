"""What kind of attention one is, from evidence: self or cross, causal, grouped.

Self is where query and key are of one tensor. Causal is where the mask bars every key behind the query's own position
and not the position itself, and some of these keys for no other reason: a key that is barred to every query is padding.
That is looked up in the mask's content, which is computed again. Keys that the layer appends have no position.
"""

from __future__ import annotations

from itertools import takewhile

import torch

from ..graph.attention import Attention
from ..graph.evaluate import CannotReplayError, Replay, takes_shape_only
from ..graph.walk import inside
from ..record.catalog import axes_rule
from ..record.ops import Op, TensorRef
from .axes import AxisNames
from .pattern import dims_of
from .subject import Run

_BARRED = -1e4
"""A mask that adds this or less leaves no weight, in any dtype."""
_LARGEST = 1 << 24
"""Elements of a mask up to which its content is looked at. Of a larger one it counts that a triangle was cut out."""
_FAR = 60
"""Operations after which a walk gives up: a mask is made of less."""


def kinds_of(seen: Run, replay: Replay) -> list[tuple[str, ...]]:
    """Return the kind of each attention of a run, in order; `replay` computes its masks again."""
    known: dict[tuple[object, ...], bool | None] = {}
    kinds = []
    for found, names in seen.attentions:
        causal = "causal" if _is_causal(seen, found, names, replay, known) else ""
        grouped = "grouped" if names.num_kv_heads < names.num_heads else ""
        kinds.append(tuple(word for word in (_source(seen, found), causal, grouped) if word))
    return kinds


def mask_notes(seen: Run, replay: Replay) -> tuple[str, ...]:
    """Return a line where a mask of 0 and 1 is added to the scores: it bars nothing."""
    for found, _ in seen.attentions:
        for op in found.masks:
            masks = [] if op.does("fills") else _masks_of(seen, found, op)
            if len(masks) == 1 and masks[0].dtype != "bool" and 1 < masks[0].numel <= _LARGEST:
                try:
                    value = replay.value(masks[0])
                except CannotReplayError:
                    continue
                if not value.is_meta and bool(((value == 0) | (value == 1)).all()) and bool((value == 1).any()):
                    return (
                        "The mask is of the numbers 0 and 1 and is added to the scores: it bars no key. Give bool, or "
                        "-inf where a key is barred.",
                    )
    return ()


def _source(seen: Run, found: Attention) -> str:
    """`self`, `cross`, or nothing where the recording does not show what the query and the key are made of."""
    stages, before = found.stages, seen.graph.before_moves
    query, key = stages.get("query", stages["q_heads"]), stages.get("key", stages["k_heads"])
    left, right = before(query), before(key)
    if left.id == right.id or _is_one(left, right) or _within(seen, found, query) & _within(seen, found, key):
        return "self"
    if "query" in stages and "key" in stages:
        return "cross"
    given = [seen.graph.inputs_of(side) for side in (query, key)]
    # Heads that both came in may have been projected from one tensor.
    made = "query" in stages or "key" in stages or not any(own <= {left.id, right.id} for own in given)
    return "cross" if made and all(given) and given[0] != given[1] else ""


def _within(seen: Run, found: Attention, side: TensorRef) -> set[int]:
    """Return the ids of what a query or a key is made of inside the attention's own module, position by position.

    Norms, projections down to something narrower, and what makes fewer positions, may stand before what is called its
    input.
    """
    modules = [
        found.module,
        *(found.projections[name].module for name in ("query", "key") if name in found.projections),
    ]
    owner = ".".join(names[0] for names in takewhile(_alike, zip(*(path.split(".") for path in modules), strict=False)))
    graph, reached, queue = seen.graph, set[int](), [side]
    while queue and len(reached) < _FAR:
        tensor = queue.pop()
        if tensor.id in reached:
            continue
        if graph.comes_from_inputs(tensor):
            reached.add(tensor.id)
        op = seen.recording.producer(tensor)
        if op is None or not inside(op.module, owner):
            continue
        if graph.is_projection(op):
            queue.append(graph.projected(op))
        elif op.does("pools") or axes_rule(op.base_name) == "reduce":
            queue.append(op.inputs[0])
        elif graph.moves(op) or op.pointwise or op.does("norms"):
            queue += [read for read in op.inputs if read.numel == tensor.numel or graph.moves(op)]
    return reached


def _alike(names: tuple[str, ...]) -> bool:
    return len(set(names)) == 1


def _is_one(left: TensorRef, right: TensorRef) -> bool:
    """Whether two tensors are the same piece of memory, unwritten in between."""
    return (left.storage, left.offset, left.shape, left.stride) == (
        right.storage,
        right.offset,
        right.shape,
        right.stride,
    )


def _is_causal(
    seen: Run, found: Attention, names: AxisNames, replay: Replay, known: dict[tuple[object, ...], bool | None]
) -> bool:
    queries, keys = names.lengths
    given = _given_keys(found, names)
    if queries < 2 or keys < 2 or not found.masks:
        return False
    shifts = _shifts(seen, found, names, replay)
    for op in found.masks:
        made_of = tuple(t.id for t in op.inputs if not _is_scores(seen, t, found))
        sign = (op.base_name, made_of, queries, keys, given, shifts)
        if sign not in known:
            known[sign] = _bars_the_future(seen, op, found, names, replay, shifts)
        if known[sign]:
            return True
    return False


def _given_keys(found: Attention, names: AxisNames) -> int | None:
    """How many keys come in; None where the recording does not show it."""
    if "key" not in found.stages:
        return None
    axes = dims_of(names.of_stage("key"))
    return found.stages["key"].shape[axes.index(["key"])] if ["key"] in axes else None


def _is_scores(seen: Run, tensor: TensorRef, found: Attention) -> bool:
    """Whether a tensor is the product of scores, scaled, moved or masked at most."""
    product = found.score_product.op.output

    mixing = {mixing.op.index for mixing in found.mixed_scores}

    def through(op: Op) -> bool:
        return (seen.graph.carries(op) and not takes_shape_only(op)) or op.index in mixing

    return any(step.tensor.id == product.id for step in seen.graph.back(tensor, through))


def _shifts(seen: Run, found: Attention, names: AxisNames, replay: Replay) -> tuple[int, ...]:
    """Return at which keys the first query's own position may be.

    Queries and keys begin together; where there are more keys, as with a cache, they end together as well. A
    window may see others before it: the first has none, and keys that are barred to all of its queries stand for them.
    """
    queries, keys = names.lengths
    if keys <= queries or names.num_windows == 1:
        return tuple({0, max(keys - queries, 0)})
    barred = [one for op in found.masks if (one := barred_by(seen, found, op, replay)) is not None and one.dim() > 1]
    first = [one[(0,) * (one.dim() - 2)] for one in barred if not one.is_meta and one.shape[-1] == keys]
    if not first:
        return ()
    to_all = torch.stack([one.expand(queries, keys) for one in first if one.shape[0] in (1, queries)]).any(0).all(0)
    return (int(to_all.long().cumprod(0).sum()),)


def _bars_the_future(
    seen: Run, op: Op, found: Attention, names: AxisNames, replay: Replay, shifts: tuple[int, ...]
) -> bool | None:
    """Whether this operation bars every key behind the query's position; None where its mask is not known."""
    masks = _masks_of(seen, found, op)
    large = any(tensor.numel > _LARGEST for tensor in masks)
    barred = None if large else barred_by(seen, found, op, replay)
    if large or (barred is not None and barred.is_meta):
        # Without content there is only the operation that cuts a triangle out.
        return any(_is_cut(seen, tensor) for tensor in masks)
    if barred is None or barred.dim() < 2:
        return None
    if _keys_before_queries(seen, op, found):
        barred = barred.transpose(-1, -2)
    (queries, keys), given = names.lengths, _given_keys(found, names)
    if tuple(barred.shape[-2:]) != (queries, keys):
        return None
    if given is not None and given < keys and not bool(barred[..., given:].any()):
        barred = barred[..., :given]
    return any(_is_triangle(barred, shift) for shift in shifts)


def _keys_before_queries(seen: Run, op: Op, found: Attention) -> bool:
    """Whether the last dimension of what an operation masks is the queries."""
    dimensions = seen.graph.dimensions
    axes = found.score_product.axes(dimensions)
    queries = set(axes.columns if found.key_first else axes.rows)
    masked = dimensions.of(op.output)
    return bool(queries & set(masked[-1])) and not queries & set(masked[-2])


def _is_cut(seen: Run, tensor: TensorRef) -> bool:
    """Whether a tensor was made with a triangle."""
    queue = [tensor]
    looked_at: set[int] = set()
    while queue and len(looked_at) < _FAR:
        op = seen.recording.producer(queue.pop())
        if op is None or op.index in looked_at:
            continue
        if op.base_name.startswith(("tril", "triu")):
            return True
        looked_at.add(op.index)
        queue += op.inputs
    return False


def _is_triangle(barred: torch.Tensor, shift: int) -> bool:
    """Whether all behind the diagonal is barred, not every key of it to every query, and the diagonal itself is not."""
    open_to_some = ~barred.all(dim=-2)
    if not bool(open_to_some[..., max(0, 1 + shift) :].any()):
        return False
    looks_ahead = bool((~barred).triu_(1 + shift).any())
    return not looks_ahead and not bool(barred.diagonal(offset=shift, dim1=-2, dim2=-1).all())


def barred_by(seen: Run, found: Attention, op: Op, replay: Replay) -> torch.Tensor | None:
    """Return where one of an attention's masks leaves no weight, in its own layout.

    None where that is not known, or too much to look at.
    """
    masks = _masks_of(seen, found, op)
    if any(mask.numel > _LARGEST for mask in masks):
        return None
    try:
        return _barred(seen, op, masks, replay)
    except CannotReplayError:
        return None


def _masks_of(seen: Run, found: Attention, op: Op) -> list[TensorRef]:
    """Return what an operation that masks scores reads besides them."""
    if op is found.score_product.op:
        return [op.inputs[0]]
    return [tensor for tensor in op.inputs if not _is_scores(seen, tensor, found)]


def _barred(seen: Run, op: Op, others: list[TensorRef], replay: Replay) -> torch.Tensor | None:
    """Where an operation leaves no weight."""
    if op.does("fills_where"):
        mask = next((tensor for tensor in op.inputs if tensor.dtype == "bool"), None)
        if mask is None:
            return None
        value = replay.value(mask)
        # where(allowed, scores, low) keeps where it is true; masked_fill(scores, barred, low) bars there.
        picks = op.base_name == "where" and op.inputs[0].id == mask.id
        keeps = picks and _scores_first(op, others) and not _is_lowered(seen, op.inputs[1])
        return ~value if keeps else value
    if len(others) != 1:
        return None
    value = replay.value(others[0])
    value = -value if op.base_name.startswith("sub") else value
    return value <= _BARRED


def _is_lowered(seen: Run, scores: TensorRef) -> bool:
    """Whether so much was taken off the scores that no weight is left."""
    op = seen.recording.producer(scores)
    if op is None or op.base_name.rstrip("_") not in ("add", "sub") or len(op.args) < 2:
        return False
    number = op.args[1]
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    return (-number if op.base_name.startswith("sub") else number) <= _BARRED


def _scores_first(op: Op, others: list[TensorRef]) -> bool:
    return len(op.inputs) < 2 or op.inputs[1].id not in {tensor.id for tensor in others}
