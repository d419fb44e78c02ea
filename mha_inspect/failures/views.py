"""Causes in a view that splits a width into heads: `batch sequence (heads head_dim)`, in two dimensions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from .facts import VIEWS, Facts, Operand
from .suspect import Suspect, shared_item
from .tried import Fix, resized

_UNEVEN_AXIS = r"can't divide axis of length (\d+) in chunks of (\d+)"
_MOST_COUNTS = 64
"""The largest number that is listed among those that divide a width."""


@dataclass(frozen=True, eq=False)
class _Split:
    """A view that splits the last dimension in two; one of the numbers may be -1."""

    x: Operand
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """The features that are split."""
        return self.x.shape[-1]


def _viewed(facts: Facts) -> Operand | None:
    """Return the tensor of a view; None for other calls."""
    return facts.operands[0] if facts.base in VIEWS and facts.operands else None


def _split(facts: Facts) -> _Split | None:
    """Return how a view splits the last dimension; None if it changes others too."""
    x, sizes = _viewed(facts), facts.sizes_of_view
    if x is None or not x.shape or len(sizes) != len(x.shape) + 1 or sizes[:-2] != x.shape[:-1]:
        return None
    heads, head_dim = sizes[-2:]
    return _Split(x, heads, head_dim)


def not_contiguous(facts: Facts) -> Suspect | None:
    """Judge a view of a tensor that is transposed, or a slice of a larger one."""
    x = _viewed(facts)
    if x is None or "stride" not in facts.message or x.given.value.is_contiguous():
        return None
    in_order = _split_in_order(x, facts.sizes_of_view)
    if in_order:
        # As a copy the view would run, with the heads in the place of the positions.
        what = f"This view would put parts of one token of {x.name} into different positions of a head."
        return Suspect("not_contiguous", what, (Fix(f"use {in_order}"),))
    how = "is transposed" if _is_transposed(x) else "is a slice of a larger tensor"
    way = "use .contiguous() before .view(...), or .reshape(...) instead"
    return Suspect(
        "not_contiguous",
        f"{x.name} {how}: its elements in memory are not in the order that view() reads.",
        (Fix(way, [(x, lambda tensor: tensor.contiguous())]),),
    )


def _is_transposed(x: Operand) -> bool:
    """Return whether a later dimension lies further apart in memory than one before it."""
    steps = []
    for size, step in zip(x.shape, x.given.value.stride(), strict=True):
        if size > 1:
            steps.append(step)
    return steps != sorted(steps, reverse=True)


def _split_in_order(x: Operand, sizes: tuple[int, ...]) -> str:
    """Return how a view of `batch position features` as `batch heads position head_dim` is written rightly; or nothing.

    As many heads as positions may be either.
    """
    if len(x.shape) != 3 or len(sizes) != 4:
        return ""
    batch, positions, width = x.shape
    heads, head_dim = sizes[1], sizes[3]
    is_of_heads = sizes[2] == positions != heads and sizes[0] in (batch, -1)
    if not is_of_heads or heads < 1 or width % heads or head_dim not in (-1, width // heads):
        return ""
    return f".view({batch}, {positions}, {heads}, {width // heads}).transpose(1, 2)"


def cut_over_ranks(facts: Facts) -> Suspect | None:
    """Judge a view for all heads of a projection of which this rank has a part."""
    split = _split(facts)
    if split is None:
        return None
    x, width, head_dim = split.x, split.width, split.head_dim
    whole = facts.cut.get(width, 0)
    if not whole or (head_dim > 0 and whole % head_dim):
        return None
    way, inside = "divide the number of heads by the number of ranks, or give -1", ""
    if head_dim > 0 and width % head_dim:
        way = f"shard it at whole heads, over {whole // head_dim} ranks or fewer, or keep it whole on every rank"
        inside = f", which cuts through a head of {head_dim}"
    what = f"{x.name} has {width} of {whole} features: its layer is sharded over ranks{inside}."
    return Suspect("cut_over_ranks", what, (Fix(way),))


def heads_do_not_divide(facts: Facts) -> Suspect | None:
    """Judge a number of heads, or their width beside -1, that does not divide the features."""
    split = _split(facts)
    if split is None:
        return None
    width, heads, head_dim = split.width, split.heads, split.head_dim
    if heads == -1:
        return _uneven_heads(width, head_dim) if head_dim > 0 and width % head_dim else None
    if heads <= 0 or width % heads == 0:
        return None
    asked = "" if head_dim == -1 else f"{heads}·{head_dim} = {heads * head_dim}"
    return _uneven(width, heads, asked)


def wrong_head_dim(facts: Facts) -> Suspect | None:
    """Judge heads of another width than the features give; whole heads divide it, or a cause was found before."""
    split = _split(facts)
    if split is None or min(split.heads, split.head_dim) <= 0:
        return None
    x, width, heads, head_dim = split.x, split.width, split.heads, split.head_dim
    needs = heads * head_dim
    return Suspect(
        "wrong_head_dim",
        f"{heads} heads of {head_dim} need {needs} features; {x.name} has {width}.",
        (
            Fix(f"use head_dim {width // heads} ({heads} heads, width {width})"),
            Fix(f"use a projection with out_features {needs}", [(x, resized(-1, needs))]),
        ),
    )


def batch_differs(facts: Facts) -> Suspect | None:
    """Judge `keys.view(batch, -1, heads, head_dim)` with the batch of the queries."""
    x, sizes = _viewed(facts), facts.sizes_of_view
    if x is None or len(sizes) != 4 or len(x.shape) != 3 or sizes[1] != -1 or prod(sizes[2:]) != x.shape[-1]:
        return None
    return Suspect(
        "batch_differs",
        f"{x.name} has batch {x.shape[0]}; the view expects batch {sizes[0]}. "
        "Queries, keys and values need the same batch size.",
        shared_item(x, 0, sizes[0]),
    )


def einops_does_not_divide(facts: Facts) -> Suspect | None:
    """Judge an einops pattern that cannot divide a width evenly."""
    said = re.search(_UNEVEN_AXIS, facts.message)
    if facts.error != "EinopsError" or said is None:
        return None
    return _uneven(int(said[1]), int(said[2]))


def _uneven(width: int, heads: int, asked: str = "") -> Suspect:
    """Return the cause of a width that does not divide by a number of heads; `asked` is what a call asks for."""
    if not asked:
        asked = f"{width} / {heads} = {width / heads:.4g}" if heads else "use at least 1"
    return Suspect(
        "heads_do_not_divide",
        f"Width {width} cannot be split into {heads} heads: {asked}.",
        (Fix(f"use a head count that divides {_divided(width)}"),),
    )


def _uneven_heads(width: int, head_dim: int) -> Suspect:
    """Return the cause of a width that does not divide by the width of a head."""
    return Suspect(
        "heads_do_not_divide",
        f"Width {width} cannot be split into heads of {head_dim}: {width} / {head_dim} = {width / head_dim:.4g}.",
        (Fix(f"use a head_dim that divides {_divided(width)}"),),
    )


def _divided(width: int) -> str:
    """Return a width with the numbers that divide it: `12: 1, 2, 3, 4, 6, 12`."""
    counts = ", ".join(str(count) for count in range(1, min(width, _MOST_COUNTS) + 1) if width % count == 0)
    return f"{width} (up to {_MOST_COUNTS}): {counts}" if width > _MOST_COUNTS else f"{width}: {counts}"
