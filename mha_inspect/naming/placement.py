"""Say where the heads of a part lie along the dimensions of a parameter.

In `in_proj_weight` of torch's layer, with 3 heads of 4 features, the keys of head 1 are rows 16 to 19, and all columns:

>>> rows = {head: 12 * np.arange(12 + 4 * head, 16 + 4 * head) for head in range(3)}  # places in memory
>>> keys = Placement((36, 12), (12, 1), rows, inner=(12, 1))
>>> [runs[1] for runs in keys.runs]
[((16, 20),), ((0, 12),)]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations, product
from math import prod

import numpy as np

from ..graph.indices import Indices
from .pattern import in_words

Run = tuple[int, int]
"""The first index, and the index after the last."""


@dataclass(frozen=True, eq=False)
class Placement:
    """The indices of each head along each dimension of a parameter."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    heads: Mapping[int, Indices]
    """`Part.heads`."""
    inner: tuple[int, int] | None = None
    """`Part.inner`."""
    taps: int = 0
    """`Part.taps`."""

    @cached_property
    def inner_dims(self) -> tuple[int, ...]:
        """The dimensions of a matrix outside heads and their features."""
        number, step = self.inner or (1, 1)
        last_place = (number - 1) * step
        ends = places_along(np.array([0, last_place]), self.shape, self.stride)
        first_tap = len(self.shape) - self.taps
        dims: list[int] = []
        for dim, (first, last) in enumerate(ends):
            if first != last or dim >= first_tap:
                dims.append(dim)
        return tuple(dims)

    @property
    def outer_dims(self) -> list[int]:
        """The dimensions of heads and their features."""
        return [dim for dim in range(len(self.shape)) if dim not in self.inner_dims]

    @cached_property
    def indices(self) -> tuple[dict[int, Indices], ...]:
        """For each dimension, and each head, the sorted indices of its elements."""
        dims: tuple[dict[int, Indices], ...] = tuple({} for _ in self.shape)
        for head, row in self.heads.items():
            present = row[row >= 0]
            along = places_along(present, self.shape, self.stride)
            inside = self._inside(present)
            for dim, size in enumerate(self.shape):
                if dim >= len(self.shape) - self.taps:
                    dims[dim][head] = np.arange(size)
                elif dim in self.inner_dims:
                    dims[dim][head] = np.unique(inside[dim])
                else:
                    dims[dim][head] = np.unique(along[dim])
        return dims

    def _inside(self, present: Indices) -> tuple[Indices, ...]:
        """Return the indices along each dimension of the numbers of the first feature."""
        number, step = self.inner or (1, 1)
        return places_along(present[:1] + step * np.arange(number), self.shape, self.stride)

    @cached_property
    def runs(self) -> tuple[dict[int, tuple[Run, ...]], ...]:
        """The same as runs."""
        dims: tuple[dict[int, tuple[Run, ...]], ...] = tuple({} for _ in self.shape)
        for dim, of_heads in enumerate(self.indices):
            for head, indices in of_heads.items():
                dims[dim][head] = _runs(indices)
        return dims

    def used(self, dim: int) -> tuple[Run, ...]:
        """Return the indices of all heads along a dimension."""
        of_heads = list(self.indices[dim].values())
        return _runs(np.unique(np.concatenate(of_heads)))

    @property
    def count(self) -> int:
        """The number of elements that belong to one feature."""
        first_tap = len(self.shape) - self.taps
        taps = prod(self.shape[first_tap:])
        return taps if self.inner is None else taps * self.inner[0]


def places_along(
    places: Indices,
    shape: Sequence[int],
    stride: Sequence[int],
) -> tuple[Indices, ...]:
    """Return the indices along each dimension for places in the memory of a tensor."""
    along: list[Indices] = []
    for size, step in zip(shape, stride, strict=True):
        along.append(places // max(step, 1) % max(size, 1))
    return tuple(along)


def _runs(indices: Indices) -> tuple[Run, ...]:
    """Return sorted indices as runs."""
    if not len(indices):
        return ()
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return ((first, last + 1),)
    distances = np.diff(indices, prepend=-2)
    starts = np.flatnonzero(distances != 1)
    ends = np.append(starts[1:], len(indices)) - 1
    firsts: list[int] = indices[starts].tolist()
    stops: list[int] = (indices[ends] + 1).tolist()
    return tuple(zip(firsts, stops, strict=True))


@lru_cache(64)  # the layers of a model are alike
def placement_of(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    rows: tuple[tuple[int, bytes], ...],
    inner: tuple[int, int] | None,
    taps: int,
) -> Placement:
    """Return the placement of heads whose places are given as bytes: the same one for parts that are alike."""
    heads = {head: np.frombuffer(row, np.int64) for head, row in rows}
    return Placement(shape, stride, heads, inner, taps)


Block = tuple[int, tuple[Run, ...]]
"""A head, and a run along each of one or two dimensions: of rows, and of columns."""


@lru_cache(64)
def blocks_of(placement: Placement, dims: tuple[int, ...]) -> tuple[Block, ...] | None:
    """Return the blocks of each head along one or two dimensions; None if they do not cover exactly its elements."""
    if len(dims) > 2:
        return None
    blocks: list[Block] = []
    for head, row in placement.heads.items():
        features = np.unique(row[row >= 0])
        size = prod(len(of_dim[head]) for of_dim in placement.indices)
        if size != len(features) * placement.count:
            return None
        runs = [placement.runs[dim][head] for dim in dims]
        for block in product(*runs):
            blocks.append((head, block))
    return tuple(blocks)


# -- several parts in one parameter -----------------------------------------------------------------------------------


def varying_dim(placements: Sequence[Placement]) -> int | None:
    """Return the dimension along which parts and heads lie; None if there are several."""
    first = placements[0]
    dims = range(len(first.shape))
    varying = [dim for dim in dims if _varies(placements, dim)]
    if not varying:
        varying = [dim for dim in first.outer_dims if first.shape[dim] > 1]
    return varying[0] if len(varying) == 1 else None


def _varies(placements: Sequence[Placement], dim: int) -> bool:
    """Return whether heads have different indices along a dimension."""
    distinct: set[bytes] = set()
    for placement in placements:
        for indices in placement.indices[dim].values():
            distinct.add(indices.tobytes())
    return len(distinct) > 1


def are_in_blocks(placements: Sequence[Placement], dim: int) -> bool:
    """Return whether each head, or each group of heads with one key, has one block of the dimension, in order."""
    size = placements[0].shape[dim]
    count = min(len(placement.heads) for placement in placements)
    if size % count:
        return False
    block = size // count
    for placement in placements:
        group = len(placement.heads) // count
        for head, indices in placement.indices[dim].items():
            if (indices // block != head // group).any():
                return False
    return True


@lru_cache(64)
def axes_of(
    placements: tuple[Placement, ...],
    packed: str,
    words: tuple[str, str],
    ones: tuple[str, ...],
) -> tuple[str, ...] | None:
    """Return the name of each dimension, `1` or its size without heads; None if no pattern describes the layout.

    Args:
        placements: the parts in the parameter, in order.
        packed: the name of the axis that counts the parts.
        words: the names of the axes of heads and of features.
        ones: the names that an axis of size one gets too.
    """
    first = placements[0]
    table = _table_of(placements)
    if table is None:
        return None
    outer = first.outer_dims
    size = prod(first.shape[dim] for dim in outer)
    if table.size != size or (table < 0).any():
        return None
    place = _places_among(outer, table, first)
    names = (packed, *words)
    for order in permutations(range(3)):
        ordered = place.transpose(order)
        if not np.array_equal(np.arange(size).reshape(ordered.shape), ordered):
            continue
        axes: list[_Axis] = []
        for number in order:
            axis = _Axis(names[number], place.shape[number])
            if axis.size > 1 or axis.name in ones:
                axes.append(axis)
        return _in_dims(first.shape, outer, axes)
    return None


def _places_among(dims: Sequence[int], table: Indices, placement: Placement) -> Indices:
    """Return the place of each part, head and feature along these dimensions together, counted row by row."""
    along = places_along(table, placement.shape, placement.stride)
    place = np.zeros_like(table)
    for dim in dims:
        place = place * placement.shape[dim]
        place = place + along[dim]
    return place


def _table_of(placements: Sequence[Placement]) -> Indices | None:
    """Return the places in memory as `part head feature`; None if parts differ in their heads or features."""
    rows: list[Indices] = []
    for placement in placements:
        rows += placement.heads.values()
        if len(placement.heads) != len(placements[0].heads):
            return None
    width = len(rows[0])
    if any(len(row) != width for row in rows):
        return None
    return np.stack(rows).reshape(len(placements), -1, width)


@dataclass(frozen=True)
class _Axis:
    """An axis of parts, of heads or of features."""

    name: str
    size: int


def _in_dims(
    shape: Sequence[int],
    outer: Sequence[int],
    axes: list[_Axis],
) -> tuple[str, ...] | None:
    """Return the name of each dimension, filled with the axes in order; None if an axis lies across two dimensions."""
    words = list(map(str, shape))
    large = [dim for dim in outer if shape[dim] > 1]
    last = max(large or outer, default=0)
    left = deque(axes)
    for dim in outer:
        size = 1
        names: list[str] = []
        while left and (size < shape[dim] or dim == last):
            axis = left.popleft()
            names.append(axis.name)
            size *= axis.size
        if size != shape[dim]:
            return None
        words[dim] = in_words([names or ["1"]])
    return tuple(words)
