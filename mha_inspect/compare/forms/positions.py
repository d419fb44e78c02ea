"""One side is the other by some positions earlier or later."""

from __future__ import annotations

from torch import Tensor

from ..pair import Difference, Why, are_near

_FARTHEST = 16
"""Most positions by which a sequence may be shifted."""


def shifted(difference: Difference) -> Why | None:
    """Return by how many positions the left is behind the right, or ahead of it."""
    stage, where = difference.stage, difference.where
    for axis, name in enumerate(difference.names):
        if name not in ("query", "key"):
            continue
        for shift in shifts_of(difference.left.shape[axis]):
            left, right = overlap(difference.ours, difference.theirs, axis, shift)
            if are_near(left, right, difference.near):
                sign = "+" if shift > 0 else "-"
                position = f"position p {sign} {abs(shift)} {where.right}"
                return Why("position", f"Position p of {stage} {where.left} is {position}.", fact=str(shift))
    return None


def shifts_of(length: int) -> list[int]:
    """Return the numbers of positions to try, the nearest first: 1, -1, 2, …; at least 2 positions are compared."""
    farthest = min(_FARTHEST, length - 2)
    shifts: list[int] = []
    for distance in range(1, farthest + 1):
        shifts += (distance, -distance)
    return shifts


def overlap(left: Tensor, right: Tensor, axis: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return position p of the left and position p + shift of the right, where both exist."""
    count = left.shape[axis] - abs(shift)
    first_left = max(-shift, 0)
    first_right = max(shift, 0)
    return left.narrow(axis, first_left, count), right.narrow(axis, first_right, count)
