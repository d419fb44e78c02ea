"""Try what makes two tensors of one stage the same: a factor, another order along an axis, other positions, a dtype.

    q_heads on the left = 0.5 · q_heads on the right        a scale of 0.5

Nothing is named that does not give the same numbers, within a tolerance that the caller measured.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    tried = (
        *_factors(stage, left, right, near, called),
        *_orders(stage, axes.split(), (left, right), near, called),
        *_shifts(stage, axes.split(), (left, right), near, called),
        *_roundings(stage, sides, called),
    )
    return next(iter(tried), None)


def _is_near(left: Tensor, right: Tensor, near: float) -> bool:
    apart = (left - right).abs().masked_fill(left == right, 0.0).nan_to_num(torch.inf)
    return not apart.numel() or float(apart.max()) <= near


def _factors(stage: str, left: Tensor, right: Tensor, near: float, called: tuple[str, str]) -> Iterator[Replacement]:
    """Yield the one number by which the left is a multiple of the right."""
    if not bool(left.isfinite().all()) or not bool(right.isfinite().all()):
        return
    square = float((right * right).sum())
    factor = float((left * right).sum()) / square if square else 0.0
    if not factor or not _is_near(left, factor * right, max(1.0, abs(factor)) * near):
        return
    sentence = f"{stage} {called[0]} is {factor:.4g} times {stage} {called[1]}, and nothing else differs there."
    yield Replacement("scale", sentence)


def _orders(
    stage: str, axes: list[str], sides: tuple[Tensor, Tensor], near: float, called: tuple[str, str]
) -> Iterator[Replacement]:
    """Yield an axis along which both have the same slices in another order."""
    for axis in range(len(axes) if len(axes) == sides[0].dim() else 0):
        order = _order_along(axis, sides, near)
        if order is None:
            continue
        word = _PLURALS.get(axes[axis], _FEATURES if axis == len(axes) - 1 else f"{axes[axis]} positions")
        shown = " ".join(map(str, order[:_SHOWN])) + (" …" if len(order) > _SHOWN else "")
        sentence = f"The {word} of {stage} are in another order: {called[0]} they are {shown} of those {called[1]}."
        yield Replacement("order", sentence)


def _order_along(axis: int, sides: tuple[Tensor, Tensor], near: float) -> list[int] | None:
    """Return the slice of the right that each slice of the left is; None unless that is one order of all."""
    left, right = sides
    order = places_in(right, left, axis, near)
    return order if order is not None and sorted(order) == list(range(left.shape[axis])) else None


def places_in(whole: Tensor, part: Tensor, axis: int, near: float) -> list[int] | None:
    """Return the slice of a tensor that each slice of another one is, along an axis; None if one is no slice of it."""
    slices, candidates = (side.double().movedim(axis, 0).flatten(1) for side in (part, whole))
    if not 1 < len(slices) <= len(candidates) <= _MOST_PLACES or slices.shape[1] != candidates.shape[1]:
        return None
    if not bool(torch.cat([slices, candidates]).isfinite().all()):
        return None
    apart = torch.cdist(slices, candidates, p=torch.inf)
    nearest = apart.argmin(1)
    is_near = float(apart.gather(1, nearest[:, None]).max()) <= near
    return nearest.tolist() if is_near else None


def _shifts(
    stage: str, axes: list[str], sides: tuple[Tensor, Tensor], near: float, called: tuple[str, str]
) -> Iterator[Replacement]:
    """Yield by how many positions the left is behind the right, or ahead of it."""
    for axis in range(len(axes) if len(axes) == sides[0].dim() else 0):
        if axes[axis] not in ("query", "key"):
            continue
        for shift in shifts_of(sides[0].shape[axis]):
            if not _is_near(*overlap(*sides, axis, shift), near):
                continue
            where = f"p {'+' if shift > 0 else '-'} {abs(shift)}"
            sentence = f"Position p of {stage} {called[0]} is position {where} {called[1]}."
            yield Replacement("position", sentence)
            return


def shifts_of(length: int) -> list[int]:
    """Return the numbers of positions to try, the nearest first: 1, -1, 2, …; at least 2 positions are compared."""
    return [sign * shift for shift in range(1, min(_FARTHEST, length - 2) + 1) for sign in (1, -1)]


def overlap(left: Tensor, right: Tensor, axis: int, shift: int) -> tuple[Tensor, Tensor]:
    """Return position p of the left and position p + shift of the right, where both exist."""
    count = left.shape[axis] - abs(shift)
    return left.narrow(axis, max(-shift, 0), count), right.narrow(axis, max(shift, 0), count)


def _roundings(stage: str, sides: tuple[Tensor, Tensor], called: tuple[str, str]) -> Iterator[Replacement]:
    """Yield a dtype to which one side alone is rounded."""
    for rounded, other, where in ((*sides, called[0]), (*sides[::-1], called[1])):
        for dtype in _COARSER:
            if rounded.itemsize <= dtype.itemsize or not torch.equal(rounded, rounded.to(dtype).to(rounded.dtype)):
                continue
            step = torch.finfo(dtype).eps * rounded.abs().double()
            apart = (other.double() - rounded.double()).abs()
            if torch.equal(other, other.to(dtype).to(other.dtype)) or not bool((apart <= step).all()):
                continue
            name = str(dtype).removeprefix("torch.")
            yield Replacement("dtype", f"{stage} {where} is rounded to {name}; the other side's rounds to the same.")
