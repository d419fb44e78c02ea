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
    if scores.shape[-1] < _FEWEST_KEYS or scores.is_complex():
        return []
    steps = _steps_to_next_key(scores, masked).abs()
    both_seen = _sees_next_key(seen)
    slopes = []
    for head in range(steps.shape[1]):
        seen_steps = steps[:, head][both_seen[:, head]]
        if not _are_equal(seen_steps):
            return []
        slopes.append(float(seen_steps.mean()))
    return slopes if min(slopes, default=0.0) > 0 else []


def _steps_to_next_key(scores: Tensor, masked: Tensor) -> Tensor:
    """Return by how much what is added to a score changes from a key to the next: `batch heads query key`."""
    added = masked.double() - scores.double()
    return added.diff(dim=-1)


def _sees_next_key(seen: Tensor) -> Tensor:
    """Return whether a query sees a key and the next one, for all keys but the last: `batch heads query key`."""
    sees_key = seen[..., :-1]
    sees_next = seen[..., 1:]
    return sees_key & sees_next


def _are_equal(steps: Tensor) -> bool:
    """Return whether there are several steps, which differ by rounding alone."""
    if len(steps) < 2 or not bool(steps.isfinite().all()):
        return False
    smallest, largest = float(steps.min()), float(steps.max())
    return largest - smallest <= NEAR * largest


def rises_with_distance(scores: Tensor, masked: Tensor, seen: Tensor) -> bool:
    """Return whether what is added to a score is larger the farther the key is from the query, for each visible pair.

    The arguments are those of `slopes_in`. Query i stands at the place of key i; with other numbers of them the places
    are unknown, and the result is False.
    """
    queries, keys = scores.shape[-2:]
    if queries != keys:
        return False
    steps = _steps_to_next_key(scores, masked)
    places = torch.arange(keys, device=scores.device)
    # A step to the next key is one towards the query.
    is_past = places[None, 1:] <= places[:, None]
    away = torch.where(is_past, -steps, steps)
    visible = away[_sees_next_key(seen)]
    if not visible.numel():
        return False
    return bool((visible > 0).all())
