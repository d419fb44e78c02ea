"""The names of a run in which a size is one, from a run of the same forward in which none is.

A dimension of size one leaves no trace in a view: what it is shows where it has another size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..graph.attention import Attention
from ..reports.trace import Product, ProductPair
from .axes import AxisNames

Named = tuple[Attention, AxisNames]


def at_size(pattern: str, shape: tuple[int, ...], kept: tuple[int, ...] = ()) -> str:
    """A pattern with the sizes of this shape: a number in it is a size of the run that it was read off.

    A dimension of which only a part has a name is a number as a whole, but for one that has the size that is `kept`.
    """
    dims = re.findall(r"\([^)]*\)|\S+", pattern)
    told = zip(dims, shape, kept or (0,) * len(shape), strict=True)
    return " ".join(str(size) if re.search(r"\b\d", dim) and size != same else dim for dim, size, same in told)


def stages_at_size(found: Attention, other: Named, *, others_are_kept: bool = False) -> dict[str, str]:
    """The axes of those stages of an attention that another one has as well, with as many dimensions.

    With `others_are_kept`, sizes that are the same in both are so for a reason.
    """
    like, names = other
    return {
        stage: at_size(names.of_stage(stage), tensor.shape, like.stages[stage].shape if others_are_kept else ())
        for stage, tensor in found.stages.items()
        if stage in like.stages and len(like.stages[stage].shape) == len(tensor.shape)
    }


def named_after(own: Sequence[Named], others: Sequence[Named]) -> tuple[Named, ...]:
    """The attentions of a run with the names of those of another, where these are the same ones."""
    if len(own) != len(others) or not all(map(_is_same, own, others)):
        return tuple(own)
    return tuple(
        (found, names.taking(stages_at_size(found, other, others_are_kept=True)))
        for (found, names), other in zip(own, others, strict=True)
    )


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
