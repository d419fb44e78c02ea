"""The tensors of numbers that a forward returned, and how far those of two runs are apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...record.arguments import dense, tensors_in
from .runner import RaisedError

_AT_ONCE = 1 << 18
"""Numbers that are compared at once."""


class NotPossibleError(Exception):
    """A check cannot be made here; the message says why."""


def outputs_of(returned: Any) -> list[Tensor]:
    """Return the tensors of numbers that a forward returned, a loss and other single numbers last, as `[1]`.

    Raises `NotPossibleError` where there is none.
    """
    tensors = [_numbers(dense(tensor.detach())) for _, tensor in tensors_in(returned)]
    tensors = sorted((t for t in tensors if t.is_floating_point() and t.numel()), key=lambda t: not t.dim())
    if not tensors and hasattr(returned, "to_tuple"):
        return outputs_of(returned.to_tuple())
    if not tensors:
        raise NotPossibleError("the forward returns no tensor of numbers")
    return [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]


def _numbers(tensor: Tensor) -> Tensor:
    """Return real numbers that can be compared: a complex one is two, and those of a byte are widened."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def difference(left: Tensor, right: Tensor) -> Tensor:
    """Return the largest difference of each row along the last dimension, in float64.

    NaN beside NaN and an infinity beside the same one are none. Raises `RaisedError` where the shapes are not the same.
    """
    if left.shape != right.shape:
        raise RaisedError(f"the output has another shape then: {list(left.shape)}, not {list(right.shape)}")
    width = left.shape[-1] if left.dim() else 1
    rows = left.detach().reshape(-1, width), right.detach().reshape(-1, width)
    step = max(_AT_ONCE // max(width, 1), 1)
    parts = [_differences(*(side[at : at + step] for side in rows)) for at in range(0, max(len(rows[0]), 1), step)]
    return torch.cat(parts).reshape(left.shape[:-1])


def _differences(left: Tensor, right: Tensor) -> Tensor:
    left, right = left.double(), right.double()
    equal = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs_().nan_to_num_(nan=float("inf"), posinf=float("inf")).masked_fill_(equal, 0.0)
    return apart.amax(-1) if apart.shape[-1] else apart.sum(-1)
