"""Whether the heads of two checkpoints hold the same numbers, also in another order, and how far apart they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor

from ...record.rounding import parts, same_bits
from .heads import Numbers

_PROJECTED = 4
"""Numbers that stand for a head while heads are looked for."""


@dataclass
class Distance:
    """How far apart two tensors of one shape are, added up over their pieces."""

    same_bits: bool = True
    within_rounding: bool = True
    largest: float = 0.0
    squares: float = 0.0
    left_squares: float = 0.0

    def add(self, left: Tensor, right: Tensor) -> None:
        """Take in a piece of both. A NaN is equal to a NaN, and infinitely far from any number."""
        self.left_squares += _squares(left)
        if same_bits(left, right):
            return
        self.same_bits = False
        slack = (_step(left.dtype) + _step(right.dtype)) / 2
        lowest = _smallest(left.dtype) + _smallest(right.dtype)
        for ours, theirs in parts(left, right):
            one, other = ours.double(), theirs.double()
            equal = (one == other) | (one.isnan() & other.isnan())
            apart = torch.where(equal, 0, (one - other).abs().nan_to_num(inf, inf, inf))
            allowed = slack * torch.maximum(one.abs(), other.abs()) + lowest
            self.within_rounding &= bool((equal | (apart <= allowed.nan_to_num(0, 0, 0))).all())
            self.largest = max(self.largest, float(apart.max()))
            self.squares += float(apart.square().sum())

    @property
    def relative(self) -> float:
        """Return ‖left - right‖ / ‖left‖."""
        return sqrt(self.squares / self.left_squares) if self.left_squares else (inf if self.squares else 0.0)


def _squares(numbers: Tensor) -> float:
    """Return the sum of the squares of those that are finite."""
    return float(numbers.double().nan_to_num(0, 0, 0).square().sum())


def _step(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _smallest(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype) if dtype.is_floating_point else None
    return 0.0 if info is None else info.tiny * info.eps


def distance(left: Tensor, right: Tensor) -> Distance:
    """Return how far apart two tensors of one shape are."""
    found = Distance()
    found.add(left, right)
    return found


@dataclass(frozen=True)
class Match:
    """A part of the left side that holds the numbers of one on the right."""

    source: str
    heads: tuple[int, ...]
    """For each head on the right the one on the left."""
    rotary: str


def matched(part: str, left: Numbers, right: Numbers) -> Match | None:
    """Return which part of the left side holds the numbers of this one of the right, and in which order.

    None where no order of heads, of q, k and v, or of the features that a rotary embedding turns makes them the same.
    """
    kind, letter = part.split("_")
    others = [f"{kind}_{other}" for other in "qkv" if other != letter] if letter in "qkv" else []
    for source in (part, *others):
        if source not in left or left[source].shape != right[part].shape:
            continue
        norms = [sqrt(sum(map(_squares, numbers))) for numbers in (left[source], right[part])]
        if abs(norms[0] - norms[1]) > _tolerance(left[source], right[part]) * max(norms):
            continue  # a permutation keeps the norm
        ways = _rotary_orders(left[source].shape[1]) if letter in "qk" and source[-1] in "qk" else [("", None)]
        for rotary, order in ways:
            own = left[source] if order is None else left[source][:, order]
            heads = _heads_matched(own, right[part])
            if heads is not None and distance(own[list(heads)], right[part]).within_rounding:
                return Match(source, heads, rotary)
    return None


def _tolerance(left: Tensor, right: Tensor) -> float:
    """Return how far apart sums may be, of numbers that are the same but for the rounding of their dtypes."""
    return 1e-9 if left.dtype == right.dtype else 4 * max(_step(left.dtype), _step(right.dtype))


def _heads_matched(left: Tensor, right: Tensor) -> tuple[int, ...] | None:
    """Return for each head on the right one on the left that holds the same numbers; None where one has none."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(left[0].numel(), _PROJECTED, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.stack([head.flatten().double() @ directions for head in side]) for side in (left, right))
    sizes = torch.stack([head.double().norm() for head in right])
    allowed = _tolerance(left, right) * sizes + 1e-300
    near = ((ours[None] - theirs[:, None]).abs() <= allowed[:, None, None]).all(-1)
    found: list[int] = []
    for head in range(len(right)):
        candidates = [own for own in torch.nonzero(near[head]).flatten().tolist() if own not in found]
        if not candidates:
            return None
        found.append(head if head in candidates else candidates[0])
    return tuple(found)


def _rotary_orders(width: int) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the orders of a head's features in which a rotary embedding may have them: pairs, or halves."""
    yield "", None
    for turned in dict.fromkeys((width, width // 2, width // 4, 64, 32)):
        if turned < 4 or turned % 2 or turned > width:
            continue
        places, rest = torch.arange(turned), torch.arange(turned, width)
        among = "" if turned == width else f" among the first {turned} features"
        halves = places.view(-1, 2).T.flatten()
        yield f"pairs on the left, halves on the right{among}", torch.cat([halves, rest])
        yield f"halves on the left, pairs on the right{among}", torch.cat([places.view(2, -1).T.flatten(), rest])
