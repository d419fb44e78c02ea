"""How far two tensors are apart, and what that means beside a rounding error that was measured.

A fixed tolerance is wrong both ways: it calls small outputs equal that are far apart, and large ones different that are
rounded alike. So the rounding error is measured, in the same run, against the same computation in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..reports.common import Verdict

DIFFERS_ABOVE = 10.0
"""A difference of more than this many times the noise floor is no rounding error."""
SAME_UP_TO = 2.0
"""Two results that are each one noise floor away from the exact one are at most this many apart."""
STEP = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
"""Rounding of float64 in units of float32's: beside float64 there is nothing finer, and float32 is measured."""
_CHUNK = 1 << 15
"""Elements that are compared together: few enough to stay in a processor's cache, and for torch not to share them out
among threads, which wait for each other where the machine is busy."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Rounding:
    """A difference beside a rounding error that was measured, and the verdict."""

    difference: float
    error: float
    times: float
    verdict: Verdict

    @classmethod
    def of(cls, difference: float, error: float) -> Rounding:
        """Judge a difference."""
        return cls(difference, error, *judge(difference, error))


def beside(dtype: torch.dtype) -> tuple[torch.dtype, float]:
    """Return the dtype that rounding is measured beside, and what an error that is measured so counts.

    Beside float64 there is nothing finer: float32 is measured, and counts less.
    """
    return (torch.float32, STEP) if dtype == torch.float64 else (torch.float64, 1.0)


def judge(max_abs_difference: float, noise_floor: float) -> tuple[float, Verdict]:
    """Return the difference in units of the noise floor, and what that means.

    No difference is 0 times any floor. A difference beside a floor of 0 is infinitely many times it. A NaN differs.
    """
    if max_abs_difference == 0:
        return 0.0, "same"
    times = max_abs_difference / noise_floor if noise_floor > 0 else math.inf
    if math.isnan(times) or times > DIFFERS_ABOVE:
        return times, "differs"
    return times, "same" if times <= SAME_UP_TO else "inconclusive"


def max_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest difference between elements of two tensors of one shape, as `distances` takes it."""
    return max((largest for _, largest in _differences(left, right)), default=0.0)


def rounding_error(output: Tensor, reference: Tensor) -> float:
    """Return the largest difference over the elements that are finite on both sides."""
    return max((largest for _, largest in _differences(output, reference, finite=True)), default=0.0)


def distances(left: Tensor, right: Tensor, size: float | None = None) -> tuple[float, float]:
    """Return the largest difference, and ‖left - right‖ / ‖left‖, of two tensors of one shape.

    Numbers of float32 and less are subtracted in float32, which is off by at most 2⁻²⁴ of a difference, and squares are
    summed in float64. NaN beside NaN and an infinity beside the same infinity are no difference; beside anything else
    they are an infinite one. ‖left‖ is over its finite elements: `size_of(left)`, or `size` where that is known.
    """
    largest = apart = 0.0
    for difference, most in _differences(left, right):
        largest = max(largest, most)
        if most:
            apart += float(torch.linalg.vector_norm(difference.double())) ** 2
    if apart == 0:
        return largest, 0.0
    whole = size_of(left) if size is None else size
    return largest, math.sqrt(apart) / whole if whole else math.inf


def size_of(tensor: Tensor) -> float:
    """Return ‖tensor‖ over its finite elements, summed in float64."""
    total = 0.0
    for part, _ in parts(tensor, tensor):
        norm = float(torch.linalg.vector_norm(part.double()))
        if not math.isfinite(norm):
            norm = float(torch.linalg.vector_norm(part.double().masked_fill(~part.isfinite(), 0.0)))
        total += norm**2
    return math.sqrt(total)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors of any shape are equal down to the sign of a zero, a NaN equal to itself.

    False where shape or dtype is another. On meta, where there is nothing to compare, these alone decide.
    """
    if left.shape != right.shape or left.dtype != right.dtype or left.is_meta != right.is_meta:
        return False
    if left.is_meta or not left.numel():
        return True
    bits = _BITS.get(left.element_size(), torch.uint8)  # complex numbers of 16 bytes: byte by byte
    one, other = (side.detach().flatten().view(bits) for side in (left, right))
    return all(int(bound) == 0 for pair in parts(one, other) for bound in torch.aminmax(pair[0] - pair[1]))


def _differences(left: Tensor, right: Tensor, *, finite: bool = False) -> Iterator[tuple[Tensor, float]]:
    """Yield what two tensors are apart, a part at a time, and the largest of it.

    Where a number is not finite its difference is as `distances` says; with `finite` there is none. To compare element
    by element takes ten times as long as one subtraction, and is seldom needed.
    """
    if left is right or not left.numel():
        return
    for one, other in parts(left, right):
        difference = _wide(one) - _wide(other)
        largest = _largest(difference)
        if not math.isfinite(largest):
            one, other = one.double(), other.double()
            none = (one == other) | (one.isnan() & other.isnan())
            none = none | ~(one.isfinite() & other.isfinite()) if finite else none
            difference = (one - other).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
            largest = _largest(difference.masked_fill_(none, 0.0))
        yield difference, largest


def _largest(difference: Tensor) -> float:
    low, high = map(float, torch.aminmax(difference))
    return math.nan if math.isnan(low) else max(0.0, -low, high)


def _wide(numbers: Tensor) -> Tensor:
    if numbers.dtype in (torch.float32, torch.float64):
        return numbers
    return numbers.float() if numbers.is_floating_point() else numbers.double()


def parts(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same elements of two tensors of one shape, detached: a part at a time on the CPU; elsewhere, where each
    look is waited for, all at once. Each pair has one shape again, of fewer rows or dimensions; complex is two.
    """
    if left.device != right.device or left.device.type == "mps":  # mps has no float64: it hands its numbers over
        left, right = left.cpu(), right.cpu()
    if left.is_complex() or right.is_complex():
        left, right = (torch.view_as_real(side.to(torch.complex128)) for side in (left, right))
    yield from _split(left.detach(), right.detach())


def _split(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if left.device.type != "cpu" or left.numel() <= _CHUNK:
        yield left, right
    elif left.shape[0] == 1:
        yield from _split(left[0], right[0])
    else:
        rows = max(1, left.shape[0] * _CHUNK // left.numel())
        for one, other in zip(torch.split(left, rows), torch.split(right, rows), strict=True):
            yield from _split(one, other)
