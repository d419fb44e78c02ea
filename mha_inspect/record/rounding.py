"""Measure how far two tensors are apart, and judge the difference by a measured rounding error.

A fixed tolerance fails both ways: small outputs that differ pass, and large outputs that only round differently fail.
So the rounding error is measured in the same run, against the same computation in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..reports.common import Verdict

DIFFERS_ABOVE = 10.0
"""A difference above this many noise floors is too large to be rounding."""
SAME_UP_TO = 2.0
"""Two results that are each one noise floor away from the exact result differ by at most this many noise floors."""
STEP = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
"""Rounding error of float64 in units of float32's: no dtype is finer than float64, so float32 is measured instead."""
_CHUNK = 1 << 15
"""Number of elements compared at once: small enough for the processor's cache, and for torch to use a single thread,
since threads wait for each other on a busy machine."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Rounding:
    """A difference, the measured rounding error, and the verdict."""

    difference: float
    error: float
    times: float
    verdict: Verdict

    @classmethod
    def of(cls, difference: float, error: float) -> Rounding:
        """Return a difference with its verdict."""
        times, verdict = judge(difference, error)
        return cls(difference, error, times, verdict)


def beside(dtype: torch.dtype) -> tuple[torch.dtype, float]:
    """Return the dtype that rounding is measured against, and the factor for the measured error.

    No dtype is finer than float64, so its rounding is measured against float32 and scaled down.
    """
    if dtype == torch.float64:
        return torch.float32, STEP
    return torch.float64, 1.0


def judge(max_abs_difference: float, noise_floor: float) -> tuple[float, Verdict]:
    """Return the difference in units of the noise floor, and the verdict.

    A difference of 0 gives 0. A nonzero difference with a noise floor of 0 gives infinity. NaN differs.
    """
    if max_abs_difference == 0:
        return 0.0, "same"
    times = max_abs_difference / noise_floor if noise_floor > 0 else math.inf
    if math.isnan(times) or times > DIFFERS_ABOVE:
        return times, "differs"
    return times, "same" if times <= SAME_UP_TO else "inconclusive"


def max_difference(left: Tensor, right: Tensor) -> float:
    """Return the largest difference between elements of two tensors of the same shape, as `distances` defines it."""
    largest = [part.largest for part in _differences(left, right)]
    return max(largest, default=0.0)


def rounding_error(output: Tensor, reference: Tensor) -> float:
    """Return the largest difference between elements that are finite in both tensors."""
    largest = [part.largest for part in _differences(output, reference, finite=True)]
    return max(largest, default=0.0)


def distances(left: Tensor, right: Tensor) -> tuple[float, float]:
    """Return the largest difference, and ‖left - right‖ / ‖left‖, of two tensors of the same shape.

    float32 and smaller dtypes are subtracted in float32, with an error of at most 2⁻²⁴ of the difference; squares are
    summed in float64. Two NaNs or two equal infinities differ by 0; against any other number they differ by infinity.
    ‖left‖ is over finite elements.
    """
    largest = apart = whole = 0.0
    for part in _differences(left, right):
        largest = max(largest, part.largest)
        if part.largest:
            apart += _square(part.difference.double())
    if apart == 0:
        return largest, 0.0
    for numbers, _ in parts(left, left):
        whole += _square(numbers.double().nan_to_num(0.0, 0.0, 0.0))
    if not whole:
        return largest, math.inf
    return largest, math.sqrt(apart) / math.sqrt(whole)


def _square(numbers: Tensor) -> float:
    """Return the sum of squares."""
    return float(torch.linalg.vector_norm(numbers)) ** 2


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits; a NaN equals itself, and 0 differs from -0.

    Meta tensors have no bits: shape and dtype decide.
    """
    if left.shape != right.shape or left.dtype != right.dtype or left.is_meta != right.is_meta:
        return False
    if left.is_meta or not left.numel():
        return True
    bits = _BITS.get(left.element_size(), torch.uint8)  # 16-byte complex numbers: byte by byte
    left_bits = left.detach().flatten().view(bits)
    right_bits = right.detach().flatten().view(bits)
    for left_part, right_part in parts(left_bits, right_bits):
        low, high = torch.aminmax(left_part - right_part)
        if int(low) != 0 or int(high) != 0:
            return False
    return True


class _Part(NamedTuple):
    """The differences of some elements of two tensors."""

    difference: Tensor
    largest: float


def _differences(left: Tensor, right: Tensor, *, finite: bool = False) -> Iterator[_Part]:
    """Yield the differences of two tensors, one part at a time, each with its largest.

    Numbers that are not finite differ as `distances` says; with `finite` they differ by 0. Only parts that contain such
    numbers are compared element by element, which takes ten times as long as one subtraction.
    """
    if left is right or not left.numel():
        return
    for left_part, right_part in parts(left, right):
        difference = _wide(left_part) - _wide(right_part)
        largest = _largest(difference)
        if not math.isfinite(largest):
            a, b = left_part.double(), right_part.double()
            equal = (a == b) | (a.isnan() & b.isnan())
            if finite:
                equal |= ~(a.isfinite() & b.isfinite())
            difference = (a - b).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
            largest = _largest(difference.masked_fill_(equal, 0.0))
        yield _Part(difference, largest)


def _largest(difference: Tensor) -> float:
    low, high = map(float, torch.aminmax(difference))
    if math.isnan(low):
        return math.nan
    return max(0.0, -low, high)


def _wide(numbers: Tensor) -> Tensor:
    if numbers.dtype in (torch.float32, torch.float64):
        return numbers
    return numbers.float() if numbers.is_floating_point() else numbers.double()


def parts(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching parts of two tensors of the same shape, detached; a complex number becomes two real numbers.

    Other devices than the CPU yield one part, because each read waits for the device.
    """
    if left.device != right.device or left.device.type == "mps":  # mps has no float64
        left, right = left.cpu(), right.cpu()
    if left.is_complex() or right.is_complex():
        left, right = _as_real(left), _as_real(right)
    yield from _split(left.detach(), right.detach())


def _as_real(numbers: Tensor) -> Tensor:
    """Return complex numbers as real ones: the real and the imaginary part in a last dimension."""
    return torch.view_as_real(numbers.to(torch.complex128))


def _split(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if left.device.type != "cpu" or left.numel() <= _CHUNK:
        yield left, right
    elif left.shape[0] == 1:
        yield from _split(left[0], right[0])
    else:
        rows = max(1, left.shape[0] * _CHUNK // left.numel())
        for left_rows, right_rows in zip(torch.split(left, rows), torch.split(right, rows), strict=True):
            yield from _split(left_rows, right_rows)
