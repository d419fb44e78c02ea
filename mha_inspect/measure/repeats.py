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
    whole = tensor.reshape(*before, times, size // times, *after)
    for parts, copies in ((neighbours, place + 1), (whole, place)):
        first = parts.narrow(copies, 0, 1)
        if not bool((parts == first).all()):
            continue
        rows = first.squeeze(copies)
        return None if bool((rows == rows.narrow(place, 0, 1)).all()) else rows
    return None
