"""How heads look at different parts: the entropy, reach and divergence of their weights, for each head count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import RecordingError
from ..forward import Forward
from ..reports.compare_heads import Focus, HeadFocus, HeadsFocus
from ..stage_contents import StageContents


def compare_focus(forwards: Sequence[Forward]) -> Focus:
    """What the heads of each layer look at.

    Raises:
        RecordingError: the weights of a layer could not be found, or their axes not be named.
    """
    counts = []
    for forward in forwards:
        weights = StageContents(forward, forward.recorded(keep=True)).get("weights")
        if weights is None:
            raise RecordingError(f"layer {forward.layer} has no weights that can be laid out by head.")
        counts.append(focus_of(weights, forward.inputs.key_len))
    return Focus(tuple(counts), _answer(counts))


def focus_of(weights: Tensor, key_len: int | None = None) -> HeadsFocus:
    """What the heads look at, averaged over the queries whose weights are numbers in every head.

    The divergence is the generalised Jensen-Shannon divergence of all heads with equal shares,
    H(mean of heads) - mean of H(head) (Lin, 1991, "Divergence measures based on the Shannon entropy", section 4).

    Args:
        weights: `batch heads query key`.
        key_len: keys that have a position; those that a layer appends after them have none. None means all.
    """
    num_heads, queries = weights.shape[1], weights.shape[2]
    key_len = weights.shape[3] if key_len is None else key_len
    away = _distances(queries, key_len)
    rows = [_double(weights[:, head]) for head in range(num_heads)]
    known = torch.stack([row.isfinite().all(dim=-1) for row in rows]).all(dim=0)
    mean = torch.zeros_like(rows[0])
    heads, entropies = [], []
    for head, row in enumerate(rows):
        mean += row / num_heads
        entropy = entropy_of(row)[known]
        entropies.append(_mean(entropy))
        placed = row[..., :key_len]
        share = placed.sum(dim=-1)
        reach = ((placed * away).sum(dim=-1) / share)[known & (share > 0)]
        heads.append(HeadFocus(head, entropies[-1], _mean(entropy.exp()), _mean(reach)))
    # Rounding alone may bring equal heads a hair below 0.
    divergence = max(0.0, _mean(entropy_of(mean)[known]) - sum(entropies) / num_heads) if known.any() else math.nan
    return HeadsFocus(num_heads, tuple(heads), divergence if num_heads > 1 else 0.0, math.log(num_heads))


def entropy_of(weights: Tensor) -> Tensor:
    """-Σ w ln w over the last dimension, in nats, a weight of 0 counting nothing: `... key -> ...`."""
    entropy: Tensor = torch.special.entr(weights).sum(dim=-1)
    return entropy


def _distances(queries: int, keys: int) -> Tensor:
    """`query key`: how many positions they are apart."""
    return (torch.arange(queries)[:, None] - torch.arange(keys)[None]).abs().double()


def _double(weights: Tensor) -> Tensor:
    return weights.detach().cpu().double()


def _mean(numbers: Tensor) -> float:
    return float(numbers.mean()) if numbers.numel() else math.nan


def _answer(counts: Sequence[HeadsFocus]) -> str:
    """What the most heads look at, beside the fewest."""
    few, many = (choose(counts, key=lambda count: count.num_heads) for choose in (min, max))
    effective = [head.effective_keys for head in many.by_head]
    if not all(map(math.isfinite, effective)):
        return "No query has a key to look at."
    spread = f"{min(effective):.3g} to {max(effective):.3g}" if many.num_heads > 1 else f"{effective[0]:.3g}"
    text = f"Of {many.num_heads} heads each looks at {spread} keys in effect"
    if many.num_heads == 1:
        return f"The one head looks at {spread} keys in effect."
    share = many.divergence / many.largest_divergence
    text += f", and they differ by {100 * share:.2g} % of what heads with nothing in common would"
    if few.num_heads < many.num_heads:
        one = sum(head.effective_keys for head in few.by_head) / few.num_heads
        average = "head it is" if few.num_heads == 1 else "heads it is on average"
        text += f"; with {few.num_heads} {average} {one:.3g} keys"
    return f"{text}."
