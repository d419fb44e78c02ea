"""Say which index of which axis each element of a tensor is made of.

An axis is a dimension of a parameter, or of any tensor that is given: the heads of a stage, the features of an input.
The indices along it are an array of size one where they do not vary: those of a weight's rows have no batch and no
positions. With 3 heads of 4 features, `k.view(batch, length, 3, 4).transpose(1, 2)` of `k = x @ weight.T` is made of
these rows:

>>> rows = Axis("weight", 0)
>>> features = Label((2, 5, 12), {rows: Span.of(counted(3, 2, 12))})
>>> heads = features.at(contiguous((2, 5, 12)), View((2, 3, 5, 4), (60, 4, 12, 1)))
>>> heads.shape, heads.spans[rows].low.shape
((2, 3, 5, 4), (1, 3, 1, 4))
>>> heads.spans[rows].low[0, 1, 0].tolist()  # head 1
[4, 5, 6, 7]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .indices import (
    ABSENT,
    Indices,
    Shape,
    View,
    broadcasts,
    collapsed,
    concatenated,
    contiguous,
    counted,
    read_at,
    viewed,
    with_rank,
    with_size,
)


class Axis(NamedTuple):
    """A dimension of a tensor that others are made of."""

    of: Hashable
    """The name of a parameter, or anything that stands for another tensor."""
    dim: int = 0


class Span(NamedTuple):
    """The lowest and the highest index of an axis that each element is made of; mostly the same."""

    low: Indices
    high: Indices

    @classmethod
    def of(cls, indices: Indices) -> Span:
        """Return the span of elements that are made of one index each."""
        return cls(indices, indices)

    def mapped(self, change: Callable[[Indices], Indices]) -> Span:
        """Return the span after a change of both arrays that only moves elements."""
        low = change(self.low)
        return Span(low, low if self.high is self.low else change(self.high))

    def together(self, span: Span) -> Span:
        """Return the span of elements that are made of both, e.g. a feature and the one that it is rotated with."""
        if self._is_same(span):
            return self
        low = np.minimum(_unsigned(self.low), _unsigned(span.low)).view(np.int64)
        return Span(low, np.maximum(self.high, span.high))

    def _is_same(self, span: Span) -> bool:
        if span.low is self.low and span.high is self.high:
            return True
        if self.low.shape != span.low.shape:
            return False
        is_same_low = bool((self.low == span.low).all())
        return is_same_low and bool((self.high == span.high).all())

    def spread(self, place: int) -> Span:
        """Return the span of elements that are made of all along a dimension, which stays with size one."""
        lowest = _unsigned(self.low).min(place, keepdims=True).view(np.int64)
        return Span(lowest, self.high.max(place, keepdims=True))

    def varies(self, places: Iterable[int]) -> bool:
        """Return whether the index differs along one of these dimensions."""
        return any(self.low.shape[place] > 1 for place in places)

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether each element is made of the axis."""
        return self.high >= 0

    @property
    def is_everywhere(self) -> bool:
        """Whether every element is made of the axis."""
        return bool(self.is_known.all())


def _unsigned(array: Indices) -> npt.NDArray[np.uint64]:
    """Return the same memory as numbers of which the absent index is the largest."""
    return array.view(np.uint64)


@dataclass(frozen=True, eq=False)
class Label:
    """What each element of a tensor is made of."""

    shape: Shape
    """The shape of the tensor; with a last dimension of 2 for complex numbers."""
    spans: Mapping[Axis, Span] = field(default_factory=dict)
    """Axis to the indices along it, in arrays that broadcast to the shape: all dimensions of a tensor, or none."""

    @classmethod
    def whole(cls, of: Hashable, shape: Shape) -> Label:
        """Return the label of a tensor that others are made of: each dimension is an axis."""
        spans = {}
        for dim, size in enumerate(shape):
            spans[Axis(of, dim)] = Span.of(counted(len(shape), dim, size))
        return cls(shape, spans)

    # -- moves --------------------------------------------------------------------------------------------------------

    def mapped(self, shape: Shape, change: Callable[[Indices], Indices]) -> Label:
        """Return the label after a change of every array that only moves elements."""
        return Label(shape, {axis: span.mapped(change) for axis, span in self.spans.items()})

    def at(self, source: View, view: View) -> Label:
        """Return the label of a view of this dense tensor: split, merged, permuted, sliced, repeated, or in windows."""
        if source == view:
            return self
        return self.mapped(view.shape, lambda array: read_at(array, source, view))

    def reshaped(self, shape: Shape) -> Label:
        """Return the label of the same elements with other dimensions, in row-major order."""
        return self.at(contiguous(self.shape), contiguous(shape))

    def taking(self, place: int, indices: Indices) -> Label:
        """Return the label of these elements of a dimension."""

        def along(array: Indices) -> Indices:
            return array if array.shape[place] == 1 else array.take(indices, place)

        return self.mapped(with_size(self.shape, place, len(indices)), along)

    def swapped(self, first: int, second: int) -> Label:
        """Return the label after an exchange of two dimensions."""
        order = list(range(len(self.shape)))
        order[first], order[second] = second, first
        return self.mapped(tuple(self.shape[place] for place in order), lambda array: array.transpose(order))

    def without(self, *places: int) -> Label:
        """Return the label without the tensors whose index differs along these dimensions."""
        gone = {axis.of for axis, span in self.spans.items() if span.varies(places)}
        if not gone:
            return self
        return Label(self.shape, {axis: span for axis, span in self.spans.items() if axis.of not in gone})

    def reduced(self, places: Iterable[int], shape: Shape) -> Label:
        """Return the label after a sum or a mean over dimensions: what differs along them is mixed, and lost."""
        gone = tuple(set(places))
        keeps_rank = len(shape) == len(self.shape)
        return self.without(*gone).mapped(shape, lambda array: array if keeps_rank else array.squeeze(gone))

    def spread(self, place: int) -> Label:
        """Return the label after a dimension was mixed, as by a rotation: each element is made of all along it."""
        spans = {axis: span.spread(place) for axis, span in self.spans.items()}
        return Label(with_size(self.shape, place, 1), spans)

    # -- what is asked ------------------------------------------------------------------------------------------------

    def places_in(self, of: Hashable, shape: Shape, stride: Sequence[int]) -> Span | None:
        """Return the places in the memory of a tensor that each element is made of; None if they are unknown."""
        low = high = np.zeros([1] * len(self.shape), np.int64)
        is_known = np.ones([1] * len(self.shape), np.bool_)
        for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
            span = self.spans.get(Axis(of, dim))
            if span is not None:
                low = low + step * span.low
                high = high + step * span.high
                is_known = is_known & span.is_known
            elif size > 1:
                return None
        if is_known.all():
            return Span(low, high)
        return Span(np.where(is_known, low, ABSENT), np.where(is_known, high, ABSENT))

    def along(self, place: int, of: Hashable) -> Label:
        """Return the label of the first row along a dimension that is made of a tensor."""
        rank = len(self.shape)
        first = [0] * rank
        for axis, span in self.spans.items():
            if axis.of == of and not span.is_everywhere:
                first = [max(pair) for pair in zip(first, np.argwhere(span.is_known)[0], strict=True)]
        label = self
        for other in range(rank):
            if other != place % rank:
                label = label.taking(other, np.array([first[other]]))
        return label


def combined(labels: Iterable[Label], shape: Shape) -> Label:
    """Return the label of tensors combined element by element; those that do not broadcast to the shape are no part."""
    spans: dict[Axis, Span] = {}
    for label in labels:
        if not broadcasts(label.shape, shape):
            continue
        for axis, span in label.spans.items():
            if len(label.shape) < len(shape):
                span = span.mapped(lambda array: with_rank(array, len(shape)))
            spans[axis] = spans[axis].together(span) if axis in spans else span
    return Label(shape, spans)


# -- joins ------------------------------------------------------------------------------------------------------------


def joined(labels: Sequence[Label], place: int) -> Label:
    """Return the label of tensors concatenated along a dimension. Pieces may be made of different tensors.

    Where a piece is not made of a tensor, one axis of the tensor says so: that of rows, if rows are concatenated.
    """
    sizes = [label.shape[place] for label in labels]
    shape = with_size(labels[0].shape, place, sum(sizes))
    absent = Span.of(np.full([1] * len(shape), ABSENT))
    spans: dict[Axis, Span] = {}
    for axes in _by_tensor(labels):
        marker = max(axes, key=lambda axis: _varies_in(labels, axis, place))
        for axis in axes:
            pieces = [label.spans.get(axis) for label in labels]
            missing = absent if axis == marker else _first_index(pieces, place)
            spans[axis] = _concatenated([piece or missing for piece in pieces], place, sizes)
    return Label(shape, spans)


def _by_tensor(labels: Iterable[Label]) -> list[list[Axis]]:
    """Return the axes of labels in their order, those of one tensor together."""
    axes: dict[Hashable, dict[Axis, None]] = {}
    for label in labels:
        for axis in label.spans:
            axes.setdefault(axis.of, {})[axis] = None
    return [list(of_tensor) for of_tensor in axes.values()]


def _varies_in(labels: Iterable[Label], axis: Axis, place: int) -> bool:
    """Return whether the index of an axis differs along a dimension in one of these labels."""
    spans = [label.spans[axis] for label in labels if axis in label.spans]
    return any(span.varies([place]) for span in spans)


def _first_index(pieces: Iterable[Span | None], place: int) -> Span:
    """Return the first index along a dimension of the first piece that is made of an axis."""
    span = next(filter(None, pieces))
    return span.mapped(lambda array: array.take([0], place))


def _concatenated(pieces: Sequence[Span], place: int, sizes: Sequence[int]) -> Span:
    """Return the span of pieces side by side."""
    first = pieces[0]
    is_same = all(piece is first for piece in pieces)
    if is_same and not first.varies([place]):
        return first
    lows, highs = zip(*pieces, strict=True)
    low = concatenated(lows, place, sizes)
    if all(map(is_, lows, highs)):
        return Span.of(low)
    return Span(low, concatenated(highs, place, sizes))


# -- memory -----------------------------------------------------------------------------------------------------------


_LARGEST = 1 << 24
"""Memory with more elements is not labelled."""
Written = Sequence[tuple[View, Label]]
"""What was written into memory, in order."""


def read(view: View, written: Written) -> Label:
    """Return the label of a view of memory into which these tensors were written, in order."""
    if len(written) == 1:
        place, label = written[0]
        if place == view or _is_within(place, view):
            return label.at(place, view)
    size = view.end
    axes: dict[Axis, None] = {}
    for place, label in written:
        size = max(size, place.end)
        axes.update(dict.fromkeys(label.spans))
    if size > _LARGEST or not written or 0 in view.shape:
        return Label(view.shape)
    return Label(view.shape, {axis: _read_axis(axis, view, written, size) for axis in axes})


def _is_within(place: View, view: View) -> bool:
    """Return whether a view is of the elements of one dense tensor alone."""
    if not place.is_dense or 0 in view.shape:
        return False
    return place.offset <= view.offset and view.end <= place.end


def _read_axis(axis: Axis, view: View, written: Written, size: int) -> Span:
    """Return the indices of an axis at a view of memory of this size; -1 where something else was written."""
    absent = Span.of(np.array(ABSENT))
    spans = [(place, label.spans.get(axis, absent)) for place, label in written]
    low = np.full(size, ABSENT)
    for place, span in spans:
        viewed(low, place)[...] = span.low
    if all(span.low is span.high for _, span in spans):
        return Span.of(collapsed(viewed(low, view)))
    high = np.full(size, ABSENT)
    for place, span in spans:
        viewed(high, place)[...] = span.high
    return Span(collapsed(viewed(low, view)), collapsed(viewed(high, view)))
