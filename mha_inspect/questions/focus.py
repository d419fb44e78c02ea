"""Measure what heads attend to: the key with the largest share, the number of keys, and how far away they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..compare.comparable_run import ComparableRun
from ..errors import RecordingError
from ..graph.attention import Attention
from ..reports.compare_heads import Focus, HeadFocus, HeadsFocus


def compare_focus(counts: Sequence[HeadsFocus]) -> Focus:
    """Return what the heads of each head count attend to, the baseline first."""
    return Focus(tuple(counts), _answer(counts))


def focus_of_run(run: ComparableRun) -> list[HeadsFocus]:
    """Return what the heads of every attention attend to.

    Raises `RecordingError` if the axes of an attention's weights could not be named.
    """
    counts = []
    for place, (attention, _) in enumerate(run.attentions):
        weights = run.content(place, "weights")
        if weights is None:
            raise _no_weights(run.label, attention)
        key_len = weights.shape[-1]
        keys = run.content(place, "key")
        if keys is not None:
            key_len = min(keys.shape[1], key_len)
        focus = focus_of(weights, key_len)
        if len(run.attentions) > 1:
            focus = replace(focus, attention=place + 1, module=attention.module)
        counts.append(focus)
    return counts


def _no_weights(label: str, attention: Attention) -> RecordingError:
    """Return the error for an attention without weights by head."""
    if attention.divided is not None:
        return RecordingError(f"--focus: {label} never forms the attention weights. Remove --focus.")
    return RecordingError(
        f"--focus: an axis of the weights of {label} could not be named, so they cannot be split by "
        "head. Use a different size for each axis, e.g. --batch 3 --seq-len 5, or remove --focus."
    )


def focus_of(weights: Tensor, key_len: int | None = None) -> HeadsFocus:
    """Return what the heads attend to, averaged over the queries without NaN weights in any head.

    Args:
        weights: `batch heads query key`.
        key_len: number of keys with a position, without keys that the layer appends. None means all.
    """
    if key_len is None:
        key_len = weights.shape[3]
    by_head = weights.detach().cpu().double().transpose(0, 1)  # heads batch query key
    finite = by_head.isfinite().all(dim=-1).all(dim=0)  # batch query
    heads = []
    for head, of_head in enumerate(by_head):
        heads.append(_focus_of_head(head, of_head, finite, key_len))
    return HeadsFocus(len(heads), tuple(heads))


def _focus_of_head(head: int, weights: Tensor, finite: Tensor, key_len: int) -> HeadFocus:
    """Return what one head attends to: its weights `batch query key`, the `batch query` to average over."""
    finite_weights = weights[finite]
    shares = finite_weights.mean(dim=0)  # key; NaN if no query is finite
    most = int(shares.nan_to_num().argmax())
    entropy = entropy_of(finite_weights)
    return HeadFocus(
        head=head,
        most_attended_key=most,
        share=float(shares[most]),
        effective_keys=float(entropy.exp().mean()),
        distance=_distance_of_head(weights[..., :key_len], finite),
    )


def _distance_of_head(weights: Tensor, finite: Tensor) -> float:
    """Return the average distance from a query to its keys: weights `batch query key`, averaged over `batch query`.

    All of these keys have a position. A query that attends to none of them is left out.
    """
    _, query_len, key_len = weights.shape
    queries = torch.arange(query_len)
    keys = torch.arange(key_len)
    distances = (queries[:, None] - keys).abs().double()
    totals = weights.sum(dim=-1)
    averages = (weights * distances).sum(dim=-1) / totals
    return float(averages[finite & (totals > 0)].mean())


def entropy_of(weights: Tensor) -> Tensor:
    """Return -Σ w ln w over the last dimension; a weight of 0 adds 0: `... key -> ...`."""
    entropy: Tensor = torch.special.entr(weights).sum(dim=-1)
    return entropy


def _answer(counts: Sequence[HeadsFocus]) -> str:
    """Return how many keys each head effectively attends to, with the most heads and with the fewest."""
    numbers = [count.num_heads for count in counts]
    few = min(numbers)
    many = max(numbers)
    attentions = numbers.count(many)
    effective = _effective_keys(counts, many)
    if not all(map(math.isfinite, effective)):
        return "Every query has all keys masked out."
    where = f" in each of {attentions} attentions" if attentions > 1 else ""
    if many == 1:
        return f"The single head{where} effectively attends to {_range_of_keys(effective)}."
    text = f"With {many} heads{where}, each effectively attends to {_range_of_keys(effective)}."
    if few < many:
        heads = "1 head" if few == 1 else f"{few} heads"
        text += f" With {heads}: {_average_keys(_effective_keys(counts, few))}."
    return text


def _effective_keys(counts: Sequence[HeadsFocus], num_heads: int) -> list[float]:
    """Return the effective number of keys of every head of the attentions with this number of heads."""
    numbers: list[float] = []
    for count in counts:
        if count.num_heads == num_heads:
            numbers += [head.effective_keys for head in count.by_head]
    return numbers


def _range_of_keys(numbers: Sequence[float]) -> str:
    """Return the smallest and the largest number: `3.2 to 5 keys`; `1 key` if they are written alike."""
    low = f"{min(numbers):.3g}"
    high = f"{max(numbers):.3g}"
    if low == high:
        return _keys(low)
    return f"{low} to {high} keys"


def _average_keys(numbers: Sequence[float]) -> str:
    """Return the average number: `4.5 keys, on average`, or `4.5 keys` of a single head."""
    average = sum(numbers) / len(numbers)
    keys = _keys(f"{average:.3g}")
    return keys if len(numbers) == 1 else f"{keys}, on average"


def _keys(number: str) -> str:
    return f"{number} key" if number == "1" else f"{number} keys"
