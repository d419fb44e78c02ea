"""Find who sees whom from the scores and weights of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compare.replay import LostError, Recorded, laid_out_as, replayed
from ..compare.replay import content_of as value_of
from ..graph.attention import Attention
from ..graph.rerun import between
from ..naming.axes import AxisNames
from ..naming.canonical import canonical, content_of, sizes_in
from ..naming.stage_facts import StageFacts
from ..naming.visibility import is_causal, sees, sees_by_head
from ..record.ops import TensorRef
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
    return replace(
        sight,
        attention=attention,
        origins=_names_of(run, _inputs_of(run, attention, "k_heads")),
        origins_of_queries=_names_of(run, _inputs_of(run, attention, "q_heads")),
    )


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
    """The masked scores; 0 without a mask before the softmax. None if they are unknown."""
    faint: float = 0.0
    """The largest weight that a mask of finite numbers left to a key, too small to change a sum."""
    vanished: float = 0.0
    """The share of the weights without a mask that are 0 by their scores, e.g. after a relu."""


def _weighing(recorded: Recorded, attention: Attention, names: AxisNames) -> _Weighing | None:
    """Return the weights of an attention by which it is seen who sees whom; None if they are unknown."""
    run = recorded.run
    weights = _content(run, attention, names, "weights")
    if weights is None or weights.dim() != 4 or _has_keys_of_other_ranks(run, attention):
        return None
    measured = _measured(recorded, attention, names)
    return measured or _Weighing(weights, _content(run, attention, names, "masked_scores"))


def _measured(recorded: Recorded, attention: Attention, names: AxisNames) -> _Weighing | None:
    """Return the weights that a mask makes 0: those of equal scores are 0 by a mask alone.

    None if they cannot be computed, or if what makes them 0 follows the scores: the largest of them are no mask.
    """
    equal = _of_equal_scores(recorded, attention, names)
    if equal is None:
        return None
    content = value_of(recorded, _last_weights(recorded.run, attention))
    weights = _canonical(attention, names, "weights", content)
    if weights is None or weights.shape != equal.weights.shape:
        return None
    number = torch.finfo(weights.dtype)
    is_masked = equal.weights < number.tiny
    if bool((weights[is_masked] > number.eps).any()):
        return None
    is_faint = _masked_by_a_number(equal)
    faint = float(weights[is_faint].max()) if bool(is_faint.any()) else 0.0
    is_hidden = is_masked | is_faint
    vanishes = weights == 0
    vanished = float(vanishes[~is_hidden].double().mean()) if bool((~is_hidden).any()) else 0.0
    visible = weights.nan_to_num(number.tiny).masked_fill(vanishes, number.tiny)
    return _Weighing(visible.masked_fill(is_hidden, 0.0), equal.scores, faint, vanished)


def _of_equal_scores(recorded: Recorded, attention: Attention, names: AxisNames) -> _Weighing | None:
    """Return the weights, and the masked scores, if every score were 1; None if they cannot be computed."""
    stages = attention.stages
    if attention.branches or attention.pieces or "scores" not in stages or "weights" not in stages:
        return None
    scores, last = stages["scores"], _last_weights(recorded.run, attention)
    try:
        ones = torch.ones_like(value_of(recorded, scores))
        computed = replayed(recorded, {scores.id: laid_out_as(scores, ones)}, last)
    except LostError:
        return None
    weights = _canonical(attention, names, "weights", computed[last.id])
    if weights is None:
        return None
    masked = computed.get(stages["masked_scores"].id) if "masked_scores" in stages else None
    masked_scores = None if masked is None else _canonical(attention, names, "masked_scores", masked)
    return _Weighing(weights.abs(), torch.zeros_like(weights) if masked_scores is None else masked_scores)


def _last_weights(run: Run, attention: Attention) -> TensorRef:
    """Return the weights as they are multiplied by the values: steps after the softmax may mask them too."""
    weights = attention.stages["weights"]
    if StageFacts(run.graph, attention, {}).drops():
        return weights
    for op in attention.weights_path:
        stays = op.pointwise or op.base_name.rstrip("_") in ("tril", "triu")
        if not stays or op.output.shape != weights.shape:
            break  # what is moved is no longer in the order of queries and keys
        weights = op.output
    return weights


def _canonical(attention: Attention, names: AxisNames, stage: str, value: Tensor) -> Tensor | None:
    """Return a value in the axes of a stage as `batch heads query key`; None if an axis has no name."""
    return canonical(value, stage, names.of_stage(stage), sizes_in(attention, names, stage), names.head_order)


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
    of_keys = _inputs_of(run, attention, "k_heads")
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
        vanished=weighing.vanished,
        first=first_key,
        knows_own=queries == keys or (first is not None and _is_self_attention(attention)),
        distance=distance,
        pads=pads,
        origins=_names_of(run, of_keys),
        origins_of_queries=_names_of(run, _inputs_of(run, attention, "q_heads")),
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


def _inputs_of(run: Run, attention: Attention, stage: str) -> set[int]:
    """Return the ids of the inputs that a stage depends on; empty if it is unknown."""
    if stage not in attention.stages:
        return set()
    return run.graph.inputs_of(attention.stages[stage])


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


def _masked_by_a_number(equal: _Weighing) -> Tensor:
    """Return where a mask of one finite number leaves equal scores a weight that is too small to change a sum.

    With scores of -30 the weights are about 1e-13, and no output in float32 differs. A bias by distance lowers far
    scores as much, but by several numbers: nothing is masked by it.
    """
    weights, scores = equal.weights, equal.scores
    is_faint = (weights > 0) & (weights < torch.finfo(weights.dtype).eps / 8)
    if scores is None or scores.shape != weights.shape or not bool(is_faint.any()):
        return torch.zeros_like(is_faint)
    left = scores[is_faint]
    return is_faint if bool(torch.isclose(left, left[0]).all()) else torch.zeros_like(is_faint)


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
