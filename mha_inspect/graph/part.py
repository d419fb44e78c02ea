"""Say which part of its inputs a part of a tensor is made of, e.g. the keys of keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    return all(map(_share_places, left, right))


def _share_places(left: range, right: range) -> bool:
    start = max(left.start, right.start)
    return start < min(left.stop, right.stop)


def parts_behind(
    op: Op,
    result: TensorRef,
    part: Part,
) -> Iterator[tuple[TensorRef, Part]]:
    """Yield the inputs that a part of a result is made of, each with its own part, which may be too large."""
    if _is_in_memory(op, part):
        yield from _behind_memory(op, part)
    elif op.base_name in ("cat", "stack"):
        yield from _behind_join(op, _box_in(result, part))
    else:
        box = _box_in(result, part)
        keeps_places = op.pointwise or op.kind == "copy"
        for tensor in op.inputs:
            is_alike = keeps_places and tensor.shape == result.shape
            yield tensor, Part(tensor, box) if is_alike else whole(tensor)


def _is_in_memory(op: Op, part: Part) -> bool:
    """Return whether an operation views the memory of a part, or writes into it."""
    if op.kind not in ("view", "write") or not op.inputs:
        return False
    return op.inputs[0].storage == part.tensor.storage


def _behind_memory(op: Op, part: Part) -> Iterator[tuple[TensorRef, Part]]:
    """Yield the inputs behind a part of memory that an operation views, or writes into."""
    memory, *operands = op.inputs
    # Complex numbers have other places than their parts.
    has_same_places = part.tensor.dtype == memory.dtype
    yield memory, part if has_same_places else whole(memory)
    if op.kind == "write":
        written = _box_in(part.tensor, whole(memory))
        if not _overlap(written, part.box):
            return
    for tensor in operands:
        yield tensor, whole(tensor)


def _behind_join(op: Op, box: Box) -> Iterator[tuple[TensorRef, Part]]:
    """Yield the operands of a concatenation or a stack that have elements in a part of its result."""
    place = setting(op, 1, "dim", 0) % len(op.output.shape)
    before, after = box[:place], box[place + 1 :]
    joined = box[place]
    is_stack = op.base_name == "stack"
    start = 0
    for tensor in op.inputs:
        if not tensor.numel:
            continue
        size = 1 if is_stack else tensor.shape[place]
        first = max(joined.start - start, 0)
        cut = range(first, min(joined.stop - start, size))
        if cut:
            inner = (*before, *after) if is_stack else (*before, cut, *after)
            yield tensor, Part(tensor, inner)
        start += size


def _box_in(tensor: TensorRef, part: Part) -> Box:
    """Return the places of a part in a tensor of the same memory; they may be outside of it."""
    view = part.tensor
    everything = tuple(map(range, tensor.shape))
    is_in_memory = view.storage == tensor.storage and view.dtype == tensor.dtype
    if not is_in_memory or not view.numel or _elements_overlap(tensor):
        return everything
    span = _Span.of(part, tensor.offset)
    box = []
    for place, size in enumerate(tensor.shape):
        step = tensor.stride[place]
        cut = None if size < 2 else span.along(step, _next_step(tensor, step))
        box.append(range(size) if cut is None else cut)
    return tuple(box)


def _next_step(tensor: TensorRef, step: int) -> int:
    """Return the next longer stride of a tensor, of its dimensions of more than one element; 0 if there is none."""
    longer = []
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        if size > 1 and stride > step:
            longer.append(stride)
    return min(longer, default=0)


def _elements_overlap(tensor: TensorRef) -> bool:
    """Return whether elements of a tensor share memory, as those of overlapping windows."""
    sizes: dict[int, int] = {}
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        if size > 1:
            sizes[step] = size
    places = sizes.items()
    return any(_is_between(sizes, step, step * size) for step, size in places)


def _is_between(steps: Iterable[int], low: int, high: int) -> bool:
    """Return whether one of these strides is between two numbers."""
    return any(low < step < high for step in steps)


class _Span(NamedTuple):
    """Where a part is in memory."""

    first: int
    """The position of its first element, from the first of another tensor."""
    reaches: tuple[tuple[int, int], ...]
    """The stride of each of its dimensions, and how far it goes along it."""

    @classmethod
    def of(cls, part: Part, offset: int) -> _Span:
        """Return where a part is, from a position in memory."""
        first = part.tensor.offset - offset
        reaches = []
        for places, step in zip(part.box, part.tensor.stride, strict=True):
            first += places.start * step
            reaches.append((step, (len(places) - 1) * step))
        return cls(first, tuple(reaches))

    def along(self, step: int, wider: int) -> range | None:
        """Return the places that the part has along a dimension with a stride; None for all of them.

        The next longer stride of the tensor is `wider`, or 0 if there is none.
        """
        if not step:
            return None
        start = self.first % wider if wider else self.first
        end = start
        for stride, reach in self.reaches:
            if not wider or stride < wider:
                end += reach
        if wider and end >= wider:
            return None
        return range(start // step, end // step + 1)
