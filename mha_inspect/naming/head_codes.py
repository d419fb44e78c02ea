"""Number the head and the feature of each element of a stage, and find the elements of a parameter for each number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch
from einops import EinopsError, repeat
from torch import Tensor

from ..graph.attention import Attention
from .axes import AxisNames
from .canonical import sizes_in
from .pattern import axis_sizes, dims_of

_OF_HEADS = re.compile(r"(heads|kv_heads|group)(_\d+)?")
_OF_FEATURES = re.compile(r"(maps|head_dim|v_head_dim)(_\d+)?")


@dataclass(frozen=True)
class Codes:
    """The head and feature of each element of a stage: `head * features + feature`, counted from 0."""

    numbers: Tensor
    heads: int
    features: int


def codes_of(attention: Attention, names: AxisNames, turn: Attention, stage: str) -> Codes | None:
    """Return the head and feature of each element of a stage of one turn; None if its axes do not show them."""
    pattern, shape = names.of_stage(stage), turn.stages[stage].shape
    if names.mixes_positions and names.num_heads > 1:
        return None  # every head has every feature somewhere
    known = sizes_in(attention, names, stage)
    dims: list[list[str]] = [[] for _ in shape]
    for at, words in enumerate(dims_of(pattern)):
        for word in words:  # neighbouring axes of unknown size, outside heads and features, count as one
            named = _OF_HEADS.fullmatch(word) or _OF_FEATURES.fullmatch(word) or word in known
            if named or not dims[at] or not dims[at][-1].startswith("rest"):
                dims[at].append(word if named else f"rest{at}_{len(dims[at])}")
    sizes = known | axis_sizes(dims, shape, known)
    words = [word for dim in dims for word in dim]
    heads, features = ([w for w in words if of.fullmatch(w)] for of in (_OF_HEADS, _OF_FEATURES))
    order = names.head_order
    heads.sort(key=lambda word: order.index(word) if word in order else len(order))
    try:
        counts = [prod(sizes[word] for word in some) for some in (heads, features)]
        numbers = torch.arange(float(prod(counts))).view([sizes[word] for word in (*heads, *features)] or [])
        target = " ".join(f"({' '.join(dim)})" for dim in dims)
        laid_out = repeat(numbers, f"{' '.join((*heads, *features))} -> {target}", **{w: sizes[w] for w in words})
    except (KeyError, EinopsError, RuntimeError):
        return None
    return Codes(laid_out, *counts) if laid_out.shape == shape else None


def rows_of(low: Tensor, high: Tensor, codes: Codes, steps: Iterable[int]) -> Tensor:
    """Return for each head and feature the element that it is made of, from 0; -1 if unknown.

    A rotated feature is made of two elements, or of all between two, with one of the `steps` from each to the next.
    All rotated features of a head together have as many elements as features, and get them in order.
    """
    known = ~(low.isnan() | codes.numbers.isnan())
    index, size = codes.numbers[known].long(), codes.heads * codes.features
    lowest = torch.full((size,), torch.inf, dtype=low.dtype).scatter_reduce(0, index, low[known], "amin")
    highest = torch.full((size,), -torch.inf, dtype=low.dtype).scatter_reduce(0, index, high[known], "amax")
    rows = torch.where(lowest == highest, lowest, 0).long().view(codes.heads, codes.features) - 1
    for row, *ends in zip(rows, lowest.view(rows.shape), highest.view(rows.shape), strict=True):
        rotated = (ends[0] != ends[1]) & (ends[0] < torch.inf)
        made_of = torch.unique(torch.cat([end[rotated] for end in ends])) if bool(rotated.any()) else ends[0][:0]
        count = int(rotated.sum())
        if len(made_of) == 2 < count and any(made_of[1] - made_of[0] == (count - 1) * step for step in steps):
            made_of = torch.linspace(int(made_of[0]), int(made_of[1]), count, dtype=made_of.dtype)
        if len(made_of) == count:
            row[rotated] = made_of.long() - 1
        elif count:
            row[:] = -1
    return rows
