"""Say which part of its inputs a part of a tensor is made of, e.g. the keys of keys and values in one tensor."""

from __future__ import annotations

from collections.abc import Iterator
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


def may_overlap(tensor: TensorRef, other: TensorRef) -> bool:
    """Return whether two tensors may have elements in common; True if that is unknown."""
    if tensor.storage != other.storage:
        return False
    inside = zip(_box_in(tensor, whole(other)), tensor.shape, strict=True)
    return all(max(places.start, 0) < min(places.stop, size) for places, size in inside)


def parts_behind(op: Op, result: TensorRef, part: Part) -> Iterator[tuple[TensorRef, Part]]:
    """Yield the inputs that a part of a result is made of, each with its own part, which may be too large."""
    if op.kind in ("view", "write") and op.inputs and op.inputs[0].storage == part.tensor.storage:
        # Complex numbers have other places than their parts.
        yield op.inputs[0], part if part.tensor.dtype == op.inputs[0].dtype else whole(op.inputs[0])
        written = _box_in(part.tensor, whole(op.inputs[0]))
        overlaps = (max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(written, part.box, strict=False))
        if op.kind == "view" or all(overlaps):
            yield from ((tensor, whole(tensor)) for tensor in op.inputs[1:])
        return
    box = _box_in(result, part)
    if op.base_name not in ("cat", "stack"):
        for tensor in op.inputs:
            alike = (op.pointwise or op.kind == "copy") and tensor.shape == result.shape
            yield tensor, Part(tensor, box) if alike else whole(tensor)
        return
    place, is_cat, first = setting(op, 1, "dim", 0) % len(result.shape), op.base_name == "cat", 0
    for tensor in op.inputs:
        if tensor.numel:
            size = tensor.shape[place] if is_cat else 1
            cut = range(max(box[place].start - first, 0), min(box[place].stop - first, size))
            if cut:
                yield tensor, Part(tensor, (*box[:place], *([cut] if is_cat else []), *box[place + 1 :]))
            first += size


def _box_in(tensor: TensorRef, part: Part) -> Box:
    """Return the places of a part in a tensor of the same memory; they may be outside of it."""
    view, everything = part.tensor, tuple(map(range, tensor.shape))
    if view.storage != tensor.storage or view.dtype != tensor.dtype or not view.numel:
        return everything
    steps = {step: size for size, step in zip(tensor.shape, tensor.stride, strict=True) if size > 1}
    if any(step < other < step * size for step, size in steps.items() for other in steps):
        return everything  # its elements overlap
    reaches = [((len(places) - 1) * step, step) for places, step in zip(part.box, view.stride, strict=True)]
    first = view.offset - tensor.offset
    first += sum(places.start * step for places, step in zip(part.box, view.stride, strict=True))
    found = []
    for size, step in zip(tensor.shape, tensor.stride, strict=True):
        wider = min((other for other in steps if other > step), default=0)
        start = first % wider if wider else first
        end = start + sum(reach for reach, by in reaches if not wider or by < wider)
        places = range(start // max(step, 1), end // max(step, 1) + 1)
        found.append(places if size > 1 and step and (not wider or end < wider) else range(size))
    return tuple(found)
