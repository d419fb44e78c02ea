"""One side is 0 at some places, e.g. at padding, and the same as the other side elsewhere."""

from __future__ import annotations

from ...text import plural
from ..pair import Difference, Why, are_near


def zeros(difference: Difference) -> Why | None:
    """Return the positions at which one side alone is 0, if both are the same at all others."""
    axes = [axis for axis, name in enumerate(difference.names) if name not in ("batch", "query", "key")]
    if difference.names[:1] != ["batch"] or not axes or not difference.is_finite:
        return None
    where = difference.where
    for called, side, other in (
        (where.left, difference.ours, difference.theirs),
        (where.right, difference.theirs, difference.ours),
    ):
        marks = side == 0
        for axis in axes:
            marks = marks.all(axis, keepdim=True)
        if not bool(marks.any()) or bool(marks.all()):
            continue
        if are_near(side, other.masked_fill(marks, 0.0), difference.near):
            places = f"{int(marks.sum())} of {plural(marks.numel(), 'position')}"
            return Why("padding", f"{difference.start} {called} is 0 at {places}, and nothing else differs there.")
    return None
