"""One side has the slices of the other in another order, e.g. its heads, or two axes were exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

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
    last = len(difference.names) - 1
    for axis, name in enumerate(difference.names):
        places = _order_along(axis, difference)
        if places is None:
            continue
        other = "features" if axis == last else f"{name} positions"
        slices = _SLICES.get(name, other)
        where = difference.where
        sides = f"{where.left} they are {in_turn(places)} of those {where.right}"
        return Why("order", f"The {slices} of {difference.stage} are in another order: {sides}.")
    return None


def in_turn(places: Sequence[int]) -> str:
    """Return the first places in their order: `0 2 1 3`."""
    shown = " ".join(map(str, places[:_SHOWN]))
    return f"{shown} …" if len(places) > _SHOWN else shown


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
    shape = difference.right.shape
    axes = [axis for axis in range(1, len(shape)) if shape[axis] > 1]
    for first, second in combinations(axes, 2):
        how = _exchanged(first, second, difference)
        if not how:
            continue
        words = "two axes"
        if difference.names:
            words = f"{difference.names[first]} and {difference.names[second]}"
        return Why("order", f"In {difference.stage}, {words} are {how}.")
    return None


def _exchanged(first: int, second: int, difference: Difference) -> str:
    """Return how two axes are read in each other's place; empty if they are not."""
    where = difference.where
    right = difference.theirs
    turned = right.transpose(first, second)
    if turned.shape == right.shape and difference.is_explained_by(turned):
        return f"exchanged {where.left}"
    if difference.is_explained_by(turned.reshape(right.shape)):
        return f"transposed and read without it {where.left}"
    # The same on the other side.
    back = difference.ours.transpose(first, second)
    if are_near(back.reshape(right.shape), right, difference.near):
        return f"transposed and read without it {where.right}"
    return ""
