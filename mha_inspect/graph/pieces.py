"""Rules for what cuts a dimension into pieces: equal ones are an axis, beside the axis that counts them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from ..record.ops import Op
from .axis import Dim, fresh, piece, reshape, resolve, size_of

Dims = tuple[Dim, ...]


def setting(op: Op, place: int, name: str, default: Any = None) -> Any:
    """A plain argument of an operation, by place or by name."""
    return op.args[place] if place < len(op.args) else op.kwargs.get(name, default)


def split_pieces(op: Op, inputs: tuple[Dims, ...]) -> Iterable[Dims]:
    """Equal pieces of a dimension are an axis of their own, after the axis that counts the pieces."""
    dims = inputs[0]
    place = setting(op, 2, "dim", 0) % len(dims)
    sizes = [output.shape[place] for output in op.outputs]
    if len(set(sizes)) == 1 and sizes[0]:
        return [_piece_of(op, dims, place, len(sizes))] * len(sizes)
    starts = accumulate(sizes, initial=0)
    pieces = [piece(dims[place], start, size) for start, size in zip(starts, sizes, strict=False)]
    return [(*dims[:place], part, *dims[place + 1 :]) for part in pieces]


def slice_piece(op: Op, inputs: tuple[Dims, ...], *, is_even: bool = True) -> Iterable[Dims]:
    """A slice of the features that is one of equal pieces is treated as a split; so is every n-th feature.

    Not so one out of which pieces of other sizes are cut as well: it is not `is_even`.
    """
    dims = inputs[0]
    place = setting(op, 1, "dim", 0) % len(dims)
    whole, size = op.inputs[0].shape[place], op.output.shape[place]
    if size == whole:
        return [dims]
    start, step = setting(op, 2, "start", 0) or 0, setting(op, 4, "step", 1)
    if start < 0:
        start += whole
    equal = is_even and place == len(dims) - 1 and size > 1 and whole % size == 0
    if step == 1 and equal and start % size == 0:
        return [_piece_of(op, dims, place, whole // size)]
    if step > 1 and equal and whole // size == step:
        shape = op.inputs[0].shape
        parts = reshape(dims, (*shape[:place], size, step, *shape[place + 1 :]))
        return [counted(parts, place, place + 1)]
    part = piece(dims[place], start, size) if step == 1 else fresh(size)
    return [(*dims[:place], part, *dims[place + 1 :])]


def uneven_slices(ops: Iterable[Op]) -> set[int]:
    """Indices of the slices of tensors out of which pieces of different sizes are cut: they are no equal pieces."""
    cut: dict[tuple[int, int], dict[int, list[int]]] = {}
    for op in ops:
        if op.base_name == "slice" and op.outputs and setting(op, 4, "step", 1) == 1:
            place = setting(op, 1, "dim", 0) % len(op.output.shape)
            size = op.output.shape[place]
            if size != op.inputs[0].shape[place]:
                cut.setdefault((op.inputs[0].id, place), {}).setdefault(size, []).append(op.index)
    return {index for sizes in cut.values() if len(sizes) > 1 for indices in sizes.values() for index in indices}


def _piece_of(op: Op, dims: Dims, place: int, count: int) -> Dims:
    shape = op.inputs[0].shape
    parts = reshape(dims, (*shape[:place], count, shape[place] // count, *shape[place + 1 :]))
    return counted(parts, place + 1, place)


def counted(dims: Dims, piece_place: int, counter_place: int) -> Dims:
    """Without the dimension that counts pieces, which the piece remembers."""
    resolved = resolve(dims[piece_place])
    if resolved:
        resolved[0].counters.setdefault(size_of(resolved), dims[counter_place])
    return (*dims[:counter_place], *dims[counter_place + 1 :])


def counter(dim: Dim, count: int) -> Dim:
    """The axis that counts equal pieces like this one, where as many are put together again."""
    resolved = resolve(dim)
    known = resolved[0].counters.get(size_of(resolved), ()) if resolved else ()
    return known if known and size_of(known) == count else fresh(count)
