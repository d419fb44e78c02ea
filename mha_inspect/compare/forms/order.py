"""One side has the slices of the other in another order, e.g. its heads, or two axes were exchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pair import Difference, Why, are_near

_MOST_PLACES = 512
"""Most slices along an axis whose order is searched."""
_SHOWN = 8
"""Most places of an order to list."""
_SLICES = {"heads": "heads", "kv_heads": "key heads", "batch": "batch items", "embed": "features"}


def order(difference: Difference) -> Why | None:
    """Return an axis along which both have the same slices in another order."""
    if not difference.is_finite:
        return None
    for axis, name in enumerate(difference.names):
        places = _order_along(axis, difference)
        if places is None:
            continue
        slices = _SLICES.get(name, f"{name} positions")
        if axis == len(difference.names) - 1:
            slices = _SLICES.get(name, "features")
        shown = " ".join(map(str, places[:_SHOWN]))
        if len(places) > _SHOWN:
            shown += " …"
        where = difference.where
        sides = f"{where.left} they are {shown} of those {where.right}"
        return Why("order", f"The {slices} of {difference.stage} are in another order: {sides}.")
    return None


def _order_along(axis: int, difference: Difference) -> list[int] | None:
    """Return the slice of the right that each slice of the left is; None unless that is one order of all.

    Heads may be there several times, where they share keys.
    """
    places = places_in(difference.right, difference.left, axis, difference.near)
    if places is None:
        return None
    is_of_heads = difference.names[axis] in ("heads", "kv_heads")
    return places if is_of_heads or sorted(places) == list(range(difference.left.shape[axis])) else None


def places_in(whole: Tensor, part: Tensor, axis: int, near: float) -> list[int] | None:
    """Return the slice of a tensor that each slice of another one is, along an axis; None if one is no slice of it."""
    slices = _slices_along(axis, part)
    candidates = _slices_along(axis, whole)
    if slices.shape[1] != candidates.shape[1]:
        return None
    if not 1 < len(slices) <= len(candidates) <= _MOST_PLACES:
        return None
    if not bool(torch.cat([slices, candidates]).isfinite().all()):
        return None
    apart = torch.cdist(slices, candidates, p=torch.inf)
    nearest = apart.argmin(1)
    distances = apart.gather(1, nearest[:, None])
    return nearest.tolist() if float(distances.max()) <= near else None


def _slices_along(axis: int, tensor: Tensor) -> Tensor:
    """Return the slices of a tensor along an axis, `slice number`, in float64."""
    return tensor.double().movedim(axis, 0).flatten(1)


def exchanged(difference: Difference) -> Why | None:
    """Return two axes that were read in each other's place, by a view where a transpose was needed, or by a turn."""
    right, where, stage = difference.theirs, difference.where, difference.stage
    for first in range(1, right.dim()):
        for second in range(first + 1, right.dim()):
            turned = right.transpose(first, second)
            if min(right.shape[first], right.shape[second]) < 2:
                continue
            words = f"{difference.names[first]} and {difference.names[second]}" if difference.names else "two axes"
            if turned.shape == right.shape and difference.is_explained_by(turned):
                return Why("order", f"In {stage}, {words} are exchanged {where.left}.")
            if difference.is_explained_by(turned.reshape(right.shape)):
                return Why("order", f"In {stage}, {words} are transposed and read without it {where.left}.")
            # The same on the other side.
            back = difference.ours.transpose(first, second).reshape(right.shape)
            if are_near(back, right, difference.near):
                return Why("order", f"In {stage}, {words} are transposed and read without it {where.right}.")
    return None
