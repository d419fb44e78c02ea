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
    """Return the patterns of all stages, with `positions` or a number in those that disagree with the weights.

    There are other numbers of positions than queries where a sequence was padded to whole windows, and where queries
    are asked one by one or piece by piece. Keys may become more, or fewer, before they are used.
    """
    return dict(_one_size_a_name(tuple((stage, axes, shapes[stage]) for stage, axes in stages.items())))


@lru_cache(256)  # the layers of a model are alike
def _one_size_a_name(stages: tuple[tuple[str, str, tuple[int, ...]], ...]) -> dict[str, str]:
    dims_of = {stage: list(zip(words_of(axes), shape, strict=True)) for stage, axes, shape in stages}
    sizes: dict[str, dict[int, str]] = {}
    for stage in dict.fromkeys((*(stage for stage in (*WITHIN, "context") if stage in dims_of), *dims_of)):
        for dim, size in dims_of[stage]:
            if dim in _PLACES:
                sizes.setdefault(dim, {}).setdefault(size, stage)
    within = {word: [size for size, stage in of_size.items() if stage in WITHIN] for word, of_size in sizes.items()}
    padded = min(sizes.get("query", (0,))) < max(within.get("query") or (0,))
    windows = any("windows" in dim for dims in dims_of.values() for dim, _ in dims)
    disagree = windows or padded or any(len(several) > 1 for several in within.values())
    known = {word: next(iter(of_size)) for word, of_size in sizes.items()}

    def written(stage: str, dim: str, size: int) -> str:
        """A dimension; where its words say another size, `positions` for a whole sequence, or the size."""
        words = dim.strip("()").split()
        factors = [int(word) if word.isdigit() else known.get(word, 0) for word in words]
        if (dim == "key" and not disagree) or not all(factors) or prod(factors) == size:
            return dim
        outside = stage not in WITHIN and not (windows and stage == "context")
        return POSITIONS if outside and all(word in _PLACES for word in words) else str(size)

    patterns = {}
    for stage, dims in dims_of.items():
        texts, before = list[str](), set[str]()
        for dim, size in dims:
            text = written(stage, dim, size)
            words = {word for word in text.strip("()").split() if word.isidentifier()}
            texts.append(str(size) if words & before else text)  # two axes that are not told apart
            before |= words
        patterns[stage] = " ".join(texts)
    return patterns


def at_size(pattern: str, shape: tuple[int, ...], kept: tuple[int, ...]) -> str:
    """A pattern with the sizes of this shape: a number in it is a size of the run that it was read off.

    A dimension of which only a part has a name is a number as a whole, but for one that has the size that is `kept`.
    """
    dims = zip(words_of(pattern), shape, kept, strict=True)
    return " ".join(str(size) if re.search(r"\b\d", dim) and size != same else dim for dim, size, same in dims)
