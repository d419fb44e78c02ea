"""Measure what heads attend to: the key with the largest share, the number of keys, and how far away they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import RecordingError
from ..reports.compare_heads import Focus, HeadFocus, HeadsFocus
from .comparable_run import ComparableRun


def compare_focus(counts: Sequence[HeadsFocus]) -> Focus:
    """Return what the heads of each head count attend to, the baseline first."""
    return Focus(tuple(counts), _answer(counts))


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

    Args:
        weights: `batch heads query key`.
        key_len: number of keys with a position, without keys that the layer appends. None means all.
    """
    num_heads, queries = weights.shape[1], weights.shape[2]
    key_len = weights.shape[3] if key_len is None else key_len
    distances = (torch.arange(queries)[:, None] - torch.arange(key_len)[None]).abs().double()
    by_head = weights.detach().cpu().double().transpose(0, 1)  # heads batch query key
    finite = by_head.isfinite().all(dim=-1).all(dim=0)
    heads = []
    for head, rows in enumerate(by_head):
        shares = rows[finite].mean(dim=0)  # key; NaN if no query is finite
        most = int(shares.nan_to_num().argmax())
        placed = rows[..., :key_len]
        of_placed = placed.sum(dim=-1)
        distance = ((placed * distances).sum(dim=-1) / of_placed)[finite & (of_placed > 0)]
        heads.append(
            HeadFocus(
                head=head,
                most_attended_key=most,
                share=float(shares[most]),
                effective_keys=float(entropy_of(rows[finite]).exp().mean()),
                distance=float(distance.mean()),
            )
        )
    return HeadsFocus(num_heads, tuple(heads))


def entropy_of(weights: Tensor) -> Tensor:
    """Return -Σ w ln w over the last dimension; a weight of 0 adds 0: `... key -> ...`."""
    entropy: Tensor = torch.special.entr(weights).sum(dim=-1)
    return entropy


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
    text = f"With {many} heads{where}, each effectively attends to {_keys(spread)}."
    if few < many:
        known = [head.effective_keys for count in fewest for head in count.by_head]
        average = "" if len(known) == 1 else ", on average"
        text += f" With {few} {'head' if few == 1 else 'heads'}: {_keys(f'{sum(known) / len(known):.3g}')}{average}."
    return text
