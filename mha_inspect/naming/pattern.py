"""Write axes as einops patterns: the canonical axes of each stage, rearrangements between stages, names that fit sizes.

`einops.rearrange(left, pattern)` brings one stage to the next. A name stands for axes of one size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
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


def in_words(dims: Dims) -> str:
    """Return the pattern of dimensions."""
    words: list[str] = []
    for names in dims:
        text = " ".join(names)
        words.append(text if len(names) == 1 else f"({text})")
    return " ".join(words)


# -- rearrangements ---------------------------------------------------------------------------------------------------


def rearrangement(
    left: str,
    right: str,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> str | None:
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
    _spell_alike(after, before)
    first = axis_sizes(before, shapes[0], _COUNTS)
    second = axis_sizes(after, shapes[1], _COUNTS)
    # The sizes of one side help to find those of the other.
    sizes_before = axis_sizes(before, shapes[0], {**_COUNTS, **second, **first})
    sizes_after = axis_sizes(after, shapes[1], {**_COUNTS, **first, **second})
    _write_ones(before, after, sizes_before)
    _write_ones(after, before, sizes_after)
    taken = _match_names(before, after)
    if taken is None or not _keeps_sizes(sizes_before, sizes_after):
        return None
    if not (_has_distinct_names(before) and _has_distinct_names(after)):
        return None
    source, result = in_words(before), in_words(after)
    if source == result:
        return source + taken
    return f"{source} -> {result}{taken}"


def _spell_alike(split: Dims, whole: Dims) -> None:
    """Replace each axis by its parts on one side if the other side, `split`, has the parts.

    Beside `query_1 query_2` on the other side, `query` becomes `query_1 query_2`.
    """
    names = _names(split)
    for axis, parts in _GROUPED.items():
        if set(parts) <= set(names):
            _replace(whole, axis, *parts)
    numbered: dict[str, list[str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            numbered.setdefault(match[1], []).append(name)
    for axis, numbered_parts in numbered.items():
        # The first part counts slowest in the whole, in whatever order this side has them.
        _replace(whole, axis, *sorted(numbered_parts, key=_number_of))


def _number_of(name: str) -> int:
    """Return the number of a part: 2 for `query_2`."""
    return int(name.rpartition("_")[2])


def _write_ones(dims: Dims, beside: Dims, sizes: Mapping[str, int]) -> None:
    """Replace the names of axes of size one that the other side lacks by `1`."""
    names_beside = _names(beside)
    for names in dims:
        for place, name in enumerate(names):
            if sizes.get(name) == 1 and name not in names_beside:
                names[place] = "1"


def _match_names(before: Dims, after: Dims) -> str | None:
    """Give both sides the same names, and return words about a part that was taken; None if names differ."""
    names_before, names_after = _names(before), _names(after)
    gone = [name for name in names_before if name not in names_after]
    new = [name for name in names_after if name not in names_before]
    if not gone and not new:
        return ""
    if not new and len(gone) == 1 and gone[0] in _PACKED:
        after.insert(0, gone)
        return f", one of {gone[0]}"
    if gone == ["packed"] and len(new) == 1 and new[0].endswith("head_dim"):
        _replace(after, new[0], "packed")
        return ", a part of packed"
    if new == ["heads"] and gone == ["kv_heads"]:
        _replace(after, "heads", "kv_heads")
        return ""
    if new == ["heads"] and not gone:
        _replace(after, "heads", "1")
        return ""
    return None


def _has_distinct_names(dims: Dims) -> bool:
    """Return whether every axis has a name, and no two axes the same one."""
    names = _names(dims)
    if any(map(str.isdigit, names)):
        return False
    return len(names) == len(set(names))


def _keeps_sizes(before: Mapping[str, int], after: Mapping[str, int]) -> bool:
    """Return whether the axes of both sides have the same sizes; any other change is more than a rearrangement."""
    for name in before.keys() & after.keys():
        # Keys may be appended, but not to windows.
        may_grow = name == "key" and "windows" not in after
        more = after[name] - before[name]
        if more < 0 or (more > 0 and not may_grow):
            return False
    return True


def _names(dims: Dims) -> list[str]:
    """Return the names of all axes, without axes of size one."""
    return [name for names in dims for name in names if name != "1"]


def axis_sizes(
    dims: Dims,
    shape: Sequence[int],
    given: Mapping[str, int],
) -> dict[str, int]:
    """Return the size of each axis that is alone in a dimension, or the only unknown axis in one."""
    pairs = list(zip(dims, shape, strict=True))
    sizes: dict[str, int] = {}
    for names, size in pairs:
        if len(names) == 1 and names != ["1"]:
            sizes[names[0]] = size
    for names, size in pairs:
        every = {**given, **sizes}
        unknown = [name for name in names if name not in every]
        product = prod(every.get(name, 1) for name in names)
        if len(unknown) == 1 and len(names) > 1:
            sizes[unknown[0]] = size // max(product, 1)
        elif not unknown and product == size:
            for name in names:
                sizes[name] = every[name]
    return sizes


def _replace(dims: Dims, name: str, *names: str) -> None:
    """Replace a name in all dimensions by one or several names."""
    for dim in dims:
        for place in reversed(range(len(dim))):
            if dim[place] == name:
                dim[place : place + 1] = names


# -- names that fit sizes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _SizedDim:
    """One dimension of a stage: `(heads head_dim)` of 12."""

    text: str
    size: int

    @property
    def words(self) -> list[str]:
        """The names and numbers in it."""
        return self.text.strip("()").split()


_LaidOut = Mapping[str, list[_SizedDim]]
"""Stage to its dimensions."""


def one_size_a_name(
    stages: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, str]:
    """Return the patterns of all stages; a name whose size disagrees with the weights becomes `positions` or a number.

    The sequence can differ from the queries if it was padded to whole windows, or if queries are processed in pieces.
    Keys may be appended or pooled before they are used.
    """
    laid_out: dict[str, list[_SizedDim]] = {}
    for stage, axes in stages.items():
        pairs = zip(_words_of(axes), shapes[stage], strict=True)
        laid_out[stage] = [_SizedDim(text, size) for text, size in pairs]
    sizes = _SizesOfPlaces.of(laid_out)
    patterns: dict[str, str] = {}
    for stage, dims in laid_out.items():
        texts: list[str] = []
        names: set[str] = set()
        for dim in dims:
            text = sizes.fitting(stage, dim)
            words = set(filter(str.isidentifier, text.strip("()").split()))
            if words & names:  # two axes of one name
                text = str(dim.size)
            texts.append(text)
            names |= words
        patterns[stage] = " ".join(texts)
    return patterns


@dataclass(frozen=True)
class _SizesOfPlaces:
    """The sizes of queries, keys and windows in the stages of one attention."""

    first: Mapping[str, int]
    """Name to its size in the first stage that has it alone in a dimension: the weights, if they have it."""
    has_windows: bool
    disagree: bool
    """Whether a name has several sizes in the stages that the weights are made of, or may have."""

    @classmethod
    def of(cls, laid_out: _LaidOut) -> _SizesOfPlaces:
        """Read the sizes from the stages."""
        sizes: dict[str, dict[int, str]] = {}  # name and size to the first stage with both
        in_order = [stage for stage in (*WITHIN, "context") if stage in laid_out]
        for stage in (*in_order, *laid_out):
            for dim in laid_out[stage]:
                if dim.text in PLACES:
                    sizes.setdefault(dim.text, {}).setdefault(dim.size, stage)
        first: dict[str, int] = {}
        within: dict[str, list[int]] = {}  # name to its sizes in the stages that the weights are made of
        for name, stages_by_size in sizes.items():
            first[name] = next(iter(stages_by_size))
            within[name] = [size for size, stage in stages_by_size.items() if stage in WITHIN]
        has_windows = any("windows" in dim.text for dim in chain(*laid_out.values()))
        shortest = min(sizes.get("query", {}), default=0)
        is_padded = shortest < max(within.get("query", []), default=0)
        has_several = any(len(different) > 1 for different in within.values())
        return cls(first, has_windows, disagree=has_windows or is_padded or has_several)

    def fitting(self, stage: str, dim: _SizedDim) -> str:
        """Return a dimension; if its names do not fit the size, `positions` for a whole sequence, or the size."""
        if dim.text == "key" and not self.disagree:
            return dim.text
        size = prod(map(self._size_of, dim.words))
        if size in (0, dim.size):  # 0 for a name without a size of its own
            return dim.text
        is_inside = stage in WITHIN or (self.has_windows and stage == "context")
        if not is_inside and set(dim.words) <= set(PLACES):
            return POSITIONS
        return str(dim.size)

    def _size_of(self, word: str) -> int:
        """Return the size of a name or a number; 0 for a name without one."""
        if word.isdigit():
            return int(word)
        return self.first.get(word, 0)


def at_size(pattern: str, shape: tuple[int, ...], kept: tuple[int, ...]) -> str:
    """Return a pattern with the sizes of this shape instead of the sizes of another run.

    A dimension with a number becomes its size as a whole, unless it has the same size in `kept`, the other run's shape.
    """
    texts: list[str] = []
    for text, size, kept_size in zip(_words_of(pattern), shape, kept, strict=True):
        has_number = re.search(r"\b\d", text) is not None
        texts.append(str(size) if has_number and size != kept_size else text)
    return " ".join(texts)
