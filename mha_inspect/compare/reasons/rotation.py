"""Rotary positions turn other features of a head together: both halves of it, or neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...measure.reorder import reordered
from ..pair import Difference, Pair, Side, Why
from ..replay import LostError, again

_SIDES = {"q_heads": "q_proj", "k_heads": "k_proj"}


def rotation(pair: Pair, difference: Difference) -> Why | None:
    """Return which features each side turns together.

    The features of each head of the right are put in the order in which the left pairs them, before they are rotated.
    """
    projection = _SIDES.get(difference.stage)
    width = difference.left.shape[-1]
    if projection is None or width < 4 or width % 2 or pair.difference(projection) is not None:
        return None
    half = width // 2
    halves = _Pairing("two half", f"(i, i + {half})")
    neighbours = _Pairing("half two", "(2i, 2i + 1)")
    for left, right in ((halves, neighbours), (neighbours, halves)):
        order = reordered(left.pattern, right.pattern, {"two": 2, "half": half})
        turned = _turned_in_order(pair.right, projection, difference.stage, order)
        if turned is not None and difference.is_explained_by(turned):
            return _of_pairings(left, right, half, difference)
    return None


@dataclass(frozen=True)
class _Pairing:
    """Which features of a head a rotation turns together."""

    pattern: str
    """The axes of a head's features, as in einops: `two half`."""
    features: str
    """`(2i, 2i + 1)`."""


def _of_pairings(left: _Pairing, right: _Pairing, half: int, difference: Difference) -> Why:
    where = difference.where
    sentence = (
        f"The rotation turns features {left.features} of a head together {where.left}, and {right.features} "
        f"{where.right}."
    )
    line = f'rearrange(w, "(heads {left.pattern}) ... -> (heads {right.pattern}) ...", two=2, half={half})'
    return Why("rotation", sentence, line, fact=left.pattern)


def _turned_in_order(side: Side, projection: str, heads: str, order: Tensor) -> Tensor | None:
    """Return the heads whose features were rotated in another order, each back in its place; None if unknown."""
    content = side.stage(projection)
    target = side.attention.stages.get(heads)
    width = len(order)
    if content is None or target is None or content.shape[-1] % width:
        return None
    by_head = content.reshape(*content.shape[:-1], -1, width)
    moved = by_head[..., order].flatten(-2)
    value = side.in_own_axes(projection, moved)
    if value is None:
        return None
    source = side.attention.stages[projection]
    try:
        turned = again(side.kept, source, value, target)
    except LostError:
        return None
    made = side.in_canonical_axes(heads, turned)
    if made is None:
        return None
    back = torch.argsort(order)
    return made[..., back]
