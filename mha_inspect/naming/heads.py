"""Say which head and feature each element of a stage is, and find the elements of a parameter for each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod

import numpy as np

from ..graph.attention import Attention
from ..graph.indices import ABSENT, Indices
from ..graph.label import Axis, Label, Span
from .axes import AxisNames
from .canonical import sizes_in
from .pattern import axis_sizes, dims_of

_OF_HEADS = re.compile(r"(heads|kv_heads|group)(_\d+)?")
_OF_FEATURES = re.compile(r"(maps|head_dim|v_head_dim)(_\d+)?")
_HEAD, _FEATURE = Axis("head"), Axis("feature of a head")


def label_of_stage(
    attention: Attention,
    names: AxisNames,
    turn: Attention,
    stage: str,
) -> Label:
    """Return the head and the feature of each element of a stage of one turn; no axes if its names do not show them.

    The heads of a later turn of a loop come after those of the earlier ones.
    """
    shape = turn.stages[stage].shape
    unknown = Label(shape)
    if names.mixes_positions and names.num_heads > 1:
        return unknown  # every head has every feature somewhere
    sizes = sizes_in(attention, names, stage)
    dims = _words_with_sizes(names.of_stage(stage), sizes)
    sizes.update(axis_sizes(dims, shape, sizes))
    words = list(chain(*dims))
    fits = tuple(_size_of(dim, sizes) for dim in dims) == shape
    if not fits or len(set(words)) < len(words):
        return unknown
    indices = _indices_of_words(dims, sizes)
    of_heads = _heads_in_order(words, names.head_order)
    of_features = [word for word in words if _OF_FEATURES.fullmatch(word)]
    turns = attention.branches or (attention,)
    first = turns.index(turn) * _size_of(of_heads, sizes)
    head = first + _in_one(of_heads, indices, sizes, len(shape))
    feature = _in_one(of_features, indices, sizes, len(shape))
    return Label(shape, {_HEAD: Span.of(head), _FEATURE: Span.of(feature)})


def _indices_of_words(dims: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> dict[str, Indices]:
    """Return the index along each axis of a stage."""
    indices: dict[str, Indices] = {}
    for place, dim in enumerate(dims):
        along = np.arange(_size_of(dim, sizes))
        step = 1
        for word in reversed(dim):
            shape = [1] * len(dims)
            shape[place] = len(along)
            indices[word] = (along // step % sizes[word]).reshape(shape)
            step *= sizes[word]
    return indices


def _in_one(words: Iterable[str], indices: Mapping[str, Indices], sizes: Mapping[str, int], rank: int) -> Indices:
    """Return the index along several axes counted as one, in row-major order."""
    index = np.zeros([1] * rank, np.int64)
    for word in words:
        index = index * sizes[word] + indices[word]
    return index


def _size_of(words: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Return the size of a dimension with these axes; 0 if one of them is unknown."""
    return prod(sizes.get(word, 0) for word in words)


def _heads_in_order(words: Iterable[str], order: Sequence[str]) -> list[str]:
    """Return the axes of heads, in the order in which the heads are numbered; those beyond the order come last."""
    heads = [word for word in words if _OF_HEADS.fullmatch(word)]
    in_order = [word for word in order if word in heads]
    return in_order + [word for word in heads if word not in order]


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


def rows_by_head(places: Span, heads: Label, steps: Iterable[int]) -> dict[int, Indices]:
    """Return for each head the element that each of its features is made of, -1 if unknown; no head without any.

    A rotated feature is made of two elements, or of all between two, with one of the `steps` from each to the next.
    All rotated features of a head together have as many elements as features, and get them in order.
    """
    if _HEAD not in heads.spans or _FEATURE not in heads.spans:
        return {}
    head, feature = heads.spans[_HEAD], heads.spans[_FEATURE]
    try:
        np.broadcast_shapes(head.low.shape, feature.low.shape, places.low.shape)
    except ValueError:
        return {}  # complex features are made of two numbers each
    # Mixed heads or features are none.
    is_one = (head.low == head.high) & (feature.low == feature.high) & (head.low >= 0) & (feature.low >= 0)
    is_present = is_one & places.is_known
    shape = is_present.shape
    number_of_head = np.broadcast_to(head.low, shape)[is_present]
    number_of_feature = np.broadcast_to(feature.low, shape)[is_present]
    counts = int(head.high.max()) + 1, int(feature.high.max()) + 1
    at = (number_of_head, number_of_feature)
    lowest = np.full(counts, np.iinfo(np.int64).max)
    np.minimum.at(lowest, at, np.broadcast_to(places.low, shape)[is_present])
    highest = np.full(counts, ABSENT)
    np.maximum.at(highest, at, np.broadcast_to(places.high, shape)[is_present])
    lowest[highest == ABSENT] = ABSENT
    rows: dict[int, Indices] = {}
    for number, (row, end) in enumerate(zip(lowest, highest, strict=True)):
        is_rotated = row != end
        row[is_rotated] = _in_order(row[is_rotated], end[is_rotated], steps)
        if (row >= 0).any() and not (row[is_rotated] < 0).any():
            rows[number] = row
    return rows


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
