"""Measure what heads attend to: the entropy, reach and divergence of their weights, for each head count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from ..errors import RecordingError
from ..reports.compare_heads import Alike, Focus, HeadFocus, HeadsFocus, Strongest
from .comparable_run import ComparableRun

_STRONGEST = 3
"""Pairs of a query and a key in the report of each head."""


def compare_focus(counts: Sequence[HeadsFocus], weights: str = "as given") -> Focus:
    """Return what the heads of each head count attend to, the baseline first; `weights` names the weights."""
    return Focus(weights, tuple(counts), _answer(counts))


def focus_of_run(run: ComparableRun) -> list[HeadsFocus]:
    """Return what the heads of every attention attend to.

    Raises `RecordingError` if the axes of an attention's weights could not be named.
    """
    counts = []
    for place, (attention, _) in enumerate(run.attentions):
        weights, keys = run.content(place, "weights"), run.content(place, "key")
        if weights is None:
            raise RecordingError(
                f"--focus: {run.label} never forms the attention weights. Remove --focus."
                if attention.divided is not None
                else f"--focus: an axis of the weights of {run.label} could not be named, so they cannot be split by "
                "head. Use a different size for each axis, e.g. --batch 3 --seq-len 5, or remove --focus."
            )
        focus = focus_of(weights, None if keys is None else min(keys.shape[1], weights.shape[-1]))
        numbered = len(run.attentions) > 1
        counts.append(replace(focus, attention=place + 1, module=attention.module) if numbered else focus)
    return counts


def focus_of(weights: Tensor, key_len: int | None = None) -> HeadsFocus:
    """Return what the heads attend to, averaged over the queries without NaN weights in any head.

    The divergence is the generalised Jensen-Shannon divergence of all heads with equal shares,
    H(mean of heads) - mean of H(head) (Lin, 1991, "Divergence measures based on the Shannon entropy", section 4).

    Args:
        weights: `batch heads query key`.
        key_len: number of keys with a position, without keys that the layer appends. None means all.
    """
    num_heads, queries = weights.shape[1], weights.shape[2]
    key_len = weights.shape[3] if key_len is None else key_len
    away = (torch.arange(queries)[:, None] - torch.arange(key_len)[None]).abs().double()
    rows = weights.detach().cpu().double().transpose(0, 1)  # heads batch query key
    known = rows.isfinite().all(dim=-1).all(dim=0)
    choosing = known & (rows.amax(dim=-1) < 1).any(dim=0)
    entropies = [entropy_of(row)[known] for row in rows]
    heads = []
    for head, (row, entropy) in enumerate(zip(rows, entropies, strict=True)):
        placed = row[..., :key_len]
        share = placed.sum(dim=-1)
        reach = ((placed * away).sum(dim=-1) / share)[known & (share > 0)]
        heads.append(HeadFocus(head, _mean(entropy), _mean(entropy.exp()), _mean(reach), _strongest(placed, choosing)))
    apart = _mean(entropy_of(rows.mean(dim=0))[known]) - sum(map(_mean, entropies)) / num_heads
    divergence = max(0.0, apart) if known.any() else math.nan  # rounding may bring equal heads a hair below 0
    pairs = []
    for left, right in combinations(range(num_heads if known.any() else 0), 2):
        between = entropy_of((rows[left] + rows[right])[known] / 2) - (entropies[left] + entropies[right]) / 2
        pairs.append(Alike(left, right, max(0.0, _mean(between))))
    pairs.sort(key=lambda pair: pair.divergence)
    return HeadsFocus(
        num_heads,
        tuple(heads),
        divergence if num_heads > 1 else 0.0,
        math.log(num_heads),
        pairs[0] if pairs else None,
        pairs[-1] if len(pairs) > 1 else None,
    )


def _strongest(weights: Tensor, choosing: Tensor) -> tuple[Strongest, ...]:
    """Return the pairs with the largest weights of `batch query key`, for queries with more than one key."""
    number = choosing.sum(dim=0).double()
    mean = weights.where(choosing[..., None], 0.0).sum(dim=0) / number[:, None].clamp(min=1)
    strongest = mean.flatten().topk(min(_STRONGEST, mean.numel()))
    keys = mean.shape[1]
    pairs = zip(strongest.values.tolist(), strongest.indices.tolist(), strict=True)
    return tuple(Strongest(place // keys, place % keys, weight) for weight, place in pairs if weight > 0)


def entropy_of(weights: Tensor) -> Tensor:
    """Return -Σ w ln w over the last dimension, in nats; a weight of 0 adds 0: `... key -> ...`."""
    entropy: Tensor = torch.special.entr(weights).sum(dim=-1)
    return entropy


def _mean(numbers: Tensor) -> float:
    return float(numbers.mean()) if numbers.numel() else math.nan


def _keys(number: str) -> str:
    return f"{number} {'key' if number == '1' else 'keys'}"


def _answer(counts: Sequence[HeadsFocus]) -> str:
    few, many = (choose(count.num_heads for count in counts) for choose in (min, max))
    fewest, most = ([count for count in counts if count.num_heads == number] for number in (few, many))
    effective = [head.effective_keys for count in most for head in count.by_head]
    if not all(map(math.isfinite, effective)):
        return "Every query has all keys masked out."
    where = f" in each of {len(most)} attentions" if len(most) > 1 else ""
    spread = " to ".join(dict.fromkeys(f"{bound(effective):.3g}" for bound in (min, max)))
    if many == 1:
        return f"The single head{where} effectively attends to {_keys(spread)}."
    share = sum(count.divergence / count.largest_divergence for count in most) / len(most)
    text = f"With {many} heads{where}, each effectively attends to {_keys(spread)}. "
    text += f"The heads differ by {100 * share:.2g} % of the largest possible divergence."
    if few < many:
        known = [head.effective_keys for count in fewest for head in count.by_head]
        average = "" if len(known) == 1 else ", on average"
        text += f" With {few} {'head' if few == 1 else 'heads'}: {_keys(f'{sum(known) / len(known):.3g}')}{average}."
    return text
