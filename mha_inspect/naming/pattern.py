"""Axes as patterns that einops takes: those of the steps of attention, how elements move, and what sizes say of names.

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
"""Stage name to its canonical axes, in the order in which they are computed."""

STAGES: tuple[str, ...] = tuple(CANONICAL_AXES)
"""The names alone. An attention has those that its implementation has; nothing is invented for the rest."""

WITHIN = ("weights", "masked_scores", "scores", "q_heads", "k_heads", "v_heads")
"""The stages that the weights are made of: they say what the size of a name is, the first one that has it."""
PLACES = ("query", "key", "windows")
"""Names of axes along a sequence."""
POSITIONS = "positions"
"""What the axis of a sequence is called whose places are not one query, or one key, each."""

_GROUPED = {"heads": ("kv_heads", "group")}
"""An axis, and the two that it is counted by where keys and values are shared."""
_PACKED = ("qkv", "kv", "qk", "packed")
"""Axes that count what stands side by side in one matrix."""
_NUMBERED = re.compile(r"(\w+)_\d+")
"""Axes that have several dimensions: `query_1 query_2`, the height and width of an image."""

Dims = list[list[str]]
"""A pattern, dimension by dimension: several names where it has brackets."""


def _words_of(pattern: str) -> list[str]:
    """`batch query (heads head_dim)` as what stands for each dimension."""
    return re.findall(r"\([^)]*\)|\S+", pattern)


def dims_of(pattern: str) -> Dims:
    """`batch query (heads head_dim)` as the names in each dimension."""
    return [word.strip("()").split() for word in _words_of(pattern)]


@lru_cache(256)  # the layers of a model are alike
def rearrangement(left: str, right: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> str | None:
    """The pattern that brings elements laid out as `left` to `right`; None where no pattern of einops does.

    What an implementation repeats, or takes a part of, no pattern can say: the right side is then what it is before it
    is repeated, or has the axis first of which a part is taken, and words say the rest.

    Args:
        left: the axes of what is rearranged.
        right: the axes of what comes of it.
        shapes: of both.
    """
    before, after = dims_of(left), dims_of(right)
    _spell_alike(before, after)
    first, second = axis_sizes(before, shapes[0], {}), axis_sizes(after, shapes[1], {})
    first, second = (
        axis_sizes(before, shapes[0], {**second, **first}),
        axis_sizes(after, shapes[1], {**first, **second}),
    )
    for dims, other, own in ((before, after, first), (after, before, second)):
        there = _names(other)
        for names in dims:
            names[:] = ["1" if name not in there and own.get(name) == 1 else name for name in names]
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
    # An axis that became longer had something appended; any other change is no matter of moving elements.
    if any(first[axis] != second[axis] for axis in first.keys() & second.keys() - {"key"}):
        return None
    if first.get("key", 0) > second.get("key", first.get("key", 0)):
        return None
    text = _text(before)
    return (text if text == _text(after) else f"{text} -> {_text(after)}") + taken


def _names(dims: Dims) -> list[str]:
    return [name for names in dims for name in names if name != "1"]


def axis_sizes(dims: Dims, shape: Sequence[int], known: Mapping[str, int]) -> dict[str, int]:
    """The size of each axis that a dimension of its own tells, or all others in its dimension."""
    sizes = {names[0]: size for names, size in zip(dims, shape, strict=True) if len(names) == 1 and names[0] != "1"}
    for names, size in zip(dims, shape, strict=True):
        told = {**known, **sizes}
        left = [name for name in names if name not in told]
        if len(left) == 1 and len(names) > 1:
            sizes[left[0]] = size // max(prod(told[name] for name in names if name in told), 1)
        elif not left and prod(told[name] for name in names) == size:
            sizes |= {name: told[name] for name in names}
    return sizes


def _replace(dims: Dims, name: str, *others: str) -> None:
    for names in dims:
        names[:] = [new for old in names for new in (others if old == name else (old,))]


def _spell_alike(before: Dims, after: Dims) -> None:
    """Where one side counts an axis by its parts, the other does so too."""
    for one, other in ((before, after), (after, before)):
        for whole, parts in _GROUPED.items():
            if set(parts) <= set(_names(one)):
                _replace(other, whole, *parts)
        numbered: dict[str, list[str]] = {}
        for name in _names(one):
            if match := _NUMBERED.fullmatch(name):
                numbered.setdefault(match[1], []).append(name)
        for whole, found in numbered.items():
            _replace(other, whole, *found)


def _text(dims: Dims) -> str:
    return " ".join(names[0] if len(names) == 1 else f"({' '.join(names)})" for names in dims)


# -- what sizes say of names ------------------------------------------------------------------------------------------


def one_size_a_name(stages: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the patterns of all stages, with `positions` or a number in those that disagree with the weights.

    There are other numbers of positions than queries where a sequence was padded to whole windows, and where queries
    are asked one by one or piece by piece. Keys may become more, or fewer, before they are used.
    """
    return dict(_one_size_a_name(tuple((stage, axes, shapes[stage]) for stage, axes in stages.items())))


@lru_cache(256)  # the layers of a model are alike
def _one_size_a_name(stages: tuple[tuple[str, str, tuple[int, ...]], ...]) -> dict[str, str]:
    laid_out = {stage: list(zip(_words_of(axes), shape, strict=True)) for stage, axes, shape in stages}
    sizes: dict[str, dict[int, str]] = {}
    for stage in dict.fromkeys((*(stage for stage in (*WITHIN, "context") if stage in laid_out), *laid_out)):
        for dim, size in laid_out[stage]:
            if dim in PLACES:
                sizes.setdefault(dim, {}).setdefault(size, stage)
    within = {word: [size for size, stage in of_size.items() if stage in WITHIN] for word, of_size in sizes.items()}
    padded = min(sizes.get("query", (0,))) < max(within.get("query") or (0,))
    windows = any("windows" in dim for dims in laid_out.values() for dim, _ in dims)
    disagree = windows or padded or any(len(several) > 1 for several in within.values())
    known = {word: next(iter(of_size)) for word, of_size in sizes.items()}

    def written(stage: str, dim: str, size: int) -> str:
        """A dimension; where its words say another size, `positions` for a whole sequence, or the size."""
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
            texts.append(str(size) if words & before else text)  # two axes that are not told apart
            before |= words
        patterns[stage] = " ".join(texts)
    return patterns


def at_size(pattern: str, shape: tuple[int, ...], kept: tuple[int, ...]) -> str:
    """A pattern with the sizes of this shape: a number in it is a size of the run that it was read off.

    A dimension of which only a part has a name is a number as a whole, but for one that has the size that is `kept`.
    """
    dims = zip(_words_of(pattern), shape, kept, strict=True)
    return " ".join(str(size) if re.search(r"\b\d", dim) and size != same else dim for dim, size, same in dims)
