"""Say where the heads of a part lie along the dimensions of a parameter.

In `in_proj_weight` of torch's layer, with 3 heads of 4 features, the keys of head 1 are rows 16 to 19, and all columns:

>>> rows = {head: 12 * np.arange(12 + 4 * head, 16 + 4 * head) for head in range(3)}  # places in memory
>>> keys = Placement((36, 12), (12, 1), rows, inner=(12, 1))
>>> [runs[1] for runs in keys.runs]
[((16, 20),), ((0, 12),)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations
from math import prod

import numpy as np

from ..graph.layout import Indices
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
        ends = places_along(np.array([0, (number - 1) * step]), self.shape, self.stride)
        first_tap = len(self.shape) - self.taps
        return tuple(dim for dim, (first, last) in enumerate(ends) if first != last or dim >= first_tap)

    @cached_property
    def indices(self) -> tuple[dict[int, Indices], ...]:
        """For each dimension, and each head, the sorted indices of its elements."""
        dims: list[dict[int, Indices]] = [{} for _ in self.shape]
        for head, row in self.heads.items():
            along = places_along(row[row >= 0], self.shape, self.stride)
            for dim, size in enumerate(self.shape):
                dims[dim][head] = np.arange(size) if dim in self.inner_dims else np.unique(along[dim])
        return tuple(dims)

    @cached_property
    def runs(self) -> tuple[dict[int, tuple[Run, ...]], ...]:
        """The same as runs."""
        return tuple({head: _runs(indices) for head, indices in of_dim.items()} for of_dim in self.indices)

    def used(self, dim: int) -> tuple[Run, ...]:
        """Return the indices of all heads along a dimension."""
        return _runs(np.unique(np.concatenate([*self.indices[dim].values()])))

    @property
    def count(self) -> int:
        """The number of elements that belong to one feature."""
        return (1 if self.inner is None else self.inner[0]) * prod(self.shape[len(self.shape) - self.taps :])


def places_along(places: Indices, shape: Sequence[int], stride: Sequence[int]) -> tuple[Indices, ...]:
    """Return the indices along each dimension for places in the memory of a tensor."""
    return tuple(places // max(step, 1) % max(size, 1) for size, step in zip(shape, stride, strict=True))


def _runs(indices: Indices) -> tuple[Run, ...]:
    """Return sorted indices as runs."""
    if not len(indices):
        return ()
    first, last = int(indices[0]), int(indices[-1])
    if last - first + 1 == len(indices):
        return ((first, last + 1),)
    starts = np.flatnonzero(np.diff(indices, prepend=-2) != 1)
    ends = np.append(starts[1:], len(indices)) - 1
    return tuple(zip(indices[starts].tolist(), (indices[ends] + 1).tolist(), strict=True))


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
        number = len(np.unique(row[row >= 0])) * placement.count
        if prod(len(of_dim[head]) for of_dim in placement.indices) != number:
            return None
        columns = [(run,) for run in placement.runs[dims[1]][head]] if len(dims) > 1 else [()]
        blocks += [(head, (run, *column)) for run in placement.runs[dims[0]][head] for column in columns]
    return tuple(blocks)


# -- several parts in one parameter -----------------------------------------------------------------------------------


def varying_dim(placements: Sequence[Placement]) -> int | None:
    """Return the dimension along which parts and heads lie; None if there are several."""
    first = placements[0]
    varying = []
    for dim in range(len(first.shape)):
        of_heads = {indices.tobytes() for part in placements for indices in part.indices[dim].values()}
        if len(of_heads) > 1:
            varying.append(dim)
    if not varying:
        varying = [dim for dim, size in enumerate(first.shape) if size > 1 and dim not in first.inner_dims]
    return varying[0] if len(varying) == 1 else None


def are_in_blocks(placements: Sequence[Placement], dim: int) -> bool:
    """Return whether each head, or each group of heads with one key, has one block of the dimension, in order."""
    size, count = placements[0].shape[dim], min(len(part.heads) for part in placements)
    if size % count:
        return False
    for part in placements:
        group = len(part.heads) // count
        for head, indices in part.indices[dim].items():
            if (indices // (size // count) != head // group).any():
                return False
    return True


@lru_cache(64)
def axes_of(
    placements: tuple[Placement, ...], packed: str, words: tuple[str, str], ones: tuple[str, ...]
) -> list[str] | None:
    """Return the name of each dimension, `1` or its size without heads; None if no pattern describes the layout.

    Args:
        placements: the parts in the parameter, in order.
        packed: the name of the axis that counts the parts.
        words: the names of the axes of heads and of features.
        ones: the names that an axis of size one gets too.
    """
    first = placements[0]
    rows = [row for part in placements for row in part.heads.values()]
    if len({len(part.heads) for part in placements}) > 1 or len({len(row) for row in rows}) > 1:
        return None
    # The place of each part, head and feature along the outer dimensions.
    table = np.stack(rows).reshape(len(placements), -1, len(rows[0]))
    along, place = places_along(table, first.shape, first.stride), np.zeros_like(table)
    outer = [dim for dim in range(len(first.shape)) if dim not in first.inner_dims]
    for dim in outer:
        place = place * first.shape[dim] + along[dim]
    if place.size != prod(first.shape[dim] for dim in outer) or (table < 0).any():
        return None
    names = (packed, *words)
    for order in permutations(range(3)):
        sizes = [(names[axis], place.shape[axis]) for axis in order]
        if np.array_equal(np.arange(place.size).reshape([size for _, size in sizes]), place.transpose(order)):
            return _in_dims(first.shape, outer, [(name, size) for name, size in sizes if size > 1 or name in ones])
    return None


def _in_dims(shape: Sequence[int], outer: Sequence[int], axes: list[tuple[str, int]]) -> list[str] | None:
    """Return the name of each dimension, filled with the axes in order; None if an axis lies across two dimensions."""
    dims: dict[int, list[str]] = {}
    last = max((dim for dim in outer if shape[dim] > 1), default=max(outer, default=0))
    for dim in outer:
        size, dims[dim] = 1, []
        while axes and (size < shape[dim] or dim == last):
            name, number = axes.pop(0)
            dims[dim].append(name)
            size *= number
        if size != shape[dim]:
            return None
    return [in_words([dims[dim] or ["1"]]) if dim in dims else str(size) for dim, size in enumerate(shape)]
