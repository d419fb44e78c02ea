"""Follow every dimension through a recording, and find which dimensions of which tensors are the same axis.

A dimension is a sequence of atoms: indivisible axes in row-major order. A view that splits a dimension splits its atom
wherever that atom is used. A view that merges dimensions puts their atoms side by side. A product unifies the atoms
that it contracts. The result is valid for one run at its real sizes, also if two axes have the same size. Only
dimensions of size one leave no trace in a view, so a caller may record a second run without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from ..record.ops import Op, Recording, TensorRef
from .axis import Axis, Dim, Dims, fresh, resolve, setting, size_of, wide
from .rules import rule_of, slice_piece, split_pieces

__all__ = ["Axis", "Dim", "Dimensions", "DimensionsOf", "resolve", "size_of", "wide"]


class DimensionsOf(Protocol):
    """What knows the dimensions of tensors."""

    def of(self, tensor: TensorRef) -> Dims:
        """Return the dimensions of a tensor, each as its atoms."""


class Dimensions:
    """The dimensions of every tensor of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._dims: dict[int, Dims] = {}
        self._places: dict[object, Dims] = {}
        self._uneven = _uneven_cuts(recording)
        for op in recording.ops:
            self._follow(op)
        self._inputs = tuple(named.tensor for named in recording.inputs)
        for named in (*recording.inputs, *recording.parameters, *recording.outputs):
            self._noted(named.tensor)

    def of(self, tensor: TensorRef) -> Dims:
        """Return the dimensions of a tensor, each as its atoms."""
        dims = self._noted(tensor)
        for dim in dims:
            for atom in dim:
                if atom.parts:
                    dims = self._dims[tensor.id] = tuple([resolve(dim) for dim in dims])
                    return dims
        return dims

    def along(self, tensor: TensorRef, place: int) -> set[Axis]:
        """Return the axes of one dimension of a tensor that have more than one element; empty for a scalar."""
        return set(wide(self.of(tensor)[place])) if tensor.shape else set()

    @property
    def given_whole(self) -> set[Axis]:
        """The axes that are a whole dimension of an input of the forward."""
        axes: set[Axis] = set()
        for tensor in self._inputs:
            for dim in self.of(tensor):
                if len(dim) == 1:
                    axes.update(dim)
        return axes

    def beside(self, atoms: set[Axis], *, apart_from: set[Axis]) -> set[Axis]:
        """Return the axes that share a dimension with these atoms in any tensor, except beside axes of `apart_from`."""
        dims = set[Dim]().union(*self._dims.values())
        beside: set[Axis] = set()
        for dim in dims:
            axes = resolve(dim)
            if not atoms.isdisjoint(axes) and apart_from.isdisjoint(axes):
                beside.update(axes)
        return beside

    def put(self, tensor: TensorRef, dims: Dims) -> None:
        """Take the dimensions of a tensor that no operation made."""
        self._dims[tensor.id] = dims

    def _noted(self, tensor: TensorRef) -> Dims:
        """Return the dimensions of a tensor as they were noted, maybe with atoms that were split since."""
        dims = self._dims.get(tensor.id)
        if dims is None:
            # The same memory after a write has new content and the same axes.
            place = _place(tensor)
            dims = self._places.get(place) or tuple(map(fresh, tensor.shape))
            self._dims[tensor.id] = self._places[place] = dims
        return dims

    def _follow(self, op: Op) -> None:
        if not op.outputs:
            return
        if op.kind == "view" and op.output.id in self._dims:
            return
        results = self._results(op)
        for place, tensor in enumerate(op.outputs):
            dims = results[place] if place < len(results) else ()
            if not _has_shape(dims, tensor.shape):
                dims = tuple(map(fresh, tensor.shape))
            if tensor.id not in self._dims:
                self._dims[tensor.id] = self._places[_place(tensor)] = dims

    def _results(self, op: Op) -> Sequence[Dims]:
        """Return the dimensions of the outputs of an operation, by its rule; fewer where they are unknown."""
        inputs = tuple([self._noted(tensor) for tensor in op.inputs])
        rule = rule_of(op.name, op.kind, op.pointwise)
        if op.index in self._uneven:
            rule = partial(slice_piece if op.base_name == "slice" else split_pieces, is_even=False)
        try:
            return rule(op, inputs)
        except IndexError:  # nested rows are one buffer, without the dimensions of the arguments
            return ()


def _has_shape(dims: Dims, shape: tuple[int, ...]) -> bool:
    """Return whether dimensions have these sizes."""
    if len(dims) != len(shape):
        return False
    for dim, size in zip(dims, shape, strict=True):
        length = dim[0].size if len(dim) == 1 else size_of(dim)
        if length != size:
            return False
    return True


def _uneven_cuts(recording: Recording) -> set[int]:
    """Return the indices of cuts of one tensor into pieces that differ in size, or in the heads that a view gives them.

    E.g. queries beside keys and values, with half as many heads for each of these.
    """
    cuts: dict[tuple[int, int], dict[TensorRef, int]] = {}
    for op in recording.ops:
        place = _cut_place(op)
        if place is not None:
            pieces = cuts.setdefault((op.inputs[0].id, place), {})
            pieces.update(dict.fromkeys(op.outputs, op.index))
    uneven: set[int] = set()
    for (_, place), pieces in cuts.items():
        if _are_uneven(recording, pieces, place):
            uneven.update(pieces.values())
    return uneven


def _cut_place(op: Op) -> int | None:
    """Return the dimension that an operation cuts into pieces; None for a whole tensor, and every n-th element."""
    if not op.outputs or not op.does("cuts"):
        return None
    if setting(op, 4, "step", 1) != 1:
        return None
    argument = 1 if op.base_name == "slice" else 2
    shape = op.output.shape
    place = int(setting(op, argument, "dim", 0)) % len(shape)
    is_whole = shape[place] == op.inputs[0].shape[place]
    return None if is_whole else place


def _are_uneven(recording: Recording, pieces: Iterable[TensorRef], place: int) -> bool:
    """Return whether pieces differ in size along a dimension, or in the heads that a view gives them."""
    sizes: set[int] = set()
    heads: set[tuple[int, ...]] = set()
    for piece in pieces:
        sizes.add(piece.shape[place])
        heads |= _sizes_in_views(recording, piece)
    return len(sizes) > 1 or len(heads) > 1


def _sizes_in_views(recording: Recording, tensor: TensorRef) -> set[tuple[int, ...]]:
    """Return the sizes above one that views split the last dimension of a tensor into."""
    rows = tensor.shape[:-1]
    rank = len(rows)
    sizes: set[tuple[int, ...]] = set()
    for op in recording.consumers.get(tensor.id, ()):
        if op.base_name not in ("view", "_unsafe_view"):
            continue
        shape = op.output.shape
        if shape[:rank] != rows:
            continue
        split = [size for size in shape[rank:] if size > 1]
        sizes.add(tuple(split))
    return sizes


def _place(tensor: TensorRef) -> object:
    return tensor.storage, tensor.offset, tensor.shape, tensor.stride
