"""Follow single elements of a tensor: where each lies in memory, and where it was before it was moved.

A view shares memory, so an element of it has the same address; what is copied or done element by element keeps its
coordinates. No number of a tensor is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..record.ops import Op, Recording, TensorRef
from .axis import setting


@dataclass(frozen=True, eq=False)
class Elements:
    """Elements of one tensor, each with the number of what is asked about."""

    tensor: TensorRef
    at: Tensor
    """Where each lies in memory, counted from the start of the storage."""
    ids: Tensor

    @classmethod
    def of(cls, tensor: TensorRef, coordinates: Sequence[Tensor], ids: Tensor) -> Elements:
        """Return those at these coordinates."""
        return cls(tensor, address(tensor, coordinates, len(ids)), ids)


def address(tensor: TensorRef, coordinates: Sequence[Tensor], count: int = 1) -> Tensor:
    """Return where in memory the elements at these coordinates lie; of a single number as often as `count`."""
    at = torch.full((count,), tensor.offset) if not coordinates else torch.full_like(coordinates[0], tensor.offset)
    for coordinate, stride in zip(coordinates, tensor.stride, strict=True):
        at = at + coordinate * stride
    return at


def coordinates(tensor: TensorRef, at: Tensor) -> list[Tensor]:
    """Return where along each dimension the elements at these addresses are; the inverse of `address`."""
    rest = at - tensor.offset
    found = [torch.zeros_like(at) for _ in tensor.shape]
    for dim in sorted(range(len(tensor.shape)), key=lambda dim: (-tensor.stride[dim], -tensor.shape[dim])):
        size, stride = tensor.shape[dim], tensor.stride[dim]
        if size > 1 and stride > 0:
            found[dim] = rest.floor_divide(stride).clamp(0, size - 1)
            rest = rest - found[dim] * stride
    return found


def coordinates_of(at: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return where elements are along each dimension, that are counted in row-major order.

    Not by `torch.unravel_index`, whose first use imports symbolic shapes, and sympy with them: up to a second.
    """
    found = []
    for size in reversed(shape[1:]):
        found.append(at % size)
        at = at.floor_divide(size)  # the operator goes through Python first
    return [at, *reversed(found)] if len(shape) else []


def origins(recording: Recording, start: Elements, stop: Callable[[TensorRef], bool]) -> Iterator[Elements]:
    """Yield the elements from which these were moved or computed one by one: of tensors to stop at, and from outside.

    Where an operation does anything else with them the way is lost.
    """
    pending = [start]
    while pending:
        now = pending.pop()
        op = recording.producer(now.tensor)
        if stop(now.tensor) or op is None:
            yield now
        elif op.kind == "view" and op.inputs:
            pending.append(replace(now, tensor=op.inputs[0]))
        elif op.kind == "write":
            pending += _written(recording, op, now)
        else:
            pending += _picked(recording, op, now) if op.does("gathers") else _before(op, now)


def _written(recording: Recording, op: Op, now: Elements) -> Iterator[Elements]:
    """Yield the elements that a copy wrote into memory, and those of what it left there as it was."""
    if op.base_name != "copy_":
        return
    inside = address(op.output, coordinates(op.output, now.at)) == now.at
    written = Elements(op.output, now.at[inside], now.ids[inside])
    own = broadcast(coordinates(op.output, written.at), op.output.shape, op.inputs[1].shape)
    if own is not None and len(written.at):
        yield Elements.of(op.inputs[1], own, written.ids)
    before = (other for other in reversed(recording.ops[: op.index]) if other.kind != "view" and other.outputs)
    earlier = next((other.output for other in before if other.output.storage == now.tensor.storage), None)
    if earlier is not None and not bool(inside.all()):
        yield Elements(earlier, now.at[~inside], now.ids[~inside])


def _picked(recording: Recording, op: Op, now: Elements) -> Iterator[Elements]:
    """Yield the elements that were picked along one dimension by a list of indices, where that was kept."""
    source, indices = op.inputs[0], op.inputs[-1]
    given = op.args[1] if op.base_name == "index" else ()
    places = [place for place, index in enumerate(given) if index is not None] or [setting(op, 1, "dim", 0)]
    kept = recording.values.get(indices.id)
    if op.base_name not in ("index", "index_select") or len(places) != 1 or len(indices.shape) != 1 or kept is None:
        return
    own = coordinates(now.tensor, now.at)
    own[places[0]] = kept.cpu().long()[own[places[0]]] % source.shape[places[0]]
    yield Elements.of(source, own, now.ids)


def _before(op: Op, now: Elements) -> Iterator[Elements]:
    """Yield the elements of the operands of an operation that makes new ones."""
    own, name = coordinates(now.tensor, now.at), op.base_name.rstrip("_")
    if name in ("cat", "stack"):
        yield from _joined(op, now, own)
        return
    if op.does("product", "convolution", "runs") or name == "roll":
        return
    for source in op.inputs:
        if source.dtype != "bool":
            last = broadcast(own, now.tensor.shape, source.shape, repeats=name == "repeat")
            if last is not None:
                yield Elements.of(source, last, now.ids)


def _joined(op: Op, now: Elements, own: list[Tensor]) -> Iterator[Elements]:
    """Yield the elements of what was put side by side."""
    dim, start = setting(op, 1, "dim", 0) % len(own), 0
    for source in op.inputs:
        stacked = op.base_name == "stack"
        size = 1 if stacked else source.shape[dim] if len(source.shape) == len(own) else 0
        kept = (own[dim] >= start) & (own[dim] < start + size)
        inner = [c[kept] - (start if place == dim else 0) for place, c in enumerate(own)]
        if stacked:
            del inner[dim]
        if bool(kept.any()):
            yield Elements.of(source, inner, now.ids[kept])
        start += size


def broadcast(
    own: Sequence[Tensor], shape: Sequence[int], other: Sequence[int], *, repeats: bool = False
) -> list[Tensor] | None:
    """Return the coordinates in an operand of another shape; None where it does not have the shape of one."""
    if len(other) > len(shape):
        return None
    pairs = [*zip(own, shape, other, strict=True)] if len(own) == len(other) else []
    pairs = pairs or [*zip(own[len(own) - len(other) :], shape[len(shape) - len(other) :], other, strict=True)]
    if any(size not in (1, whole) and not (repeats and whole % max(size, 1) == 0) for _, whole, size in pairs):
        return None
    return [c % size if size else c for c, _, size in pairs]


def coordinates_in(tensor: TensorRef, places: Tensor) -> list[Tensor]:
    """Return the coordinates of elements of a parameter, given by where they are in its memory."""
    return coordinates(replace(tensor, offset=0), places)
