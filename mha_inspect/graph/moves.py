"""Where elements come from that an operation only moved: by their numbers in row-major order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..record.ops import Op, TensorRef
from .axis import setting


def coordinates_of(at: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Where elements are along each dimension, counted in row-major order.

    Not by `torch.unravel_index`, whose first use imports symbolic shapes, and sympy with them: up to a second.
    """
    coordinates = []
    for size in reversed(shape[1:]):
        coordinates.append(at % size)
        at = at.floor_divide(size)  # the operator goes through Python first
    return [at, *reversed(coordinates)] if len(shape) else []


def index_of(coordinates: Sequence[Tensor], shape: Sequence[int], count: int = 1) -> Tensor:
    """The number in row-major order of the elements at these coordinates; of a single number as often as `count`."""
    at = torch.zeros_like(coordinates[0]) if coordinates else torch.zeros(count, dtype=torch.long)
    for coordinate, size in zip(coordinates, shape, strict=True):
        at = at * size + coordinate
    return at


Sources = Iterator[tuple[TensorRef, Tensor, Tensor | None]]


def _cat(op: Op, out: TensorRef, at: Tensor) -> Sources:
    coordinates = coordinates_of(at, out.shape)
    dim = setting(op, 1, "dim", 0) % len(out.shape)
    start = 0
    for source in op.inputs:
        if len(source.shape) != len(out.shape):
            yield source, at, torch.zeros_like(at, dtype=torch.bool)
            continue
        stop = start + source.shape[dim]
        kept = (coordinates[dim] >= start) & (coordinates[dim] < stop)
        own = [*coordinates[:dim], coordinates[dim] - start, *coordinates[dim + 1 :]]
        yield source, index_of(own, source.shape), kept
        start = stop


def _stack(op: Op, out: TensorRef, at: Tensor) -> Sources:
    coordinates = coordinates_of(at, out.shape)
    dim = setting(op, 1, "dim", 0) % len(out.shape)
    for place, source in enumerate(op.inputs):
        own = [*coordinates[:dim], *coordinates[dim + 1 :]]
        yield source, index_of(own, source.shape, len(at)), coordinates[dim] == place


def _repeat(op: Op, out: TensorRef, at: Tensor) -> Sources:
    source = op.inputs[0]
    coordinates = coordinates_of(at, out.shape)[len(out.shape) - len(source.shape) :]
    own = [c % size for c, size in zip(coordinates, source.shape, strict=True)]
    yield source, index_of(own, source.shape), None


def _roll(op: Op, out: TensorRef, at: Tensor) -> Sources:
    own = coordinates_of(at, out.shape)
    for shift, dim in zip(setting(op, 1, "shifts"), setting(op, 2, "dims", ()) or (), strict=False):
        own[dim] = (own[dim] - shift) % out.shape[dim]
    yield op.inputs[0], index_of(own, out.shape), None


def _flip(op: Op, out: TensorRef, at: Tensor) -> Sources:
    own = coordinates_of(at, out.shape)
    for dim in setting(op, 1, "dims"):
        own[dim] = out.shape[dim] - 1 - own[dim]
    yield op.inputs[0], index_of(own, out.shape), None


def _pad(op: Op, out: TensorRef, at: Tensor) -> Sources:
    own, source = coordinates_of(at, out.shape), op.inputs[0]
    kept = torch.ones_like(at, dtype=torch.bool)
    for back, before in enumerate(setting(op, 1, "pad")[::2]):
        dim = len(own) - 1 - back
        own[dim] = own[dim] - before
        kept &= (own[dim] >= 0) & (own[dim] < source.shape[dim])
    yield source, index_of(own, source.shape), kept


def _columns(op: Op, out: TensorRef, at: Tensor) -> Sources:
    """Windows of an image side by side: `batch (channels kernel) positions`."""
    source = op.inputs[0]
    *batch, column, position = coordinates_of(at, out.shape)
    kernel, dilation, padding, stride = (setting(op, place, "", (1, 1)) for place in range(1, 5))
    sizes = zip(source.shape[-2:], kernel, dilation, padding, stride, strict=True)
    counts = [(size + 2 * pad - step * (wide - 1) - 1) // by + 1 for size, wide, step, pad, by in sizes]
    channel, *within = coordinates_of(column, (source.shape[-3], *kernel))
    image = [
        start * by + inside * step - pad
        for start, inside, step, pad, by in zip(
            coordinates_of(position, counts), within, dilation, padding, stride, strict=True
        )
    ]
    kept = torch.ones_like(at, dtype=torch.bool)
    for place, size in zip(image, source.shape[-2:], strict=True):
        kept &= (place >= 0) & (place < size)
    own = [*batch, channel, *(place.clamp(0, size - 1) for place, size in zip(image, source.shape[-2:], strict=True))]
    yield source, index_of(own, source.shape), kept


MOVES = {
    "im2col": _columns,
    "cat": _cat,
    "stack": _stack,
    "repeat": _repeat,
    "roll": _roll,
    "flip": _flip,
    "constant_pad_nd": _pad,
}
"""Operation to the tensors that its output is of: where in each the elements are, and which of them are there."""
