"""What sizes say of names: a name stands for axes of one size, and one that is of size one is told by a wider run.

A dimension of size one leaves no trace in a view: what it is shows in a run of the same forward where it has another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ..graph.attention import Attention
from ..reports.trace import Product, ProductPair
from .pattern import words_of

if TYPE_CHECKING:
    from .axes import AxisNames

    Named = tuple[Attention, AxisNames]

_MADE_OF_WEIGHTS = ("weights", "masked_scores", "scores", "q_heads", "k_heads", "v_heads")
"""The stages that say what the size of a name is, the first one that has it."""
WITHIN = (*_MADE_OF_WEIGHTS, "context")
"""The stages in which the heads are apart."""
_PLACES = ("query", "key", "windows")
"""Names of axes along a sequence."""
POSITIONS = "positions"
"""What the axis of a sequence is called whose places are not one query, or one key, each."""


def one_size_a_name(stages: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the patterns of all stages, with `positions` or a number in those that disagree with the weights.

    There are other numbers of positions than queries where a sequence was padded to whole windows, and where queries
    are asked one by one or piece by piece. Keys may become more, or fewer, before they are used.

    Args:
        stages: stage name to its pattern.
        shapes: stage name to its shape.
    """
    dims_of = {stage: words_of(pattern) for stage, pattern in stages.items()}
    sizes: dict[str, dict[int, str]] = {}
    for stage in dict.fromkeys((*(one for one in _MADE_OF_WEIGHTS if one in dims_of), *dims_of)):
        for dim, size in zip(dims_of[stage], shapes[stage], strict=True):
            if dim in _PLACES:
                sizes.setdefault(dim, {}).setdefault(size, stage)
    within = {word: [n for n, stage in found.items() if stage in _MADE_OF_WEIGHTS] for word, found in sizes.items()}
    padded = min(sizes.get("query", (0,))) < max(within.get("query") or (0,))
    windows = any("windows" in dim for dims in dims_of.values() for dim in dims)
    disagree = windows or padded or any(len(found) > 1 for found in within.values())
    known = {word: next(iter(found)) for word, found in sizes.items()}
    for stage, dims in dims_of.items():
        outside = stage not in WITHIN
        told = zip(dims, shapes[stage], strict=True)
        dims_of[stage] = [
            dim if dim == "key" and not disagree else _told(dim, size, known, outside=outside) for dim, size in told
        ]
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


def named_after(own: Sequence[Named], others: Sequence[Named]) -> tuple[Named, ...]:
    """The attentions of a run with the names of those of another, where these are the same ones."""
    if len(own) != len(others) or not all(map(_is_same, own, others)):
        return tuple(own)
    return tuple(
        (found, names.taking(_stages_at_size(found, *other))) for (found, names), other in zip(own, others, strict=True)
    )


def _stages_at_size(found: Attention, like: Attention, names: AxisNames) -> dict[str, str]:
    """The axes of those stages of an attention that another one has as well, with as many dimensions."""
    return {
        stage: at_size(names.of_stage(stage), tensor.shape, like.stages[stage].shape)
        for stage, tensor in found.stages.items()
        if stage in like.stages and len(like.stages[stage].shape) == len(tensor.shape)
    }


def _is_same(own: Named, other: Named) -> bool:
    """Whether an attention of one run is that of the other: a size of one may be another there."""
    (found, names), (like, theirs) = own, other
    sizes = ((names.num_heads, theirs.num_heads), (names.num_kv_heads, theirs.num_kv_heads))
    if found.module != like.module or any(size not in (1, instead) for size, instead in sizes):
        return False
    return names.num_heads == 1 or len(found.branches) == len(like.branches)


def pairs_named_after(own: Sequence[ProductPair], others: Sequence[ProductPair]) -> tuple[ProductPair, ...]:
    """The pairs of products of a run with the names of those of another, where these are the same ones."""
    if [(pair.module, pair.form, pair.count) for pair in own] != [(p.module, p.form, p.count) for p in others]:
        return tuple(own)
    return tuple(
        replace(pair, first=_product(pair.first, other.first), second=_product(pair.second, other.second))
        for pair, other in zip(own, others, strict=True)
    )


def _product(own: Product, other: Product) -> Product:
    ranks = [[len(product.shape), *(len(factor.shape) for factor in product.factors)] for product in (own, other)]
    if ranks[0] != ranks[1]:
        return own
    factors = tuple(
        replace(factor, axes=at_size(like.axes, factor.shape, like.shape))
        for factor, like in zip(own.factors, other.factors, strict=True)
    )
    return replace(own, factors=factors, axes=at_size(other.axes, own.shape, other.shape))
