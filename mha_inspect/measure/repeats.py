"""Measure whether the rows of a tensor were repeated: keys of which each is there several times, bit for bit."""

from __future__ import annotations

from torch import Tensor


def row_of_each(tensor: Tensor, place: int, times: int) -> Tensor | None:
    """Return a tensor with one of each row along a dimension, if every row is there this many times; else None.

    The copies of a row are neighbours, `a a b b`, or the rows are repeated as a whole, `a b a b`. Rows that are all
    the same were not necessarily repeated.
    """
    size = tensor.shape[place]
    if times < 2 or size % times or size == times or tensor.is_meta:
        return None
    different = size // times
    place %= tensor.dim()
    before = tensor.shape[:place]
    after = tensor.shape[place + 1 :]
    neighbours = tensor.reshape(*before, different, times, *after)
    rows = _same_along(neighbours, place + 1)
    if rows is None:
        in_turns = tensor.reshape(*before, times, different, *after)
        rows = _same_along(in_turns, place)
    if rows is None or _same_along(rows, place) is not None:
        return None
    return rows


def _same_along(tensor: Tensor, place: int) -> Tensor | None:
    """Return a tensor without one of its dimensions, if its numbers are the same all along it; else None."""
    first = tensor.narrow(place, 0, 1)
    is_first = tensor == first
    if not bool(is_first.all()):
        return None
    return first.squeeze(place)
