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
    by_head, marks = (side.movedim(1, 0).flatten(1) for side in (steps, both))
    slopes = []
    for numbers, mark in zip(by_head, marks, strict=True):
        read = numbers[mark]
        if len(read) < 2 or not bool(read.isfinite().all()) or float(read.max() - read.min()) > NEAR * read.max():
            return []
        slopes.append(float(read.mean()))
    return slopes if min(slopes, default=0.0) > 0 else []


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
