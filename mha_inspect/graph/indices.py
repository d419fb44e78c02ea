"""Arrays of indices that have size one where nothing varies, and how a view of memory reads them.

In rows of 12 features, `view(length, 3, 4)` has feature `4 · head + place`. Read at the view, the index of a feature
is an array of 3 and 4, whatever the number of rows:

>>> rows = contiguous((5, 12))
>>> read_at(counted(2, 1, 12), rows, View((5, 3, 4), (12, 4, 1))).tolist()
[[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]]
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Shape = tuple[int, ...]

ABSENT = -1
"""The index of an element that is not made of an axis."""


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


def counted(rank: int, place: int, size: int) -> Indices:
    """Return the indices along one dimension of a tensor, which do not vary along the others."""
    return np.arange(size).reshape(with_size((1,) * rank, place, size))


def with_size(shape: Sequence[int], place: int, size: int) -> Shape:
    """Return a shape with another size of one dimension."""
    return (*shape[:place], size, *shape[place + 1 :])


def broadcasts(shape: Shape, to: Shape) -> bool:
    """Return whether a tensor can be broadcast to a shape."""
    missing = len(to) - len(shape)
    if missing < 0:
        return False
    sizes = zip(shape, to[missing:], strict=True)
    return all(size in (1, wider) for size, wider in sizes)


def with_rank(array: Indices, rank: int) -> Indices:
    """Return an array with dimensions of size one before its own, as broadcasting adds them."""
    return array if array.ndim == rank else array.reshape((1,) * (rank - array.ndim) + array.shape)


def collapsed(array: Indices) -> Indices:
    """Return an array with size one along the dimensions along which it does not differ."""
    for place, size in enumerate(array.shape):
        if size > 1:
            before = (slice(None),) * place
            first = array[(*before, slice(0, 1))]
            if (array == first).all():
                array = first
    return array


def concatenated(arrays: Sequence[Indices], place: int, sizes: Sequence[int]) -> Indices:
    """Return arrays concatenated along a dimension, in which they have these sizes."""
    outer = np.broadcast_shapes(*(with_size(array.shape, place, 1) for array in arrays))
    full = []
    for array, size in zip(arrays, sizes, strict=True):
        full.append(np.broadcast_to(array, with_size(outer, place, size)))
    return collapsed(np.concatenate(full, place))


def read_at(array: Indices, source: View, view: View) -> Indices:
    """Return the indices of a view of a dense tensor, given those of the tensor."""
    places = [place for place, size in enumerate(array.shape) if size > 1]
    if not places:
        return array.reshape((1,) * len(view.shape))
    along = [_index_along(source, view, place) for place in places]
    compact = array.reshape([array.shape[place] for place in places])
    return collapsed(compact[tuple(along)])


@lru_cache(1024)  # the layers of a model are alike
def _index_along(source: View, view: View, place: int) -> Indices:
    """Return the index along a dimension of a dense tensor for each element of a view.

    It is the position in memory, without multiples of the next longer stride, divided by the stride. Dimensions of the
    view with steps too short to add up to the next index are left out: the index does not vary along them.
    """
    stride = source.stride[place]
    size = source.shape[place]
    first = view.offset - source.offset
    steps = []
    for dim, (length, step) in enumerate(zip(view.shape, view.stride, strict=True)):
        if length > 1 and step % (stride * size):
            steps.append((step, length, dim))
    position = np.full([1] * len(view.shape), first)
    for step, length, dim in _that_count(steps, first, stride):
        position = position + step * counted(len(view.shape), dim, length)
    return position // stride % size


_Steps = list[tuple[int, int, int]]
"""The step of a dimension, its size and its place."""


def _that_count(steps: _Steps, first: int, stride: int) -> _Steps:
    """Return the steps without the shortest ones, as many as together stay within one index from every position.

    Positions that the others reach from the first one are apart by multiples of their greatest common divisor.
    """
    steps = sorted(steps)
    for cut in range(len(steps), 0, -1):
        unit = gcd(stride, *(step for step, _, _ in steps[cut:]))
        reach = sum((length - 1) * step for step, length, _ in steps[:cut])
        if first % unit + reach < unit:
            return steps[cut:]
    return steps


def viewed(memory: Indices, view: View) -> Indices:
    """Return a view of memory with one index for each position."""
    strides = [step * memory.itemsize for step in view.stride]
    return np.lib.stride_tricks.as_strided(memory[view.offset :], view.shape, strides)
