"""Write axes as einops patterns: the canonical axes of each stage, rearrangements between stages, names that fit sizes.

`einops.rearrange(left, pattern)` brings one stage to the next. A name stands for axes of one size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod

CANONICAL_AXES: dict[str, str] = {
    "query": "batch query embed",
    "key": "batch key embed",
    "value": "batch key embed",
    "q_proj": "batch query (heads head_dim)",
    "k_proj": "batch key (kv_heads head_dim)",
    "v_proj": "batch key (kv_heads head_dim)",
    "q_heads": "batch heads query head_dim",
    "k_heads": "batch heads key head_dim",
    "v_heads": "batch heads key head_dim",
    "scores": "batch heads query key",
    "masked_scores": "batch heads query key",
    "weights": "batch heads query key",
    "context": "batch heads query head_dim",
    "concat": "batch query (heads head_dim)",
    "output": "batch query embed",
}
"""Stage name to its canonical axes, in the order of computation."""

STAGES: tuple[str, ...] = tuple(CANONICAL_AXES)
"""The names of all stages. An attention has the stages that its implementation has; the others are absent."""

WITHIN = ("weights", "masked_scores", "scores", "q_heads", "k_heads", "v_heads")
"""The stages that the weights are made of. The first of them with a name decides the name's size."""
PLACES = ("query", "key", "windows")
"""Names of axes along a sequence."""
POSITIONS = "positions"
"""Name of a sequence axis whose places do not correspond to the queries or keys one by one."""

_GROUPED = {"heads": ("kv_heads", "group")}
"""An axis, and its two parts if keys and values are shared."""
_COUNTS = {"qkv": 3, "kv": 2, "qk": 2}
_PACKED = (*_COUNTS, "packed")
"""Axes that count the projections in one matrix."""
_NUMBERED = re.compile(r"(\w+)_\d+")
"""Axes with several dimensions, e.g. the height and width of an image: `query_1 query_2`."""

Dims = list[list[str]]
"""A pattern as lists of names, one list per dimension."""


def _words_of(pattern: str) -> list[str]:
    """Return the words for the dimensions of `batch query (heads head_dim)`, brackets included."""
    return re.findall(r"\([^)]*\)|\S+", pattern)


def dims_of(pattern: str) -> Dims:
    """Return the names in each dimension of `batch query (heads head_dim)`."""
    return [word.strip("()").split() for word in _words_of(pattern)]


@lru_cache(256)  # the layers of a model are alike
def rearrangement(left: str, right: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> str | None:
    """Return the pattern that rearranges `left` to `right`; None if einops has no pattern for it.

    A repeat or a slice has no pattern. The right side is then the layout before the repeat, or has the sliced axis
    first, and words follow the pattern.

    Args:
        left: the axes of the source.
        right: the axes of the result.
        shapes: the shapes of both.
    """
    before, after = dims_of(left), dims_of(right)
    _spell_alike(before, after)
    first, second = axis_sizes(before, shapes[0], _COUNTS), axis_sizes(after, shapes[1], _COUNTS)
    first, second = (
        axis_sizes(before, shapes[0], {**_COUNTS, **second, **first}),
        axis_sizes(after, shapes[1], {**_COUNTS, **first, **second}),
    )
    for dims, other, sizes in ((before, after, first), (after, before, second)):
        there = _names(other)
        for names in dims:
            names[:] = ["1" if name not in there and sizes.get(name) == 1 else name for name in names]
    gone, new = ([n for n in _names(a) if n not in _names(b)] for a, b in ((before, after), (after, before)))
    taken = ""
    if len(gone) == 1 and gone[0] in _PACKED and not new:
        after.insert(0, gone)
        taken = f", one of {gone[0]}"
    elif gone == ["packed"] and len(new) == 1 and new[0].endswith("head_dim"):
        _replace(after, new[0], "packed")
        taken = ", a part of packed"
    elif gone == ["kv_heads"] and new == ["heads"]:
        _replace(after, "heads", "kv_heads")
    elif not gone and new == ["heads"]:
        _replace(after, "heads", "1")
    elif gone or new:
        return None
    if any(name.isdigit() and name != "1" for name in (*_names(before), *_names(after))):
        return None
    if any(len(_names(dims)) != len(set(_names(dims))) for dims in (before, after)):
        return None
    # Keys may be appended, but not to windows. Any other change of a size is more than a rearrangement.
    both = ((name, first[name], second[name]) for name in first.keys() & second.keys())
    if any(old != size and (name != "key" or old > size or "windows" in second) for name, old, size in both):
        return None
    text = in_words(before)
    return (text if text == in_words(after) else f"{text} -> {in_words(after)}") + taken


def _names(dims: Dims) -> list[str]:
    return [name for names in dims for name in names if name != "1"]


def axis_sizes(dims: Dims, shape: Sequence[int], known: Mapping[str, int]) -> dict[str, int]:
    """Return the size of each axis that is alone in a dimension, or the only unknown axis in one."""
    sizes = {names[0]: size for names, size in zip(dims, shape, strict=True) if len(names) == 1 and names[0] != "1"}
    for names, size in zip(dims, shape, strict=True):
        every = {**known, **sizes}
        left = [name for name in names if name not in every]
        if len(left) == 1 and len(names) > 1:
            sizes[left[0]] = size // max(prod(every[name] for name in names if name in every), 1)
        elif not left and prod(every[name] for name in names) == size:
            sizes |= {name: every[name] for name in names}
    return sizes


def _replace(dims: Dims, name: str, *others: str) -> None:
    for names in dims:
        names[:] = [new for old in names for new in (others if old == name else (old,))]


def _spell_alike(before: Dims, after: Dims) -> None:
    """Replace an axis by its parts on one side if the other side has the parts."""
    for split, other in ((before, after), (after, before)):
        for whole, parts in _GROUPED.items():
            if set(parts) <= set(_names(split)):
                _replace(other, whole, *parts)
        numbered: dict[str, list[str]] = {}
        for name in _names(split):
            if match := _NUMBERED.fullmatch(name):
                numbered.setdefault(match[1], []).append(name)
        for whole, names in numbered.items():
            # The first part counts slowest in the whole, in whatever order this side has them.
            _replace(other, whole, *sorted(names, key=lambda name: int(name.rpartition("_")[2])))


def in_words(dims: Dims) -> str:
    """Return the pattern of dimensions."""
    return " ".join(names[0] if len(names) == 1 else f"({' '.join(names)})" for names in dims)


# -- names that fit sizes ---------------------------------------------------------------------------------------------


def one_size_a_name(stages: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the patterns of all stages; a name whose size disagrees with the weights becomes `positions` or a number.

    The sequence can differ from the queries if it was padded to whole windows, or if queries are processed in pieces.
    Keys may be appended or pooled before they are used.
    """
    laid_out = {stage: list(zip(_words_of(axes), shapes[stage], strict=True)) for stage, axes in stages.items()}
    sizes: dict[str, dict[int, str]] = {}
    for stage in dict.fromkeys((*(stage for stage in (*WITHIN, "context") if stage in laid_out), *laid_out)):
        for dim, size in laid_out[stage]:
            if dim in PLACES:
                sizes.setdefault(dim, {}).setdefault(size, stage)
    within = {word: [size for size, stage in of_size.items() if stage in WITHIN] for word, of_size in sizes.items()}
    padded = min(sizes.get("query", (0,))) < max(within.get("query") or (0,))
    windows = any("windows" in dim for dims in laid_out.values() for dim, _ in dims)
    disagree = windows or padded or any(len(different) > 1 for different in within.values())
    known = {word: next(iter(of_size)) for word, of_size in sizes.items()}

    def written(stage: str, dim: str, size: int) -> str:
        """Return a dimension; if its names do not fit the size, `positions` for a whole sequence, or the size."""
        words = dim.strip("()").split()
        factors = [int(word) if word.isdigit() else known.get(word, 0) for word in words]
        if (dim == "key" and not disagree) or not all(factors) or prod(factors) == size:
            return dim
        outside = stage not in WITHIN and not (windows and stage == "context")
        return POSITIONS if outside and all(word in PLACES for word in words) else str(size)

    patterns = {}
    for stage, dims in laid_out.items():
        texts, before = list[str](), set[str]()
        for dim, size in dims:
            text = written(stage, dim, size)
            words = {word for word in text.strip("()").split() if word.isidentifier()}
            texts.append(str(size) if words & before else text)  # two axes of one name
            before |= words
        patterns[stage] = " ".join(texts)
    return patterns


def at_size(pattern: str, shape: tuple[int, ...], kept: tuple[int, ...]) -> str:
    """Return a pattern with the sizes of this shape instead of the sizes of another run.

    A dimension with a number becomes its size as a whole, unless it has the same size in `kept`, the other run's shape.
    """
    dims = zip(_words_of(pattern), shape, kept, strict=True)
    return " ".join(str(size) if re.search(r"\b\d", dim) and size != same else dim for dim, size, same in dims)
