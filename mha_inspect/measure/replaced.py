"""Try what makes two tensors of one stage the same: a factor, another order along an axis, other positions, a dtype.

    q_heads on the left = 0.5 · q_heads on the right        a scale of 0.5

Nothing is named that does not give the same numbers, within a tolerance that the caller measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["scale", "order", "position", "dtype"]

_FARTHEST = 16
"""Most positions by which a sequence may be shifted."""
_MOST_PLACES = 512
"""Most slices along an axis whose order is searched."""
_SHOWN = 8
"""Most places of an order to list."""
_COARSER = (torch.bfloat16, torch.float16)
_PLURALS = {"heads": "heads", "kv_heads": "key heads", "batch": "batch items", "embed": "features"}
_FEATURES = "features"


@dataclass(frozen=True)
class Replacement:
    """A change of the right tensor, or of the left one, that makes both the same."""

    kind: Kind
    sentence: str


@dataclass(frozen=True, eq=False)
class _Stage:
    """One stage on both sides, in float64."""

    name: str
    axes: list[str]
    """The name of each dimension; empty if they are not known."""
    left: Tensor
    right: Tensor
    near: float
    """Numbers up to this far apart are the same."""
    on_left: str
    """The words for the left side."""
    on_right: str


def replacement(
    stage: str, axes: str, sides: tuple[Tensor, Tensor], near: float, called: tuple[str, str]
) -> Replacement | None:
    """Return the first change that makes both sides the same; None if none does.

    `axes` names each dimension of both, e.g. `batch heads query head_dim`. Numbers up to `near` apart are the same.
    `called` has the words for the sides: `on the left`.
    """
    left, right = (side.detach().double() for side in sides)
    if left.shape != right.shape or not left.numel() or _is_near(left, right, near):
        return None
    names = axes.split()
    on_left, on_right = called
    both = _Stage(
        name=stage,
        axes=names if len(names) == left.dim() else [],
        left=left,
        right=right,
        near=near,
        on_left=on_left,
        on_right=on_right,
    )
    for change_of in (_factor, _order, _shift):
        change = change_of(both)
        if change is not None:
            return change
    # In their own dtypes: float64 does not show what was rounded.
    given_left, given_right = sides
    left_rounded = _rounding(f"{stage} {on_left}", given_left, given_right)
    if left_rounded is not None:
        return left_rounded
    return _rounding(f"{stage} {on_right}", given_right, given_left)


def _is_near(left: Tensor, right: Tensor, near: float) -> bool:
    """Return whether no two numbers are farther apart; equal infinities are not, and NaN is from every number."""
    is_equal = left == right
    apart = (left - right).abs().masked_fill(is_equal, 0.0).nan_to_num(torch.inf)
    if not apart.numel():
        return True
    return float(apart.max()) <= near


def _factor(both: _Stage) -> Replacement | None:
    """Return the number by which the left is a multiple of the right; None if no number makes both the same."""
    left, right = both.left, both.right
    if not bool(left.isfinite().all()) or not bool(right.isfinite().all()):
        return None
    square = float((right * right).sum())
    if not square:
        return None
    factor = float((left * right).sum()) / square
    if not factor:
        return None
    # The rounding of the right is multiplied too.
    near = max(1.0, abs(factor)) * both.near
    if not _is_near(left, factor * right, near):
        return None
    name = both.name
    return Replacement(
        "scale",
        f"{name} {both.on_left} is {factor:.4g} times {name} {both.on_right}, and nothing else differs there.",
    )


def _order(both: _Stage) -> Replacement | None:
    """Return an axis along which both have the same slices in another order; None if there is none."""
    for axis, name in enumerate(both.axes):
        order = _order_along(axis, both)
        if order is None:
            continue
        if name in _PLURALS:
            slices = _PLURALS[name]
        elif axis == len(both.axes) - 1:
            slices = _FEATURES
        else:
            slices = f"{name} positions"
        shown = " ".join(map(str, order[:_SHOWN]))
        if len(order) > _SHOWN:
            shown += " …"
        sides = f"{both.on_left} they are {shown} of those {both.on_right}"
        return Replacement("order", f"The {slices} of {both.name} are in another order: {sides}.")
    return None


def _order_along(axis: int, both: _Stage) -> list[int] | None:
    """Return the slice of the right that each slice of the left is; None unless that is one order of all."""
    order = places_in(both.right, both.left, axis, both.near)
    if order is None:
        return None
    every_slice = list(range(both.left.shape[axis]))
    return order if sorted(order) == every_slice else None


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


def _shift(both: _Stage) -> Replacement | None:
    """Return by how many positions the left is behind the right, or ahead of it; None if it is neither."""
    for axis, name in enumerate(both.axes):
        if name not in ("query", "key"):
            continue
        for shift in shifts_of(both.left.shape[axis]):
            left, right = overlap(both.left, both.right, axis, shift)
            if not _is_near(left, right, both.near):
                continue
            sign = "+" if shift > 0 else "-"
            position = f"position p {sign} {abs(shift)} {both.on_right}"
            return Replacement("position", f"Position p of {both.name} {both.on_left} is {position}.")
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


def _rounding(name: str, rounded: Tensor, exact: Tensor) -> Replacement | None:
    """Return the dtype to which one side alone is rounded; None if there is none.

    `name` is that of the rounded side: `q_heads on the left`.
    """
    for dtype in _COARSER:
        if rounded.itemsize <= dtype.itemsize:
            continue
        if not _is_rounded_to(rounded, dtype) or _is_rounded_to(exact, dtype):
            continue
        step = torch.finfo(dtype).eps * rounded.abs().double()
        apart = (exact.double() - rounded.double()).abs()
        if not bool((apart <= step).all()):
            continue
        coarser = str(dtype).removeprefix("torch.")
        return Replacement("dtype", f"{name} is rounded to {coarser}; the other side's rounds to the same.")
    return None


def _is_rounded_to(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a dtype has every number of a tensor."""
    there_and_back = tensor.to(dtype).to(tensor.dtype)
    return torch.equal(tensor, there_and_back)
