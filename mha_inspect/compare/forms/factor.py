"""One side is a multiple of the other: by one number, or by one for each head, query or key."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from ...text import listed, small
from ..pair import Difference, Why

_SHOWN = 8
"""Most factors to list."""
_AXES = ("heads", "kv_heads", "query", "key", "features", "embed")
"""Axes along which there may be a factor each."""
_WORDS = {"heads": "head", "kv_heads": "key head", "features": "feature", "embed": "feature", "batch": "batch item"}
_FEWEST = 4
"""A factor of fewer numbers fits by chance."""
_SAME = 1e-3
"""The factor must be known this well, relative to itself."""


def factor(difference: Difference) -> Why | None:
    """Return the number by which the left is a multiple of the right."""
    left, right = difference.ours, difference.theirs
    if not difference.is_finite:
        return None
    square = float((right * right).sum())
    number = float((left * right).sum()) / square if square else 0.0
    # The rounding of the right is multiplied too.
    if not number or not difference.is_explained_by(number * right, max(1.0, abs(number))):
        return None
    stage, where = difference.stage, difference.where
    return Why(
        "scale",
        f"{difference.start} {where.left} is {number:.4g} times {stage} {where.right}, and nothing else differs there.",
    )


def factors(difference: Difference) -> Why | None:
    """Return the factors of each head, query or key by which the left is a multiple of the right."""
    if not difference.is_finite:
        return None
    for axes in _choices(difference):
        numbers = _factors_along(axes, difference)
        if numbers is not None:
            return _by_place(numbers, axes, difference)
    return None


def _choices(difference: Difference) -> list[list[int]]:
    """Return the axes with a factor for each place: one of them, two, or all but the last."""
    shape = difference.left.shape
    along = [axis for axis, name in enumerate(difference.names) if name in _AXES and shape[axis] > 1]
    choices = [[axis] for axis in along]
    if shape[0] > 1:
        choices += [[0, axis] for axis in along if axis]
    if "key" in difference.names[-1:]:
        choices.append([*range(len(shape) - 1)])
    return choices


def _factors_along(axes: Sequence[int], difference: Difference) -> Tensor | None:
    """Return a factor for each place along axes, with size 1 along the others; None if they do not explain all."""
    left, right = difference.ours, difference.theirs
    others = [axis for axis in range(left.dim()) if axis not in axes]
    if prod(left.shape[axis] for axis in others) < _FEWEST:
        return None
    squares = (right * right).sum(others, keepdim=True)
    # The factor of very small numbers is not known.
    smallest = difference.near / _SAME
    if float(squares.min()) <= smallest**2:
        return None
    products = (left * right).sum(others, keepdim=True)
    numbers = products / squares
    largest = float(numbers.abs().max())
    is_all = difference.is_explained_by(numbers * right, max(1.0, largest))
    return numbers if is_all else None


def _by_place(numbers: Tensor, axes: Sequence[int], difference: Difference) -> Why:
    names = [difference.names[axis] for axis in axes]
    places = listed([_WORDS.get(name, name) for name in names])
    first = numbers.flatten()[:_SHOWN].tolist()
    shown = ", ".join(map(small, first))
    if numbers.numel() > _SHOWN:
        shown += ", …"
    stage, where = difference.stage, difference.where
    subject = f"{difference.start} {where.left} is {stage} {where.right}"
    return Why("factor", f"{subject} times one number for each {places}: {shown}.")
