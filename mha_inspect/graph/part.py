"""Say which part of its inputs a part of a tensor is made of, e.g. the keys of keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..record.ops import Op, TensorRef
from .axis import setting

Box = tuple[range, ...]
"""Places along each dimension of a tensor."""


class Part(NamedTuple):
    """A part of the memory of a tensor, and of every view of it."""

    tensor: TensorRef
    box: Box


def whole(tensor: TensorRef) -> Part:
    """Return all of a tensor."""
    return Part(tensor, tuple(map(range, tensor.shape)))


def may_overlap(tensor: TensorRef, like: TensorRef) -> bool:
    """Return whether two tensors may have elements in common; True if that is unknown."""
    if tensor.storage != like.storage:
        return False
    box = _box_in(tensor, whole(like))
    everything = tuple(map(range, tensor.shape))
    return _overlap(box, everything)


def _overlap(left: Box, right: Box) -> bool:
    """Return whether two parts of one tensor have an element in common."""
    places = zip(left, right, strict=False)
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in places)


def parts_behind(op: Op, result: TensorRef, part: Part) -> Iterator[tuple[TensorRef, Part]]:
    """Yield the inputs that a part of a result is made of, each with its own part, which may be too large."""
    is_in_same_memory = bool(op.inputs) and op.inputs[0].storage == part.tensor.storage
    if op.kind in ("view", "write") and is_in_same_memory:
        yield from _behind_memory(op, part)
    elif op.base_name in ("cat", "stack"):
        yield from _behind_join(op, _box_in(result, part))
    else:
        box = _box_in(result, part)
        keeps_places = op.pointwise or op.kind == "copy"
        for tensor in op.inputs:
            is_alike = keeps_places and tensor.shape == result.shape
            yield tensor, Part(tensor, box) if is_alike else whole(tensor)


def _behind_memory(op: Op, part: Part) -> Iterator[tuple[TensorRef, Part]]:
    """Yield the inputs behind a part of memory that an operation views, or writes into."""
    memory, *operands = op.inputs
    # Complex numbers have other places than their parts.
    yield memory, part if part.tensor.dtype == memory.dtype else whole(memory)
    if op.kind == "view" or _overlap(_box_in(part.tensor, whole(memory)), part.box):
        for tensor in operands:
            yield tensor, whole(tensor)


def _behind_join(op: Op, box: Box) -> Iterator[tuple[TensorRef, Part]]:
    """Yield the operands of a concatenation or a stack that have elements in a part of its result."""
    place = setting(op, 1, "dim", 0) % len(op.output.shape)
    before, joined, after = box[:place], box[place], box[place + 1 :]
    is_stack = op.base_name == "stack"
    start = 0
    for tensor in op.inputs:
        if not tensor.numel:
            continue
        size = 1 if is_stack else tensor.shape[place]
        cut = range(max(joined.start - start, 0), min(joined.stop - start, size))
        if cut:
            inner = (*before, *after) if is_stack else (*before, cut, *after)
            yield tensor, Part(tensor, inner)
        start += size


def _box_in(tensor: TensorRef, part: Part) -> Box:
    """Return the places of a part in a tensor of the same memory; they may be outside of it."""
    view = part.tensor
    everything = tuple(map(range, tensor.shape))
    if view.storage != tensor.storage or view.dtype != tensor.dtype or not view.numel:
        return everything
    steps = sorted(step for size, step in zip(tensor.shape, tensor.stride, strict=True) if size > 1)
    if _elements_overlap(tensor):
        return everything
    first = view.offset - tensor.offset
    reaches: list[tuple[int, int]] = []
    for places, step in zip(part.box, view.stride, strict=True):
        first += places.start * step
        reaches.append((step, (len(places) - 1) * step))
    box = []
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        wider = min((longer for longer in steps if longer > step), default=0)
        cut = _places_along(step, wider, first, reaches)
        box.append(range(size) if size < 2 or cut is None else cut)
    return tuple(box)


def _elements_overlap(tensor: TensorRef) -> bool:
    """Return whether elements of a tensor share memory, as those of overlapping windows."""
    sizes = {step: size for size, step in zip(tensor.shape, tensor.stride, strict=True) if size > 1}
    return any(_is_between(sizes, step, step * size) for step, size in sizes.items())


def _is_between(steps: Iterable[int], low: int, high: int) -> bool:
    """Return whether one of these strides is between two numbers."""
    return any(low < step < high for step in steps)


def _places_along(step: int, wider: int, first: int, reaches: Sequence[tuple[int, int]]) -> range | None:
    """Return the places that a part of memory has along one dimension of a tensor; None for all of them.

    Args:
        step: the stride of the dimension.
        wider: the next longer stride of the tensor; 0 if there is none.
        first: the position of the first element of the part, from the first of the tensor.
        reaches: the stride of each dimension of the part, and how far the part goes along it.
    """
    start = first % wider if wider else first
    end = start + sum(reach for stride, reach in reaches if not wider or stride < wider)
    if not step or (wider and end >= wider):
        return None
    return range(start // step, end // step + 1)
