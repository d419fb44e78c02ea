"""Find who sees whom from the scores and weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compare.replay import LostError, Recorded, again
from ..compare.replay import content_of as value_of
from ..graph.attention import Attention
from ..graph.rerun import between
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, content_of, sizes_in
from ..naming.stage_facts import StageFacts
from ..naming.visibility import is_causal, sees, sees_by_head
from ..record.ops import Op
from ..running.subject import Run
from .alike import Named
from .query_order import picks_queries, positions_of
from .seen_keys import SeenKeys

_MASKED_BY = 90.0
"""A mask lowers a score by at least this number below others; -100 is the weakest in use."""
_HEAVY = 1e-3
"""A weight above this changes a sum by more than rounding."""


def sights_of(
    recorded: Recorded,
    first_key: Callable[[Attention, AxisNames], int | None],
    padded: Tensor | None = None,
    groups: Sequence[Sequence[Named]] = (),
) -> tuple[SeenKeys, ...]:
    """Return the visible keys of each attention whose weights are known, from a run with its tensors.

    `first_key` returns the key at the position of the first query, if there are more keys than queries. `padded` is
    `batch position`, True at padding, whose queries may see anything. The first attention of a group shows what all of
    it see.
    """
    run = recorded.run
    shown_by: dict[int, Named] = {}
    for group in groups:
        for attention, _ in group:
            shown_by[id(attention)] = group[0]
    first_sights: dict[int, SeenKeys | None] = {}
    sights = []
    for attention, names in run.attentions:
        first, names_of_first = shown_by.get(id(attention), (attention, names))
        if id(first) not in first_sights:
            first_sights[id(first)] = _sight_of(recorded, first, names_of_first, first_key, padded)
        sight = first_sights[id(first)]
        if sight is not None:
            sights.append(sight if attention is first else _of_another(run, sight, attention))
    return tuple(sights)


def _of_another(run: Run, sight: SeenKeys, attention: Attention) -> SeenKeys:
    """Return the visible keys of an attention from those of another with equal code: its keys may be other tokens."""
    return replace(sight, attention=attention, origins=_names_of(run, _inputs_of_keys(run, attention)))


def _sight_of(
    recorded: Recorded,
    attention: Attention,
    names: AxisNames,
    first_key: Callable[[Attention, AxisNames], int | None],
    padded: Tensor | None,
) -> SeenKeys | None:
    """Return the visible keys of an attention; None if its weights are unknown."""
    run = recorded.run
    weighing = _weighing(recorded, attention, names)
    if weighing is None:
        return None
    queries, keys = weighing.weights.shape[-2:]
    first = first_key(attention, names) if queries < keys else None
    layout = names.of_stage("scores") if "scores" in attention.stages else ""
    sight = _seen_keys(run, attention, weighing, first, padded, layout)
    in_order = _in_order_of_tokens(run, names, sight)
    if in_order is None:
        return None
    return replace(in_order, row="window" if names.num_windows > 1 else "batch item")


def _in_order_of_tokens(run: Run, names: AxisNames, sight: SeenKeys) -> SeenKeys | None:
    """Return visible keys with the queries in the order of their tokens, where an index picks the queries.

    None if it picks others in another item or head, or it is unknown which: then nobody knows their order.
    """
    picks = picks_queries(run, sight.attention)
    if picks is None:
        return sight
    positions = positions_of(run, sight.attention, names, picks)
    if positions is None:
        return None
    order = positions.argsort(-1)  # batch heads query
    sorted_positions = positions.gather(-1, order)
    first = sorted_positions[0, 0]
    if not bool((sorted_positions == first).all()):
        return None
    return replace(
        sight,
        by_head=_in_order(sight.by_head, order),
        zeros=_in_order(sight.zeros, order),
        weighed=sight.weighed[order[0, 0]],
        first=0,
        distance=first[:, None] - torch.arange(sight.keys)[None],
    )


def _in_order(pairs: Tensor, order: Tensor) -> Tensor:
    """Return `batch heads query key` with the queries in this order, `batch heads query`; each may have one head."""
    batch, heads = pairs.shape[:2]
    order = order.expand(batch, max(heads, order.shape[1]), -1)
    pairs = pairs.expand(-1, order.shape[1], -1, -1)
    return pairs.gather(2, order[..., None].expand_as(pairs))


# -- weights and scores -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Weighing:
    """The weights of an attention and the scores before them, each `batch heads query key`."""

    weights: Tensor
    """Zero where a mask leaves a key no weight, and nowhere else."""
    scores: Tensor | None
    """The masked scores; None if they are unknown."""
    faint: float = 0.0
    """The largest weight that a mask of finite numbers left to a key, too small to change a sum."""


def _weighing(recorded: Recorded, attention: Attention, names: AxisNames) -> _Weighing | None:
    """Return the weights of an attention by which it is seen who sees whom; None if they are unknown."""
    run = recorded.run
    weights = _content(run, attention, names, "weights")
    if weights is None or weights.dim() != 4 or _has_keys_of_other_ranks(run, attention):
        return None
    of_equal_scores = _weights_of_equal_scores(recorded, attention, names)
    if of_equal_scores is not None and not bool((weights[of_equal_scores == 0] != 0).any()):
        return _Weighing(of_equal_scores, torch.zeros_like(weights))
    scores = _content(run, attention, names, "masked_scores")
    zeroed = _zeroed_after_softmax(run, attention, names)
    if zeroed is not None and zeroed.shape == weights.shape:
        if scores is None:
            scores = torch.zeros_like(weights)
        return _Weighing(weights.masked_fill(zeroed, 0.0), scores)
    plain = _content(run, attention, names, "scores")
    if scores is None or plain is None:
        return _Weighing(weights, scores)
    if not plain.shape == scores.shape == weights.shape or plain.is_complex():
        return _Weighing(weights, None if scores.is_complex() else scores)
    if plain.dtype != torch.float64:  # half of a large mask may be infinite in a smaller dtype
        plain, scores = plain.float(), scores.float()
    lowered = (plain - scores).nan_to_num(torch.inf)
    return _weighing_by_masks(weights, scores, lowered, has_masks=bool(attention.masks))


def _weighing_by_masks(weights: Tensor, scores: Tensor, lowered: Tensor, *, has_masks: bool) -> _Weighing:
    """Return the weights that a mask makes zero, by how much each score is lowered; all `batch heads query key`."""
    # A weight may be too small for its dtype although nothing masks it.
    lowered_less = lowered - lowered.amin(-1, keepdim=True) < _MASKED_BY
    is_small = (weights == 0) & lowered_less
    smallest = torch.finfo(weights.dtype).tiny
    visible = weights.masked_fill(is_small, smallest)
    if not has_masks:  # other steps, e.g. a negation, lower scores too
        return _Weighing(visible, scores)
    is_faint = _masked_by_a_number(weights, scores, lowered)
    if not bool(is_faint.any()):
        return _Weighing(visible, scores)
    faint = float(weights[is_faint].max())
    return _Weighing(visible.masked_fill(is_faint, 0.0), scores, faint)


# -- who sees whom ----------------------------------------------------------------------------------------------------


def _seen_keys(
    run: Run, attention: Attention, weighing: _Weighing, first: int | None, padded: Tensor | None, layout: str
) -> SeenKeys:
    """Return the keys that each query sees."""
    weights, scores = weighing.weights, weighing.scores
    by_head = _visible_by_head(attention, weights, scores)
    seen = by_head.any(1)  # batch query key
    queries, keys = seen.shape[1:]
    first_key = _first_key(seen) if first is None else first
    pads = _padded_queries(padded, first_key, seen)
    if pads is None:
        pads = torch.zeros(seen.shape[:2], dtype=torch.bool)
    real_pairs = (seen & ~pads[:, :, None]).any(0)
    of_keys = _inputs_of_keys(run, attention)
    distance = torch.arange(queries)[:, None] + first_key - torch.arange(keys)[None]
    joined = slice(first_key + queries, None)
    has_joined = keys > first_key + queries
    if has_joined and bool(real_pairs[:, joined].all()) and _are_computed(run, attention, of_keys):
        distance[:, joined] = 0  # keys of no position that are joined, e.g. `add_bias_kv` of torch
    over_heads = bool(attention.masks) and _are_alike_for_queries(seen) and _is_laid_over_heads(weights, scores)
    is_heavy = weights > _HEAVY
    is_weighed = weights[0] > torch.finfo(weights.dtype).eps  # heads query key
    return SeenKeys(
        attention=attention,
        layout=layout,
        by_head=by_head,
        zeros=(weights == 0).cpu(),
        weighed=is_weighed.any(0).cpu() | attention.weights_changed,
        shares=(is_heavy.sum(-1) > 1).any(-1).any(0),
        faint=weighing.faint,
        first=first_key,
        knows_own=queries == keys or (first is not None and _is_self_attention(attention)),
        distance=distance,
        pads=pads,
        origins=_names_of(run, of_keys),
        over_heads=over_heads,
    )


def _visible_by_head(attention: Attention, weights: Tensor, scores: Tensor | None) -> Tensor:
    """Return `batch heads query key`, True if the head sees the key; without a mask one head stands for all."""
    if attention.masks or scores is not None:
        return sees_by_head(weights, scores).cpu()
    return torch.ones_like(weights[:, :1], dtype=torch.bool, device="cpu")


def _are_alike_for_queries(seen: Tensor) -> bool:
    """Return whether all queries see the same keys, of `batch query key`."""
    return bool((seen == seen[:, :1]).all())


def _inputs_of_keys(run: Run, attention: Attention) -> set[int]:
    """Return the ids of the inputs that the keys depend on; empty if the keys are unknown."""
    if "k_heads" not in attention.stages:
        return set()
    return run.graph.inputs_of(attention.stages["k_heads"])


def _first_key(seen: Tensor) -> int:
    """Return the key at the position of the first query, of `batch query key`, where the queries are the last tokens.

    If nobody sees the last keys, they are empty slots.
    """
    used = seen.any(0).any(0).nonzero()
    count = int(used.max()) + 1 if used.numel() else 0
    return max(count - int(seen.shape[1]), 0)


def _padded_queries(padded: Tensor | None, first: int, seen: Tensor) -> Tensor | None:
    """Return `batch query`, True where a query is padding; None if that is unknown."""
    if padded is None:
        return None
    pads = padded[:, first : first + seen.shape[1]]
    return pads if pads.shape == seen.shape[:2] else None


def _is_self_attention(attention: Attention) -> bool:
    """Return whether the tensors that queries and keys are projected from have the same shape."""
    query, key = attention.stages.get("query"), attention.stages.get("key")
    if query is None or key is None:
        return query is None and key is None
    return query.shape == key.shape


def _are_computed(run: Run, attention: Attention, inputs: set[int]) -> bool:
    """Return whether the keys are computed from these inputs, and none is written into a cache."""
    if "k_heads" not in attention.stages:
        return False
    steps = between(run.recording, inputs, attention.stages["k_heads"])
    return bool(steps) and all(op.kind != "write" for op in steps)


def _names_of(run: Run, inputs: set[int]) -> frozenset[str]:
    """Return the names of inputs with these ids."""
    return frozenset(named.name for named in run.recording.inputs if named.tensor.id in inputs)


# -- masks that leave or take weight ----------------------------------------------------------------------------------


def _masked_by_a_number(weights: Tensor, scores: Tensor, lowered: Tensor) -> Tensor:
    """Return where a mask of one finite number leaves a weight that is too small to change a sum.

    All are `batch heads query key`. With scores of -30 the weights are about 1e-13, and no output in float32 differs.
    A bias by distance lowers far scores as much, but by several numbers: nothing is masked by it.
    """
    is_faint = (weights > 0) & (weights < torch.finfo(weights.dtype).eps / 8) & (lowered > 0)
    if not bool(is_faint.any()):
        return is_faint
    filled, added = scores[is_faint], lowered[is_faint]
    is_one_number = bool((filled == filled[0]).all()) or bool(torch.isclose(added, added[0]).all())
    return is_faint if is_one_number else torch.zeros_like(is_faint)


def _weights_of_equal_scores(recorded: Recorded, attention: Attention, names: AxisNames) -> Tensor | None:
    """Return the weights if all scores were 1, `batch heads query key`; None with a softmax, or if they are unknown.

    A weight that is made of a score without a softmax may be 0 because of the score: `relu(scores).tril()`. Of equal
    scores a mask alone makes it 0.
    """
    scores, weights = attention.stages.get("scores"), attention.stages.get("weights")
    if not attention.weighing or attention.branches or scores is None or weights is None:
        return None
    try:
        value = again(recorded, scores, torch.ones_like(value_of(recorded, scores)), weights)
    except LostError:
        return None
    sizes = sizes_in(attention, names, "weights")
    return canonical(value, "weights", names.of_stage("weights"), sizes, names.head_order)


def _zeroed_after_softmax(run: Run, attention: Attention, names: AxisNames) -> Tensor | None:
    """Return the weights that steps after the softmax set to zero: `batch heads query key`; None if there are none.

    Such are tril, and a product with a mask of zeros and ones; a sum that divides the weights may follow.
    """
    if attention.branches or StageFacts(run.graph, attention, {}).drops():
        return None
    step = _last_step_to_zero(run, attention)
    value = None if step is None else run.recording.values.get(step.output.id)
    if value is None:
        return None
    is_zero = value == 0
    if bool(is_zero.all()):
        return None
    sizes = sizes_in(attention, names, "weights")
    return canonical(is_zero, "weights", names.of_stage("weights"), sizes, names.head_order)


def _last_step_to_zero(run: Run, attention: Attention) -> Op | None:
    """Return the last operation between the softmax and the weights that sets some to zero; None without one."""
    last = None
    for op in attention.weights_path:
        if op.output.shape == attention.stages["weights"].shape and _sets_to_zero(run, attention, op):
            last = op
    return last


def _sets_to_zero(run: Run, attention: Attention, op: Op) -> bool:
    """Return whether an operation sets weights to zero, at places that do not depend on the weights."""
    after = run.recording.values.get(op.output.id)
    before = run.recording.values.get(op.inputs[0].id) if op.inputs else None
    if after is None or before is None:
        return False
    if int((after == 0).sum()) <= int((before == 0).sum()):
        return False
    if op.base_name.rstrip("_") in ("tril", "triu"):
        return True
    if not op.does("scales", "masks", "fills", "fills_where"):
        return False
    # A threshold or the largest k of the weights follow the scores, and are no mask.
    softmax = attention.softmax.output.id
    beside = [tensor for tensor in op.inputs if tensor.id != softmax]
    return any(not between(run.recording, {softmax}, tensor) for tensor in beside)


def _is_laid_over_heads(weights: Tensor, scores: Tensor | None) -> bool:
    """Return whether heads see keys as queries do under a causal mask, in every batch item."""
    of_scores = None if scores is None else scores.transpose(1, 2)
    seen = sees(weights.transpose(1, 2), of_scores).cpu()  # batch heads key
    return all(is_causal(pairs, (0,)) for pairs in seen)


def _has_keys_of_other_ranks(run: Run, attention: Attention) -> bool:
    """Return whether ranks exchange keys and no queries, so that the positions of the queries are unknown."""
    if not any(op.is_collective for op in run.recording.ops):
        return False
    return _is_exchanged(run, attention, "k_heads") and not _is_exchanged(run, attention, "q_heads")


def _is_exchanged(run: Run, attention: Attention, stage: str) -> bool:
    """Return whether ranks exchange a stage after its projection."""
    tensor = attention.stages.get(stage)
    if tensor is None:
        return False
    for step in run.graph.back(tensor, lambda op: not run.graph.is_projection(op)):
        if any(op.is_collective for op in step.path):
            return True
    return False


def _content(run: Run, attention: Attention, names: AxisNames, stage: str) -> Tensor | None:
    """Return a stage in canonical axes; None if it is missing, or an axis has no name."""
    has_stage = all(stage in turn.stages for turn in (attention, *attention.branches))
    return content_of(run, attention, names, stage) if has_stage else None
