"""The axes of a parameter, from which of its elements belong to which head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

from .influence import Touch
from .owned import Owned

PACKED = {"qkv": "qkv", "kv": "kv", "qk": "qk"}


@dataclass(frozen=True)
class Part:
    """A matrix or bias that is a part of a parameter, or the whole of it."""

    letter: str
    """`q`, `k`, `v` or `o`."""
    owned: Owned
    whole: int
    """How many heads the attention has on this side: a parameter may hold a single one of them."""

    @property
    def touches(self) -> list[Touch]:
        """The elements of each head; of all of them where they are shared."""
        return list(self.owned.heads.values())


@dataclass(frozen=True)
class _Axis:
    name: str
    size: int


def axes_of(shape: Sequence[int], parts: Sequence[Part], names: dict[str, str], inside: str) -> list[str]:
    """The axes of each dimension of a parameter, as words of an einops pattern.

    Args:
        shape: of the parameter.
        parts: what it holds.
        names: what `heads` and `head_dim` are called here.
        inside: what the dimension of a matrix is called that is not of heads and their features; empty for a bias.
    """
    if not parts or any(part.owned.shared for part in parts):
        return _shared(shape, parts, names, inside)
    for outside in _candidates(shape, parts) if inside else (None,):
        found = _assigned(shape, parts, names, outside)
        if found is not None:
            return [inside if dim == outside else words for dim, words in enumerate(found)]
    return _by_blocks(shape, parts, names, inside)


def structured(shape: Sequence[int], parts: Sequence[Part]) -> int | None:
    """The one dimension along which parts and heads lie; None where it is not one alone."""
    labels = [_labels(shape[dim], dim, parts) for dim in range(len(shape))]
    varying = [dim for dim, rows in enumerate(labels) if len(set(zip(*rows, strict=True))) > 1]
    if not varying:
        outside = parts[0].owned.outside
        free = [dim for dim in range(len(shape)) if dim != outside and shape[dim] > 1]
        return free[0] if len(free) == 1 else None
    return varying[0] if len(varying) == 1 else None


def _candidates(shape: Sequence[int], parts: Sequence[Part]) -> Iterator[int | None]:
    """Which dimension may be the one that is not of heads, likeliest first."""
    outside = parts[0].owned.outside
    larger = [dim for dim, size in enumerate(shape) if size > 1]
    if outside is not None:
        yield outside
    elif len(larger) > 1:
        yield from reversed(larger)
    else:
        yield None


def _labels(size: int, dim: int, parts: Sequence[Part]) -> list[list[bool]]:
    """For each part and head, which indices of a dimension are touched."""
    rows = []
    for part in parts:
        for touch in part.touches:
            places = set(touch.places[dim])
            rows.append([index in places for index in range(size)])
    return rows


def _assigned(
    shape: Sequence[int], parts: Sequence[Part], names: dict[str, str], outside: int | None
) -> list[str] | None:
    """Words for each dimension, where packed parts, heads and their features are one axis each."""
    heads = {len(part.touches) for part in parts}
    if len(heads) != 1 or not all(touch.is_box for part in parts for touch in part.touches):
        return None
    count = heads.pop()
    single = count == 1 < parts[0].whole
    packed = "".join(part.letter for part in parts)
    dims = [dim for dim in range(len(shape)) if dim != outside]
    per_part = prod(shape[dim] for dim in dims) / (len(parts) * count)
    axes = [_Axis(PACKED.get(packed, "packed"), len(parts))] if len(parts) > 1 else []
    axes += [] if single else [_Axis(names["heads"], count)]
    axes += [_Axis(names["head_dim"], round(per_part))]
    if per_part != round(per_part):
        return None
    # Whatever comes first in the order of the parts is tried first: ("qkv", "heads", "head_dim").
    for order in permutations(axes):
        for groups in _groups(order, [shape[dim] for dim in dims]):
            if all(_fits(shape[dim], dim, group, parts, axes) for dim, group in zip(dims, groups, strict=True)):
                words = dict(zip(dims, map(_words, groups), strict=True))
                return [words.get(dim, "") for dim in range(len(shape))]
    return None


def _groups(order: tuple[_Axis, ...], sizes: Sequence[int]) -> Iterator[list[tuple[_Axis, ...]]]:
    """Every way to give each dimension a run of the axes whose sizes multiply to its own."""
    if not sizes:
        if not order:
            yield []
        return
    for stop in range(len(order) + 1):
        if prod(axis.size for axis in order[:stop]) == sizes[0]:
            for rest in _groups(order[stop:], sizes[1:]):
                yield [order[:stop], *rest]


def _fits(size: int, dim: int, group: tuple[_Axis, ...], parts: Sequence[Part], axes: Sequence[_Axis]) -> bool:
    """Whether each index of a dimension belongs to the part and head that the axes in it say."""
    features = axes[-1]
    rows = _labels(size, dim, parts)
    number = 0
    for place in range(len(parts)):
        for head in range(len(parts[place].touches)):
            expected = []
            for index in range(size):
                at = index
                fits = True
                for axis in reversed(group):
                    at, own = divmod(at, axis.size)
                    if axis is features:
                        continue
                    is_packed = len(parts) > 1 and axis is axes[0]
                    fits = fits and own == (place if is_packed else head)
                expected.append(fits)
            if rows[number] != expected:
                return False
            number += 1
    return True


def _words(group: tuple[_Axis, ...]) -> str:
    if not group:
        return "1"
    return group[0].name if len(group) == 1 else f"({' '.join(axis.name for axis in group)})"


def _by_blocks(shape: Sequence[int], parts: Sequence[Part], names: dict[str, str], inside: str) -> list[str]:
    """Where parts have heads of their own numbers or widths: what can be said of the dimension they lie along."""
    dim = structured(shape, parts)
    words = [str(size) for size in shape]
    if dim is None:
        return words
    others = [place for place in range(len(shape)) if place != dim and shape[place] > 1]
    if len(others) == 1 and inside:
        words[others[0]] = inside
    words = ["1" if size == 1 else word for word, size in zip(words, shape, strict=True)]
    if len(parts) > 1:
        fewest = min(len(part.touches) for part in parts)
        shared = any(len(part.touches) > fewest for part in parts)
        grouped = fewest > 1 and in_blocks(parts, dim, shape[dim])
        words[dim] = f"({'kv_heads' if shared else names['heads']} packed)" if grouped else "packed"
    return words


def in_blocks(parts: Sequence[Part], dim: int, size: int) -> bool:
    """Whether all that belongs to a head, or to those that share a key and a value, lies in one block, in order."""
    count = min(len(part.touches) for part in parts)
    block = size // count
    return size % count == 0 and all(
        index // block == number // (len(part.touches) // count)
        for part in parts
        for number, touch in enumerate(part.touches)
        for index in touch.places[dim]
    )


def _shared(shape: Sequence[int], parts: Sequence[Part], names: dict[str, str], inside: str) -> list[str]:
    """A parameter that belongs to no head: the width of one where it has that, and what it takes in."""
    words = ["1" if size == 1 else str(size) for size in shape]
    outside = next((part.owned.outside for part in parts if part.owned.outside is not None), None)
    if outside is not None and inside:
        words[outside] = inside
    return words
