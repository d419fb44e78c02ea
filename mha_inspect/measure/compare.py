"""Two tensors element beside element, a part at a time, so that to compare them takes little memory and time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 15
"""Elements that are compared together: few enough to stay in a processor's cache, and for torch not to share them out
among threads, which wait for each other where the machine is busy."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parts(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same elements of two tensors of one shape, detached: a part at a time on the CPU; elsewhere, where each look
    is waited for, all at once. Each pair has one shape again, of fewer rows or dimensions."""
    if left.device != right.device or left.device.type == "mps":  # mps has no float64: it hands its numbers over
        left, right = left.cpu(), right.cpu()
    return _split(left.detach(), right.detach())


def _split(left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    if left.device.type != "cpu" or left.numel() <= _CHUNK:
        yield left, right
    elif left.shape[0] == 1:
        yield from _split(left[0], right[0])
    else:
        rows = max(1, left.shape[0] * _CHUNK // left.numel())
        for one, other in zip(torch.split(left, rows), torch.split(right, rows), strict=True):
            yield from _split(one, other)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of any shape are equal down to the sign of a zero, a NaN equal to itself.

    False where shape or dtype is another. On meta, where there is nothing to compare, these alone decide.
    """
    if left.shape != right.shape or left.dtype != right.dtype or left.is_meta != right.is_meta:
        return False
    if left.is_meta or not left.numel():
        return True
    bits = _BITS.get(left.element_size(), torch.uint8)  # complex numbers of 16 bytes: byte by byte
    one, other = (side.detach().flatten().view(bits) for side in (left, right))
    return all(int(bound) == 0 for pair in parts(one, other) for bound in torch.aminmax(pair[0] - pair[1]))
