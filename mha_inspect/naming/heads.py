"""Number the head and the feature of each element of a stage, and find the elements of a parameter for each number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
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
        return Layout(shape, {_CODE: Span.of(self.numbers + turn * self.heads * self.features)})


def codes_in(layout: Layout, like: Codes, turns: int) -> Codes | None:
    """Return the heads and features that a tensor is made of; None if they are mixed."""
    span = layout.spans.get(_CODE)
    if span is None:
        return None
    numbers = span.low if span.low is span.high else np.where(span.low == span.high, span.low, ABSENT)
    return Codes(numbers, like.heads * turns, like.features)


def codes_of(attention: Attention, names: AxisNames, turn: Attention, stage: str) -> Codes | None:
    """Return the head and feature of each element of a stage of one turn; None if its axes do not show them."""
    if names.mixes_positions and names.num_heads > 1:
        return None  # every head has every feature somewhere
    shape, known = turn.stages[stage].shape, sizes_in(attention, names, stage)
    dims = _known_words(names.of_stage(stage), known)
    sizes = known | axis_sizes(dims, shape, known)
    words = [word for dim in dims for word in dim]
    order = names.head_order
    heads = [word for word in words if _OF_HEADS.fullmatch(word)]
    heads.sort(key=lambda word: order.index(word) if word in order else len(order))
    counted = [*heads, *(word for word in words if _OF_FEATURES.fullmatch(word))]
    steps = {word: prod(sizes.get(inner, 0) for inner in counted[at + 1 :]) for at, word in enumerate(counted)}
    fits = [prod(sizes.get(word, 0) for word in dim) for dim in dims] == [*shape]
    if not fits or len(set(words)) < len(words):
        return None
    numbers = np.zeros([1] * len(shape), np.int64)
    for place, dim in enumerate(dims):
        for at, word in enumerate(dim):
            index = np.arange(shape[place]) // prod(sizes[inner] for inner in dim[at + 1 :]) % sizes[word]
            along = [1] * len(shape)
            along[place] = shape[place]
            numbers = numbers + (index * steps.get(word, 0)).reshape(along) if word in steps else numbers
    count = prod(sizes[word] for word in heads)
    return Codes(numbers, count, prod(sizes[word] for word in counted) // max(count, 1))


def _known_words(pattern: str, known: Iterable[str]) -> list[list[str]]:
    """Return the axes of each dimension; neighbours of unknown size, outside heads and features, count as one."""
    dims: list[list[str]] = []
    for place, words in enumerate(dims_of(pattern)):
        dims.append([])
        for word in words:
            is_named = word in known or _OF_HEADS.fullmatch(word) or _OF_FEATURES.fullmatch(word)
            if is_named:
                dims[-1].append(word)
            elif not dims[-1] or not dims[-1][-1].startswith("rest"):
                dims[-1].append(f"rest{place}_{len(dims[-1])}")
    return dims


def rows_of(places: Span, codes: Codes, steps: Iterable[int]) -> Indices:
    """Return for each head and feature the element that it is made of, from 0; -1 if unknown.

    A rotated feature is made of two elements, or of all between two, with one of the `steps` from each to the next.
    All rotated features of a head together have as many elements as features, and get them in order.
    """
    index, low, high = np.broadcast_arrays(codes.numbers, places.low, places.high)
    known = (high >= 0) & (index >= 0)
    rows = np.full((codes.heads, codes.features), np.iinfo(np.int64).max)
    highest = np.full_like(rows, ABSENT)
    np.minimum.at(rows.reshape(-1), index[known], low[known])
    np.maximum.at(highest.reshape(-1), index[known], high[known])
    rows[highest == ABSENT] = ABSENT
    for row, end in zip(rows, highest, strict=True) if (rows != highest).any() else ():
        rotated = row != end
        row[rotated] = _in_order(row[rotated], end[rotated], steps)
        if (row[rotated] < 0).any():
            row[:] = ABSENT
    return rows


def _in_order(lowest: Indices, highest: Indices, steps: Iterable[int]) -> Indices:
    """Return the elements that the rotated features of a head are made of, one for each, or -1."""
    made_of, count = np.unique(np.concatenate([lowest, highest])), len(lowest)
    if len(made_of) == 2 < count and any(made_of[1] - made_of[0] == (count - 1) * step for step in steps):
        return np.linspace(made_of[0], made_of[1], count, dtype=np.int64)
    return made_of if len(made_of) == count else np.full(count, ABSENT)
