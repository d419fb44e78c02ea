"""Follow every dimension through a recording, and find which dimensions of which tensors are the same axis.

A dimension is a sequence of atoms: indivisible axes in row-major order. A view that splits a dimension splits its atom
wherever that atom is used. A view that merges dimensions puts their atoms side by side. A product unifies the atoms
that it contracts. The result is valid for one run at its real sizes, also if two axes have the same size. Only
dimensions of size one leave no trace in a view, so a caller may record a second run without them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from ..record.ops import Op, Recording, TensorRef
from .axis import Axis, Dim, fresh, resolve, setting, size_of, wide
from .rules import rule_of, slice_piece, split_pieces

__all__ = ["Axis", "Dim", "Dimensions", "DimensionsOf", "resolve", "size_of", "wide"]


class DimensionsOf(Protocol):
    """What knows the dimensions of tensors."""

    def of(self, tensor: TensorRef) -> tuple[Dim, ...]:
        """Return the dimensions of a tensor, each as its atoms."""


class Dimensions:
    """The dimensions of every tensor of a recording."""

    def __init__(self, recording: Recording) -> None:
        self._dims: dict[int, tuple[Dim, ...]] = {}
        self._places: dict[tuple[Any, ...], tuple[Dim, ...]] = {}
        self._uneven = _uneven_cuts(recording)
        for op in recording.ops:
            self._follow(op)
        self._inputs = tuple(named.tensor for named in recording.inputs)
        for named in (*recording.inputs, *recording.parameters, *recording.outputs):
            self._known(named.tensor)

    def of(self, tensor: TensorRef) -> tuple[Dim, ...]:
        """Return the dimensions of a tensor, each as its atoms."""
        dims = self._known(tensor)
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
        dims = [dim for tensor in self._inputs for dim in self.of(tensor)]
        return {dim[0] for dim in dims if len(dim) == 1}

    def beside(self, atoms: set[Axis], *, apart_from: set[Axis]) -> set[Axis]:
        """Return the axes that share a dimension with these atoms in any tensor, except beside axes of `apart_from`."""
        beside: set[Axis] = set()
        for dim in {dim for dims in self._dims.values() for dim in dims}:
            known = set(resolve(dim))
            if known & atoms and not known & apart_from:
                beside |= known
        return beside

    def put(self, tensor: TensorRef, dims: tuple[Dim, ...]) -> None:
        """Take the dimensions of a tensor that no operation made."""
        self._dims[tensor.id] = dims

    def _known(self, tensor: TensorRef) -> tuple[Dim, ...]:
        dims = self._dims.get(tensor.id)
        if dims is None:
            # The same memory after a write has new content and the same axes.
            dims = self._places.get(_place(tensor)) or tuple([fresh(size) for size in tensor.shape])
            self._dims[tensor.id] = self._places[_place(tensor)] = dims
        return dims

    def _follow(self, op: Op) -> None:
        if not op.outputs or (op.kind == "view" and op.output.id in self._dims):
            return
        inputs = tuple([self._known(tensor) for tensor in op.inputs])
        rule = rule_of(op.name, op.kind, op.pointwise)
        if op.index in self._uneven:
            rule = partial(slice_piece if op.base_name == "slice" else split_pieces, is_even=False)
        try:
            results = rule(op, inputs)
        except IndexError:  # nested rows are one buffer, without the dimensions of the arguments
            results = ()
        for place, tensor in enumerate(op.outputs):
            dims = results[place] if place < len(results) else ()
            if tuple([dim[0].size if len(dim) == 1 else size_of(dim) for dim in dims]) != tensor.shape:
                dims = tuple([fresh(size) for size in tensor.shape])
            if tensor.id not in self._dims:
                self._dims[tensor.id] = self._places[_place(tensor)] = dims


def _uneven_cuts(recording: Recording) -> set[int]:
    """Return the indices of cuts of one tensor into pieces that differ in size, or in the heads that a view gives them.

    E.g. queries beside keys and values, with half as many heads for each of these.
    """
    cut: dict[tuple[int, int], dict[TensorRef, int]] = {}
    for op in recording.ops:
        if op.outputs and op.does("cuts") and setting(op, 4, "step", 1) == 1:
            place = setting(op, 1 if op.base_name == "slice" else 2, "dim", 0) % len(op.output.shape)
            if op.output.shape[place] != op.inputs[0].shape[place]:
                cut.setdefault((op.inputs[0].id, place), {}).update(dict.fromkeys(op.outputs, op.index))
    return {
        index
        for (_, place), pieces in cut.items()
        if len({piece.shape[place] for piece in pieces}) > 1
        or len({sizes for piece in pieces for sizes in _sizes_in_views(recording, piece)}) > 1
        for index in pieces.values()
    }


def _sizes_in_views(recording: Recording, tensor: TensorRef) -> set[tuple[int, ...]]:
    """Return the sizes above one that views split the last dimension of a tensor into."""
    *rows, _ = tensor.shape
    readers = recording.consumers.get(tensor.id, ())
    views = [op.output.shape for op in readers if op.base_name in ("view", "_unsafe_view")]
    return {tuple(size for size in shape[len(rows) :] if size > 1) for shape in views if [*shape[: len(rows)]] == rows}


def _place(tensor: TensorRef) -> tuple[Any, ...]:
    return tensor.storage, tensor.offset, tensor.shape, tensor.stride
