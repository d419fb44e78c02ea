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
from operator import is_
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

    def together(self, span: Span) -> Span:
        """Return the span of elements that are made of both, e.g. a feature and the one that it is rotated with."""
        if self._is_same(span):
            return self
        low = _lower(self.low, span.low)
        return Span(low, np.maximum(self.high, span.high))

    def _is_same(self, span: Span) -> bool:
        if span.low is self.low and span.high is self.high:
            return True
        if self.low.shape != span.low.shape:
            return False
        is_same_low = bool((self.low == span.low).all())
        return is_same_low and bool((self.high == span.high).all())

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
        spans = {source: span.mapped(change) for source, span in self.spans.items()}
        return Layout(shape, spans)

    def without(self, *places: int) -> Layout:
        """Return the layout without the tensors whose index differs along these dimensions."""
        return self.without_any(lambda span: span.varies(places))

    def without_any(self, is_gone: Callable[[Span], bool]) -> Layout:
        """Return the layout without the tensors of which a dimension is gone."""
        gone = {source.of for source, span in self.spans.items() if is_gone(span)}
        if not gone:
            return self
        stays = {}
        for source, span in self.spans.items():
            if source.of not in gone:
                stays[source] = span
        return Layout(self.shape, stays)

    def places_in(self, of: Hashable, shape: Shape, stride: Sequence[int]) -> Span | None:
        """Return the places in the memory of a tensor that each element is made of; None if they are unknown."""
        low = high = np.zeros([1] * len(self.shape), np.int64)
        is_made_of: npt.NDArray[np.bool_] | None = None
        for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
            span = self.spans.get(Source(of, dim))
            if span is None:
                if size > 1:
                    return None
                continue
            low = low + step * span.low
            high = high + step * span.high
            if not span.is_everywhere:
                is_made_of = span.is_known if is_made_of is None else is_made_of & span.is_known
        if is_made_of is None:
            return Span(low, high)
        low = np.where(is_made_of, low, ABSENT)
        high = np.where(is_made_of, high, ABSENT)
        return Span(low, high)

    def along(self, place: int, of: Hashable) -> Layout:
        """Return the layout of the first row along a dimension that is made of a tensor."""
        rank = len(self.shape)
        others = [at for at in range(rank) if at != place % rank]
        layout = self
        for source, span in self.spans.items():
            if source.of != of or span.is_everywhere:
                continue
            first = np.argwhere(span.is_known)[0]
            for at in others:
                if span.low.shape[at] > 1:
                    layout = taken(layout, at, first[at : at + 1])
        for at in others:
            if layout.shape[at] > 1:
                layout = taken(layout, at, np.array([0]))
        return layout


def whole(of: Hashable, shape: Shape) -> Layout:
    """Return the layout of a tensor that others are made of: each dimension is a source."""
    spans = {}
    for dim, size in enumerate(shape):
        ones = [1] * len(shape)
        ones[dim] = size
        indices = np.arange(size).reshape(ones)
        spans[Source(of, dim)] = Span.of(indices)
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
        last = self.offset
        for size, step in zip(self.shape, self.stride, strict=True):
            last += (size - 1) * step
        return last + 1

    @property
    def is_dense(self) -> bool:
        """Whether it fills its memory: its elements lie side by side, in any order."""
        end = 1
        steps = zip(self.stride, self.shape, strict=True)
        for step, size in sorted(steps):
            if size > 1 and step != end:
                return False
            end *= size
        return True


def contiguous(shape: Shape) -> View:
    """Return the place of a tensor in memory of its own, in row-major order."""
    strides = []
    for place in range(len(shape)):
        strides.append(prod(shape[place + 1 :]))
    return View(shape, tuple(strides))


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
    along = []
    for place, size in enumerate(array.shape):
        if size > 1:
            along.append(_index_along(source, view, place))
        else:
            along.append(np.zeros(ones, int))
    return collapsed(array[tuple(along)])


@lru_cache(1024)  # the layers of a model are alike
def _index_along(source: View, view: View, place: int) -> Indices:
    """Return the index along a dimension of a dense tensor for each element of a view.

    In rows of 12 elements, `view(length, 3, 4)` has `4 · head + feature`: the place in memory, without what is a
    multiple of the next larger stride, divided by the stride.
    """
    stride = source.stride[place]
    size = source.shape[place]
    wider = stride * size
    first = view.offset - source.offset
    is_carried = _adds_up(view, first, stride)
    ones = [1] * len(view.shape)
    position = np.full(ones, first)
    for dim, (length, step) in enumerate(zip(view.shape, view.stride, strict=True)):
        counts = step >= stride or is_carried
        if length < 2 or not counts or step % wider == 0:
            continue
        along = list(ones)
        along[dim] = length
        position = position + (step * np.arange(length)).reshape(along)
    return position // stride % size


def _adds_up(view: View, first: int, stride: int) -> bool:
    """Return whether steps below a stride add up to it, so that they count for the index along its dimension."""
    rest = first % stride
    for length, step in zip(view.shape, view.stride, strict=True):
        if length > 1:
            rest += (length - 1) * (step % stride)
    return rest >= stride


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
            before = (slice(None),) * place
            first = array[(*before, slice(0, 1))]
            if (array == first).all():
                array = first
    return array


def joined(layouts: Sequence[Layout], place: int) -> Layout:
    """Concatenate along a dimension. Pieces may be made of different tensors.

    Where a piece is not made of a tensor, one dimension of the tensor says so: that of rows, if rows are concatenated.
    """
    sizes = [layout.shape[place] for layout in layouts]
    shape = _with_size(layouts[0].shape, place, sum(sizes))
    ones = [1] * len(shape)
    absent = Span.of(np.full(ones, ABSENT))
    spans: dict[Source, Span] = {}
    for sources in _by_tensor(layouts):
        marker = max(sources, key=lambda source: _varies_in(layouts, source, place))
        for source in sources:
            pieces = [layout.spans.get(source) for layout in layouts]
            missing = absent if source == marker else _first_index(pieces, place)
            spans[source] = _concatenated(pieces, missing, place, sizes)
    return Layout(shape, spans)


def _by_tensor(layouts: Iterable[Layout]) -> list[list[Source]]:
    """Return the sources of layouts in their order, those of one tensor together."""
    sources: dict[Hashable, dict[Source, None]] = {}
    for layout in layouts:
        for source in layout.spans:
            sources.setdefault(source.of, {})[source] = None
    return [list(of_tensor) for of_tensor in sources.values()]


def _varies_in(layouts: Iterable[Layout], source: Source, place: int) -> bool:
    """Return whether the index of a source differs along a dimension in one of these layouts."""
    for layout in layouts:
        span = layout.spans.get(source)
        if span is not None and span.varies([place]):
            return True
    return False


def _first_index(pieces: Iterable[Span | None], place: int) -> Span:
    """Return the first index along a dimension of the first piece that is made of a source."""
    span = next(filter(None, pieces))
    return span.mapped(lambda array: array.take([0], place))


def _concatenated(
    pieces: Sequence[Span | None],
    missing: Span,
    place: int,
    sizes: Sequence[int],
) -> Span:
    """Return the span of pieces side by side; of those that are not made of the source it is `missing`."""
    filled = [piece or missing for piece in pieces]
    first = filled[0]
    is_same = all(piece is first for piece in filled)
    if is_same and not first.varies([place]):
        return first
    lows, highs = zip(*filled, strict=True)
    joined_low = _side_by_side(lows, place, sizes)
    if all(map(is_, lows, highs)):
        return Span.of(joined_low)
    return Span(joined_low, _side_by_side(highs, place, sizes))


def _side_by_side(arrays: Sequence[Indices], place: int, sizes: Sequence[int]) -> Indices:
    """Return arrays concatenated along a dimension, in which they have these sizes."""
    outer = np.broadcast_shapes(*(_with_size(array.shape, place, 1) for array in arrays))
    full = []
    for array, size in zip(arrays, sizes, strict=True):
        full.append(np.broadcast_to(array, _with_size(outer, place, size)))
    return collapsed(np.concatenate(full, place))


def _with_size(shape: Sequence[int], place: int, size: int) -> Shape:
    return (*shape[:place], size, *shape[place + 1 :])


# -- computations -----------------------------------------------------------------------------------------------------


def combined(layouts: Sequence[Layout], shape: Shape) -> Layout:
    """Combine tensors element by element; those that do not broadcast to the shape are no part."""
    spans: dict[Source, Span] = {}
    for layout in layouts:
        if not _broadcasts(layout.shape, shape):
            continue
        for source, span in layout.spans.items():
            if len(layout.shape) < len(shape):
                span = span.mapped(lambda array: _with_rank(array, len(shape)))
            if source in spans:
                span = spans[source].together(span)
            spans[source] = span
    return Layout(shape, spans)


def _broadcasts(shape: Shape, to: Shape) -> bool:
    """Return whether a tensor can be broadcast to a shape."""
    missing = len(to) - len(shape)
    if missing < 0:
        return False
    sizes = zip(shape, to[missing:], strict=True)
    return all(size in (1, wider) for size, wider in sizes)


def _with_rank(array: Indices, rank: int) -> Indices:
    """Return an array with dimensions of size one before its own, as broadcasting adds them."""
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


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
        place, layout = written[0]
        if place == view or _is_within(place, view):
            return viewed(layout, place, view)
    size = view.end
    for place, _ in written:
        size = max(size, place.end)
    if size > _LARGEST or not written or 0 in view.shape:
        return Layout(view.shape)
    memory = _Memory(size, written)
    spans = {source: memory.read(source, view) for source in memory.sources()}
    return Layout(view.shape, spans).without_any(lambda span: not span.is_known.any())


def _is_within(place: View, view: View) -> bool:
    """Return whether a view is of the elements of one dense tensor alone."""
    if not place.is_dense or 0 in view.shape:
        return False
    return place.offset <= view.offset and view.end <= place.end


@dataclass(frozen=True)
class _Memory:
    """Memory into which tensors were written, in order."""

    size: int
    written: Sequence[tuple[View, Layout]]

    def sources(self) -> list[Source]:
        """Return the sources of all that was written, in order."""
        sources: dict[Source, None] = {}
        for _, layout in self.written:
            sources.update(dict.fromkeys(layout.spans))
        return list(sources)

    def read(self, source: Source, view: View) -> Span:
        """Return the indices of a source at a view."""
        lows: list[Indices | None] = []
        highs: list[Indices | None] = []
        is_one_index = True
        for _, layout in self.written:
            low, high = layout.spans.get(source) or (None, None)
            lows.append(low)
            highs.append(high)
            is_one_index = is_one_index and low is high
        joined_low = self._read_end(lows, view)
        if is_one_index:
            return Span.of(joined_low)
        return Span(joined_low, self._read_end(highs, view))

    def _read_end(self, arrays: Sequence[Indices | None], view: View) -> Indices:
        """Return what a view has after these indices were written; None stands for what is not of the source."""
        memory = np.full(self.size, ABSENT)
        for (place, _), array in zip(self.written, arrays, strict=True):
            _viewed(memory, place)[...] = ABSENT if array is None else array
        return collapsed(_viewed(memory, view))


def _viewed(memory: Indices, view: View) -> Indices:
    strides = [step * memory.itemsize for step in view.stride]
    return np.lib.stride_tricks.as_strided(memory[view.offset :], view.shape, strides)
