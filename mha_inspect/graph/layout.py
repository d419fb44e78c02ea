"""Say which index of which parameter each element of a tensor is made of.

A layout has an array for every dimension of every parameter (a `Source`): the index of each element along it. An array
has size one where the index is the same, so one for the rows of a weight has no batch and no positions. With 3 heads of
4 features, `k.view(batch, length, 3, 4).transpose(1, 2)` of `k = x @ weight.T` is made of these rows:

>>> rows = Layout((2, 5, 12), {Source("weight", 0): Span.of(np.arange(12).reshape(1, 1, 12))})
>>> heads = viewed(rows, contiguous((2, 5, 12)), View((2, 3, 5, 4), (60, 4, 12, 1)))
>>> heads.shape, heads.spans[Source("weight", 0)].low.shape
((2, 3, 5, 4), (1, 3, 1, 4))
>>> heads.spans[Source("weight", 0)].low[0, 1, 0].tolist()  # head 1
[4, 5, 6, 7]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Shape = tuple[int, ...]

ABSENT = -1
"""The index of an element that is not made of a source."""


class Source(NamedTuple):
    """A dimension of a tensor that others are made of."""

    of: Hashable
    """The name of a parameter, or anything that stands for another tensor."""
    dim: int


class Span(NamedTuple):
    """The lowest and the highest index of a source that each element is made of; mostly the same."""

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

    def together(self, other: Span) -> Span:
        """Return the span of elements that are made of both, e.g. a feature and the one that it is rotated with."""
        if other.low is self.low and other.high is self.high:
            return self
        if self.low.shape == other.low.shape and (self.low == other.low).all() and (self.high == other.high).all():
            return self
        return Span(_lower(self.low, other.low), np.maximum(self.high, other.high))

    def varies(self, places: Iterable[int]) -> bool:
        """Return whether the index differs along one of these dimensions."""
        return any(self.low.shape[place] > 1 for place in places)

    @property
    def is_known(self) -> npt.NDArray[np.bool_]:
        """Whether each element is made of the source."""
        return self.high >= 0

    @property
    def is_everywhere(self) -> bool:
        """Whether every element is made of the source."""
        return bool(self.is_known.all())


def _unsigned(array: Indices) -> npt.NDArray[np.uint64]:
    """Return the same memory as numbers of which the absent index is the largest."""
    return array.view(np.uint64)


def _lower(left: Indices, right: Indices) -> Indices:
    """Return the lower of two indices, of which one may be absent."""
    return np.minimum(_unsigned(left), _unsigned(right)).view(np.int64)


@dataclass(frozen=True, eq=False)
class Layout:
    """What each element of a tensor is made of."""

    shape: Shape
    """The shape of the tensor; with a last dimension of 2 for complex numbers."""
    spans: Mapping[Source, Span] = field(default_factory=dict)
    """Source to the indices along it, in arrays that broadcast to the shape: all dimensions of a tensor, or none."""

    def mapped(self, shape: Shape, change: Callable[[Indices], Indices]) -> Layout:
        """Return the layout after a change of every array that only moves elements."""
        return Layout(shape, {source: span.mapped(change) for source, span in self.spans.items()})

    def without(self, *places: int) -> Layout:
        """Return the layout without the tensors whose index differs along these dimensions."""
        return self.without_any(lambda span: span.varies(places))

    def without_any(self, is_gone: Callable[[Span], bool]) -> Layout:
        """Return the layout without the tensors of which a dimension is gone."""
        gone = {source.of for source, span in self.spans.items() if is_gone(span)}
        if not gone:
            return self
        return Layout(self.shape, {source: span for source, span in self.spans.items() if source.of not in gone})

    def places_in(self, of: Hashable, shape: Shape, stride: Sequence[int]) -> Span | None:
        """Return the places in the memory of a tensor that each element is made of; None if they are unknown."""
        ends = [np.zeros([1] * len(self.shape), np.int64)] * 2
        known: npt.NDArray[np.bool_] | None = None
        for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
            span = self.spans.get(Source(of, dim))
            if span is None:
                if size > 1:
                    return None
                continue
            ends = [end + step * indices for end, indices in zip(ends, span, strict=True)]
            if not span.is_everywhere:
                known = span.is_known if known is None else known & span.is_known
        low, high = ends if known is None else [np.where(known, end, ABSENT) for end in ends]
        return Span(low, high)

    def along(self, place: int, of: Hashable) -> Layout:
        """Return the layout of the first row along a dimension that is made of a tensor."""
        layout, rank = self, len(self.shape)
        for source, span in self.spans.items():
            if source.of == of and not span.is_everywhere:
                first = np.argwhere(span.is_known)[0]
                for at in range(rank):
                    if at != place % rank and span.low.shape[at] > 1:
                        layout = taken(layout, at, first[at : at + 1])
        for at in range(rank):
            if at != place % rank and layout.shape[at] > 1:
                layout = taken(layout, at, np.array([0]))
        return layout


def whole(of: Hashable, shape: Shape) -> Layout:
    """Return the layout of a tensor that others are made of: each dimension is a source."""
    spans = {}
    for dim, size in enumerate(shape):
        ones = [1] * len(shape)
        ones[dim] = size
        spans[Source(of, dim)] = Span.of(np.arange(size).reshape(ones))
    return Layout(shape, spans)


# -- moves ------------------------------------------------------------------------------------------------------------


class View(NamedTuple):
    """A place in memory."""

    shape: Shape
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def end(self) -> int:
        """The position after its last element."""
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def is_dense(self) -> bool:
        """Whether it fills its memory: its elements lie side by side, in any order."""
        size = 1
        for step, n in sorted(zip(self.stride, self.shape, strict=True)):
            if n > 1 and step != size:
                return False
            size *= n
        return True


def contiguous(shape: Shape) -> View:
    """Return the place of a tensor in memory of its own, in row-major order."""
    return View(shape, tuple([prod(shape[place + 1 :]) for place in range(len(shape))]))


def viewed(layout: Layout, source: View, view: View) -> Layout:
    """Return the layout of a view of a dense tensor: split, merged, permuted, sliced, repeated, or in windows."""
    if source == view:
        return layout
    return layout.mapped(view.shape, lambda array: _read_at(array, source, view))


def _read_at(array: Indices, source: View, view: View) -> Indices:
    """Return the numbers of a view, given those of a tensor."""
    ones = [1] * len(view.shape)
    if array.size == 1:
        return array.reshape(ones)
    along = [
        _index_along(source, view, place) if size > 1 else np.zeros(ones, int) for place, size in enumerate(array.shape)
    ]
    return collapsed(array[tuple(along)])


@lru_cache(1024)  # the layers of a model are alike
def _index_along(source: View, view: View, place: int) -> Indices:
    """Return the index along a dimension of a dense tensor for each element of a view.

    In rows of 12 elements, `view(length, 3, 4)` has `4 · head + feature`: the place in memory, without what is a
    multiple of the next larger stride, divided by the stride.
    """
    stride, size, first = source.stride[place], source.shape[place], view.offset - source.offset
    dims = [(dim, n, step) for dim, (n, step) in enumerate(zip(view.shape, view.stride, strict=True)) if n > 1]
    # Steps below the stride count if they add up to it.
    is_carried = first % stride + sum((n - 1) * (step % stride) for _, n, step in dims) >= stride
    position = np.full([1] * len(view.shape), first)
    for dim, n, step in dims:
        if (step >= stride or is_carried) and step % (stride * size):
            along = [1] * len(view.shape)
            along[dim] = n
            position = position + (step * np.arange(n)).reshape(along)
    return position // stride % size


def taken(layout: Layout, place: int, indices: Indices) -> Layout:
    """Take indices of a dimension."""

    def along(array: Indices) -> Indices:
        return array if array.shape[place] == 1 else array.take(indices, place)

    return layout.mapped(_with_size(layout.shape, place, len(indices)), along)


def swapped(layout: Layout, first: int, second: int) -> Layout:
    """Exchange two dimensions."""
    order = list(range(len(layout.shape)))
    order[first], order[second] = second, first
    shape = tuple([layout.shape[place] for place in order])
    return layout.mapped(shape, lambda array: array.swapaxes(first, second))


def reshaped(layout: Layout, shape: Shape) -> Layout:
    """Give the elements other dimensions, in row-major order."""
    return viewed(layout, contiguous(layout.shape), contiguous(shape))


def collapsed(array: Indices) -> Indices:
    """Return an array with size one along the dimensions along which it does not differ."""
    for place, size in enumerate(array.shape):
        if size > 1:
            first = array[(slice(None),) * place + (slice(0, 1),)]
            if (array == first).all():
                array = first
    return array


def joined(layouts: Sequence[Layout], place: int) -> Layout:
    """Concatenate along a dimension. Pieces may be made of different tensors.

    Where a piece is not made of a tensor, one dimension of the tensor says so: that of rows, if rows are concatenated.
    """
    first, sizes = layouts[0], [layout.shape[place] for layout in layouts]
    shape = _with_size(first.shape, place, sum(sizes))
    spans: dict[Source, Span] = {}
    for of in dict.fromkeys(source.of for layout in layouts for source in layout.spans):
        sources = [source for source in dict.fromkeys(s for layout in layouts for s in layout.spans) if source.of == of]
        marker = max(sources, key=lambda source: _varies_in(layouts, source, place))
        for source in sources:
            pieces = [layout.spans.get(source) for layout in layouts]
            missing = _one_of(pieces, place)
            if source == marker:
                missing = Span.of(np.full([1] * len(shape), ABSENT))
            spans[source] = _concatenated([missing if piece is None else piece for piece in pieces], place, sizes)
    return Layout(shape, spans)


def _varies_in(layouts: Iterable[Layout], source: Source, place: int) -> bool:
    return any(source in layout.spans and layout.spans[source].varies([place]) for layout in layouts)


def _one_of(pieces: Iterable[Span | None], place: int) -> Span:
    """Return the first index along a dimension of the first piece that is made of a source."""
    known = next(piece for piece in pieces if piece is not None)
    return known.mapped(lambda array: array.take([0], place))


def _concatenated(pieces: Sequence[Span], place: int, sizes: Sequence[int]) -> Span:
    first = pieces[0]
    if all(piece is first for piece in pieces) and not first.varies([place]):
        return first
    outer = np.broadcast_shapes(*(_with_size(piece.low.shape, place, 1) for piece in pieces))

    def end(arrays: Iterable[Indices]) -> Indices:
        full = [np.broadcast_to(array, _with_size(outer, place, n)) for array, n in zip(arrays, sizes, strict=True)]
        return collapsed(np.concatenate(full, place))

    low = end(piece.low for piece in pieces)
    is_one = all(piece.high is piece.low for piece in pieces)
    return Span(low, low if is_one else end(piece.high for piece in pieces))


def _with_size(shape: Sequence[int], place: int, size: int) -> Shape:
    return (*shape[:place], size, *shape[place + 1 :])


# -- computations -----------------------------------------------------------------------------------------------------


def combined(layouts: Sequence[Layout], shape: Shape) -> Layout:
    """Combine tensors element by element; those that do not broadcast to the shape are no part."""
    spans: dict[Source, Span] = {}
    for layout in layouts:
        missing = len(shape) - len(layout.shape)
        if missing < 0 or any(n not in (1, m) for n, m in zip(layout.shape, shape[missing:], strict=True)):
            continue
        for source, span in layout.spans.items():
            if missing:
                span = span.mapped(lambda array: array.reshape((1,) * (len(shape) - array.ndim) + array.shape))
            spans[source] = spans[source].together(span) if source in spans else span
    return Layout(shape, spans)


def reduced(layout: Layout, places: Iterable[int], shape: Shape) -> Layout:
    """Sum or average over dimensions: what differs along them is mixed, and lost."""
    gone = set(places)
    kept = layout.without(*gone)
    keeps_rank = len(shape) == len(layout.shape)

    def along(array: Indices) -> Indices:
        return array if keeps_rank else array.squeeze(tuple(gone))

    return kept.mapped(shape, along)


def spread(layout: Layout, place: int) -> Layout:
    """Mix a dimension, as a rotation does: each element is made of what lies between the lowest and the highest."""
    spans = {}
    for source, (low, high) in layout.spans.items():
        lowest = _unsigned(low).min(place, keepdims=True).view(np.int64)
        spans[source] = Span(lowest, high.max(place, keepdims=True))
    return Layout(_with_size(layout.shape, place, 1), spans)


# -- memory -----------------------------------------------------------------------------------------------------------


_LARGEST = 1 << 24
"""Memory with more elements is not laid out."""


def read(view: View, written: Sequence[tuple[View, Layout]]) -> Layout:
    """Return the layout of a view of memory into which these tensors were written, in order."""
    if len(written) == 1:
        ((place, layout),) = written
        is_within = place.is_dense and place.offset <= view.offset and view.end <= place.end
        if place == view or (is_within and 0 not in view.shape):
            return viewed(layout, place, view)
    size = max(place.end for place in (view, *(place for place, _ in written)))
    if size > _LARGEST or not written or 0 in view.shape:
        return Layout(view.shape)
    spans = {}
    for source in dict.fromkeys(source for _, layout in written for source in layout.spans):

        def end(number: int, source: Source = source) -> Indices:
            memory = np.full(size, ABSENT)
            for place, layout in written:
                _viewed(memory, place)[...] = layout.spans[source][number] if source in layout.spans else ABSENT
            return collapsed(_viewed(memory, view))

        low = end(0)
        is_one = all(s.low is s.high for _, layout in written if (s := layout.spans.get(source)) is not None)
        spans[source] = Span(low, low if is_one else end(1))
    return Layout(view.shape, spans).without_any(lambda span: not span.is_known.any())


def _viewed(memory: Indices, view: View) -> Indices:
    strides = [step * memory.itemsize for step in view.stride]
    return np.lib.stride_tricks.as_strided(memory[view.offset :], view.shape, strides)
