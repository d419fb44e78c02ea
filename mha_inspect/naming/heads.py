"""Number the head and the feature of each element of a stage, and find the elements of a parameter for each number."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np

from ..graph.attention import Attention
from ..graph.layout import ABSENT, Indices, Layout, Source, Span
from .axes import AxisNames
from .canonical import sizes_in
from .pattern import axis_sizes, dims_of

_OF_HEADS = re.compile(r"(heads|kv_heads|group)(_\d+)?")
_OF_FEATURES = re.compile(r"(maps|head_dim|v_head_dim)(_\d+)?")
_CODE = Source("codes", 0)


@dataclass(frozen=True)
class Codes:
    """The head and feature of each element of a tensor: `head * features + feature`, counted from 0."""

    numbers: Indices
    """An array that broadcasts to the tensor."""
    heads: int
    features: int

    def layout(self, shape: tuple[int, ...], turn: int) -> Layout:
        """Return the layout of a tensor of one turn of a loop: it is made of the heads and features of all turns."""
        first = turn * self.heads * self.features
        span = Span.of(self.numbers + first)
        return Layout(shape, {_CODE: span})


def codes_in(layout: Layout, like: Codes, turns: int) -> Codes | None:
    """Return the heads and features that a tensor is made of; None if they are mixed."""
    span = layout.spans.get(_CODE)
    if span is None:
        return None
    numbers = span.low
    if span.low is not span.high:
        is_one = span.low == span.high
        numbers = np.where(is_one, span.low, ABSENT)
    return Codes(numbers, like.heads * turns, like.features)


def codes_of(
    attention: Attention,
    names: AxisNames,
    turn: Attention,
    stage: str,
) -> Codes | None:
    """Return the head and feature of each element of a stage of one turn; None if its axes do not show them."""
    if names.mixes_positions and names.num_heads > 1:
        return None  # every head has every feature somewhere
    shape = turn.stages[stage].shape
    sizes = sizes_in(attention, names, stage)
    dims = _words_with_sizes(names.of_stage(stage), sizes)
    sizes.update(axis_sizes(dims, shape, sizes))
    words = list(chain(*dims))
    fits = tuple(_size_of(dim, sizes) for dim in dims) == shape
    if not fits or len(set(words)) < len(words):
        return None
    heads = _heads_in_order(words, names.head_order)
    features = [word for word in words if _OF_FEATURES.fullmatch(word)]
    steps = _row_major_steps([*heads, *features], sizes)
    numbers = np.zeros([1] * len(shape), np.int64)
    for place, dim in enumerate(dims):
        size = shape[place]
        inner_steps = _row_major_steps(dim, sizes)
        along = [1] * len(shape)
        along[place] = size
        for word in dim:
            if word not in steps:
                continue
            index = np.arange(size) // inner_steps[word] % sizes[word]
            of_word = index * steps[word]
            numbers = numbers + of_word.reshape(along)
    return Codes(numbers, heads=_size_of(heads, sizes), features=_size_of(features, sizes))


def _size_of(words: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the size of a dimension with these axes; 0 if one of them is unknown."""
    return prod(sizes.get(word, 0) for word in words)


def _heads_in_order(words: Iterable[str], order: Sequence[str]) -> list[str]:
    """Return the axes of heads, in the order in which the heads are numbered; those beyond the order come last."""
    heads = [word for word in words if _OF_HEADS.fullmatch(word)]
    in_order = [word for word in order if word in heads]
    for word in heads:
        if word not in order:
            in_order.append(word)
    return in_order


def _row_major_steps(
    words: Sequence[str],
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Return the step from one index of an axis to the next: 12, 4 and 1 for axes of 2, 3 and 4."""
    steps: dict[str, int] = {}
    step = 1
    for word in reversed(words):
        steps[word] = step
        step *= sizes[word]
    return steps


def _words_with_sizes(pattern: str, sizes: Iterable[str]) -> list[list[str]]:
    """Return the axes of each dimension; neighbours of unknown size, outside heads and features, count as one."""
    dims: list[list[str]] = []
    for place, words in enumerate(dims_of(pattern)):
        dim: list[str] = []
        for word in words:
            if word in sizes or _OF_HEADS.fullmatch(word) or _OF_FEATURES.fullmatch(word):
                dim.append(word)
            elif not dim or not dim[-1].startswith("rest"):
                dim.append(f"rest{place}_{len(dim)}")
        dims.append(dim)
    return dims


def rows_of(places: Span, codes: Codes, steps: Iterable[int]) -> Indices:
    """Return for each head and feature the element that it is made of, from 0; -1 if unknown.

    A rotated feature is made of two elements, or of all between two, with one of the `steps` from each to the next.
    All rotated features of a head together have as many elements as features, and get them in order.
    """
    index, low, high = np.broadcast_arrays(codes.numbers, places.low, places.high)
    is_present = (high >= 0) & (index >= 0)
    index, low, high = index[is_present], low[is_present], high[is_present]
    size = codes.heads * codes.features
    largest = np.iinfo(np.int64).max
    first_places = np.full(size, largest)
    np.minimum.at(first_places, index, low)
    last_places = np.full(size, ABSENT)
    np.maximum.at(last_places, index, high)
    lowest = first_places.reshape(codes.heads, codes.features)
    highest = last_places.reshape(lowest.shape)
    lowest[highest == ABSENT] = ABSENT
    if (lowest == highest).all():
        return lowest
    for row, end in zip(lowest, highest, strict=True):
        is_rotated = row != end
        row[is_rotated] = _in_order(row[is_rotated], end[is_rotated], steps)
        if (row[is_rotated] < 0).any():
            row[:] = ABSENT
    return lowest


def _in_order(lowest: Indices, highest: Indices, steps: Iterable[int]) -> Indices:
    """Return the elements that the rotated features of a head are made of, one for each, or -1."""
    elements = np.unique(np.concatenate([lowest, highest]))
    count = len(lowest)
    if len(elements) == count:
        return elements
    if len(elements) == 2 and count > 2:
        first, last = elements
        distance = last - first
        if distance in [(count - 1) * step for step in steps]:
            return np.linspace(first, last, count, dtype=np.int64)
    return np.full(count, ABSENT)
