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
    place %= tensor.dim()
    before, after = tensor.shape[:place], tensor.shape[place + 1 :]
    neighbours = tensor.reshape(*before, size // times, times, *after)
    rows = _same_along(neighbours, place + 1)
    if rows is None:
        whole = tensor.reshape(*before, times, size // times, *after)
        rows = _same_along(whole, place)
    if rows is None or _same_along(rows, place) is not None:
        return None
    return rows


def _same_along(tensor: Tensor, place: int) -> Tensor | None:
    """Return a tensor without one of its dimensions, if its numbers are the same all along it; else None."""
    first = tensor.narrow(place, 0, 1)
    return first.squeeze(place) if bool((tensor == first).all()) else None
