"""A name stands for one axis of one size in all of an attention's stages; where it would not, there is a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

_MADE_OF_WEIGHTS = ("weights", "masked_scores", "scores", "q_heads", "k_heads", "v_heads")
"""The stages that say what the size of a name is, the first one that has it."""
_PLACES = ("query", "key", "windows")
"""Names of axes along a sequence."""


def one_size_a_name(stages: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """The patterns of all stages, with numbers in those that disagree: a sequence that was padded to whole windows.

    Args:
        stages: stage name to its pattern.
        shapes: stage name to its shape.
    """
    dims_of = {stage: re.findall(r"\([^)]*\)|\S+", pattern) for stage, pattern in stages.items()}
    sizes: dict[str, dict[int, str]] = {}
    for stage in dict.fromkeys((*(one for one in _MADE_OF_WEIGHTS if one in dims_of), *dims_of)):
        for dim, size in zip(dims_of[stage], shapes[stage], strict=True):
            if dim in _PLACES:
                sizes.setdefault(dim, {}).setdefault(size, stage)
    # Keys may become more before they are used, and queries may be taken one by one: that is no padding.
    within = {word: [n for n, stage in found.items() if stage in _MADE_OF_WEIGHTS] for word, found in sizes.items()}
    padded = min(sizes.get("query", (0,))) < max(within.get("query") or (0,))
    if "windows" in sizes or padded or any(len(found) > 1 for found in within.values()):
        known = {word: next(iter(found)) for word, found in sizes.items()}
        for stage, dims in dims_of.items():
            dims_of[stage] = [_told(dim, size, known) for dim, size in zip(dims, shapes[stage], strict=True)]
    return {stage: " ".join(_each_once(dims, shapes[stage])) for stage, dims in dims_of.items()}


def _each_once(dims: list[str], shape: tuple[int, ...]) -> list[str]:
    """Without a name that stood there before: two axes that are not told apart."""
    seen: set[str] = set()
    once = []
    for dim, size in zip(dims, shape, strict=True):
        words = {word for word in dim.strip("()").split() if word.isidentifier()}
        once.append(str(size) if words & seen else dim)
        seen |= words
    return once


def _told(dim: str, size: int, known: Mapping[str, int]) -> str:
    """The words of one dimension, or its size where they say another one."""
    words = dim.strip("()").split()
    factors = [int(word) if word.isdigit() else known.get(word, 0) for word in words]
    disagrees = all(factors) and prod(factors) != size and any(word in _PLACES for word in words)
    return str(size) if disagrees else dim
