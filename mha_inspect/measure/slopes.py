"""Measure the slopes of a bias that is linear in the position of the key, as ALiBi adds it: one for each head."""

from __future__ import annotations

import torch
from torch import Tensor

NEAR = 0.01
"""Relative differences below this are of rounding: steps of a ladder differ by more."""
_FEWEST_KEYS = 3
"""The smallest number of keys whose steps show a slope: any two numbers differ by one step."""


def slopes_in(scores: Tensor, masked: Tensor, seen: Tensor) -> list[float]:
    """Return the slope of each head, by which scores fall from key to key; empty if what is added is not linear.

    Args:
        scores: scores before anything is added, `batch heads query key`.
        masked: the same after it.
        seen: which keys a query sees, a bool `batch heads query key`.
    """
    if scores.shape[-1] < _FEWEST_KEYS:
        return []
    both = seen[..., 1:] & seen[..., :-1]  # batch heads query key
    added = masked.double() - scores.double()
    steps = (added[..., 1:] - added[..., :-1]).abs()
    slopes = []
    for head in range(steps.shape[1]):
        seen_steps = steps[:, head][both[:, head]]
        if not _are_equal(seen_steps):
            return []
        slopes.append(float(seen_steps.mean()))
    return slopes if min(slopes, default=0.0) > 0 else []


def _are_equal(steps: Tensor) -> bool:
    """Return whether there are several steps, which differ by rounding alone."""
    if len(steps) < 2 or not bool(steps.isfinite().all()):
        return False
    return bool(steps.max() - steps.min() <= NEAR * steps.max())


def rises_with_distance(scores: Tensor, masked: Tensor, seen: Tensor) -> bool:
    """Return whether what is added to a score is larger the farther the key is from the query, for each visible pair.

    The arguments are those of `slopes_in`. Query i stands at the place of key i; with other numbers of them the places
    are unknown, and the result is False.
    """
    if scores.shape[-1] != scores.shape[-2]:
        return False
    both = seen[..., 1:] & seen[..., :-1]  # batch heads query key
    added = masked.double() - scores.double()
    steps = added[..., 1:] - added[..., :-1]
    places = torch.arange(scores.shape[-1], device=scores.device)
    is_past = places[None, 1:] <= places[:, None]  # a step to the next key is one towards the query
    outward = torch.where(is_past, -steps, steps)[both]
    return bool(outward.numel()) and bool((outward > 0).all())
