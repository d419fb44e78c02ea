"""What sizes say of names: a name stands for axes of one size."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from math import prod

from .pattern import words_of

WITHIN = ("weights", "masked_scores", "scores", "q_heads", "k_heads", "v_heads")
"""The stages that the weights are made of: they say what the size of a name is, the first one that has it."""
_PLACES = ("query", "key", "windows")
"""Names of axes along a sequence."""
POSITIONS = "positions"
"""What the axis of a sequence is called whose places are not one query, or one key, each."""


def one_size_a_name(stages: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the patterns of all stages, by `_one_size_a_name`: the layers of a model are alike."""
    return dict(_one_size_a_name(tuple(stages.items()), tuple(shapes.items())))


@lru_cache(256)
def _one_size_a_name(
    patterns: tuple[tuple[str, str], ...], by_stage: tuple[tuple[str, tuple[int, ...]], ...]
) -> dict[str, str]:
    """Return the patterns of all stages, with `positions` or a number in those that disagree with the weights.

    There are other numbers of positions than queries where a sequence was padded to whole windows, and where queries
    are asked one by one or piece by piece. Keys may become more, or fewer, before they are used.

    Args:
        patterns: stage names with their patterns.
        by_stage: stage names with their shapes.
    """
    shapes = dict(by_stage)
    dims_of = {stage: words_of(pattern) for stage, pattern in patterns}
    sizes: dict[str, dict[int, str]] = {}
    for stage in dict.fromkeys((*(one for one in (*WITHIN, "context") if one in dims_of), *dims_of)):
        for dim, size in zip(dims_of[stage], shapes[stage], strict=True):
            if dim in _PLACES:
                sizes.setdefault(dim, {}).setdefault(size, stage)
    within = {word: [n for n, stage in found.items() if stage in WITHIN] for word, found in sizes.items()}
    padded = min(sizes.get("query", (0,))) < max(within.get("query") or (0,))
    windows = any("windows" in dim for dims in dims_of.values() for dim in dims)
    disagree = windows or padded or any(len(found) > 1 for found in within.values())
    known = {word: next(iter(found)) for word, found in sizes.items()}
    for stage, dims in dims_of.items():
        outside = stage not in WITHIN and not (windows and stage == "context")
        told = zip(dims, shapes[stage], strict=True)
        dims_of[stage] = [
            dim if dim == "key" and not disagree else _told(dim, size, known, outside=outside) for dim, size in told
        ]
    return {stage: " ".join(dims) for stage, dims in dims_of.items()}


def _told(dim: str, size: int, known: Mapping[str, int], *, outside: bool) -> str:
    """The words of one dimension; where they say another size, `positions` for a whole sequence, or the size."""
    words = dim.strip("()").split()
    factors = [int(word) if word.isdigit() else known.get(word, 0) for word in words]
    if not all(factors) or prod(factors) == size or not any(word in _PLACES for word in words):
        return dim
    return POSITIONS if outside and all(word in _PLACES for word in words) else str(size)


def at_size(pattern: str, shape: tuple[int, ...], kept: tuple[int, ...]) -> str:
    """A pattern with the sizes of this shape: a number in it is a size of the run that it was read off.

    A dimension of which only a part has a name is a number as a whole, but for one that has the size that is `kept`.
    """
    told = zip(words_of(pattern), shape, kept, strict=True)
    return " ".join(str(size) if re.search(r"\b\d", dim) and size != same else dim for dim, size, same in told)
