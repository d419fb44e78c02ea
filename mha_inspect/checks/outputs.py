"""The output of a forward, and how far two outputs are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..record.arguments import dense, tensors_in
from .lab import NotPossibleError


def output_of_tokens(returned: Any, inputs: Sequence[Tensor]) -> Tensor:
    """Return the first output, but skip a matrix of all pairs of batch items (e.g. texts by images).

    If batch and positions come out swapped, they are swapped back to the order of the inputs. Raises
    `NotPossibleError` if the forward returned no tensor of numbers.
    """
    output = _first_of_tokens(_outputs(returned), inputs)
    if not inputs or output.dim() < 3:
        return output
    batch, positions = inputs[0].shape[:2]
    is_swapped = output.shape[:2] == (positions, batch) and batch != positions
    return output.transpose(0, 1) if is_swapped else output


def _first_of_tokens(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    """Return the first output; where it is a matrix of all pairs of batch items, the first one of tokens."""
    first = outputs[0]
    if not _is_of_pairs(first, inputs):
        return first
    for output in outputs:
        if output.dim() > 2:
            return output
    return first


def _is_of_pairs(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Return whether an output is a matrix of all pairs of batch items: `text image` for ids of texts and images."""
    if len(inputs) < 2 or inputs[0].is_floating_point():
        return False
    return set(output.shape) == {len(inputs[0])}


def _outputs(returned: Any) -> list[Tensor]:
    """Return the floating-point tensors that a forward returned; scalars (e.g. a loss) come last, as `[1]`."""
    tensors: list[Tensor] = []
    scalars: list[Tensor] = []
    for _, value in tensors_in(returned):
        tensor = dense(value.detach())
        if not tensor.numel():
            continue
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if not tensor.is_floating_point():
            continue
        # Few operations accept one-byte floats.
        numbers = tensor.float() if tensor.itemsize == 1 else tensor
        if numbers.dim():
            tensors.append(numbers)
        else:
            scalars.append(numbers.reshape(1))
    if tensors or scalars:
        return [*tensors, *scalars]
    if hasattr(returned, "to_tuple"):
        return _outputs(returned.to_tuple())
    raise NotPossibleError("the forward returns no tensor of numbers")


def apart(output: Tensor, base: Tensor) -> Tensor:
    """Return the difference of two outputs number by number; infinite if one is NaN, and 0 if both are."""
    left = output.float() if output.itemsize < 4 else output
    right = base.float() if base.itemsize < 4 else base
    is_equal = (left == right) | (left.isnan() & right.isnan())
    apart = (left - right).abs_().nan_to_num_(nan=float("inf"), posinf=float("inf"))
    return apart.masked_fill_(is_equal, 0.0)
