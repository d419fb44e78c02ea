"""Explain tensors of two attentions that have the same rows in another order.

A checkpoint of Meta and one of Hugging Face have the same numbers: the rows of W_q and W_k lie as pairs in one and as
halves in the other. Others pack `[q | k | v]` head by head, or lack the heads that were pruned. What is called
different by place is compared row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...files.attentions import NamedAttention
from ...measure.reorder import Reordering, explain
from ...reports.diff import RowOrder
from ...text import percent

_APART = ("q", "k", "v")
"""The projections that one tensor may pack, in the order in which they are put together."""

Read = Callable[[str], Tensor]
"""Reads a tensor of a file by its name."""


@dataclass(frozen=True)
class Reordered:
    """A tensor of the left, or several, and the tensor of the right that has their rows in another order."""

    names: tuple[str, ...]
    other: str
    part: str
    """What both are: `W_q`, `b_qkv`."""
    order: RowOrder
    is_usual: bool
    """Whether most models have such an order: it shows the number of heads."""


def reordered(
    attention: NamedAttention, other: NamedAttention, left: Read, right: Read, same: Callable[[str, str], bool]
) -> Iterator[Reordered]:
    """Yield the tensors of two attentions that are the same but for the order of their rows or columns.

    Args:
        attention: the attention on the left.
        other: the attention on the right.
        left: reads a tensor of the left.
        right: reads a tensor of the right.
        same: whether two tensors, by name, are known to be the same.
    """
    ours, theirs = _by_part(attention), _by_part(other)
    for part, name in ours.items():
        if part in theirs and not same(name, theirs[part]):
            order = _order(left(name), right(theirs[part]), (attention, other), part)
            if order is not None:
                yield Reordered((name,), theirs[part], part, *order)
    for part, name in theirs.items():
        names = tuple(ours[single] for single in _singles(part) if single in ours)
        if part in ours or len(names) < 2 or len(names) < len(_singles(part)):
            continue
        parts = [left(each) for each in names]
        if len({matrix.shape[1:] for matrix in parts}) == 1:
            order = _order(torch.cat(parts), right(name), (attention, other), part)
            if order is not None:
                yield Reordered(names, name, part, *order)


def _by_part(attention: NamedAttention) -> dict[str, str]:
    """Return the tensor of each part: `{"W_q": "layers.0.attention.wq.weight"}`."""
    return {role.part: name for name, role in attention.roles.items() if role.part}


def _singles(part: str) -> list[str]:
    """Return the parts that a packed one has: `W_qkv` has `W_q`, `W_k` and `W_v`."""
    kind, letters = part.split("_")
    return [f"{kind}_{letter}" for letter in _APART if letter in letters]


def _sizes(attention: NamedAttention, other: NamedAttention, part: str) -> dict[str, int]:
    """Return the sizes by which an order may be named; empty without a number of heads."""
    known = attention.stored if attention.stored.num_heads else other.stored
    if known.num_heads is None or known.head_dim is None:
        return {}
    sizes = {"heads": known.num_heads, "kv_heads": known.num_kv_heads or known.num_heads, "head_dim": known.head_dim}
    return sizes | {"parts": max(1, len(_singles(part)))}


def _order(
    left: Tensor, right: Tensor, sides: tuple[NamedAttention, NamedAttention], part: str
) -> tuple[RowOrder, bool] | None:
    """Return how the right tensor is the left one in another order, and whether it is a usual one.

    None if it is not, or is only transposed.
    """
    attention, other = sides
    found = explain(left, right, _sizes(attention, other, part))
    if found is not None and found.order == tuple(range(len(found.order))) and left.numel() == right.numel():
        return None
    if found is not None:
        return _described(found, left, right, swapped=False)
    if left.numel() < right.numel():
        found = explain(right, left, _sizes(other, attention, part))
    return None if found is None else _described(found, right, left, swapped=True)


def _described(found: Reordering, left: Tensor, right: Tensor, *, swapped: bool) -> tuple[RowOrder, bool]:
    names = found.names
    line = names[0].line("w.T" if found.transposed else "w", found.axis, right.dim()) if names else ""
    kept: Literal["all", "some", "repeated"] = "all"
    if left.numel() != right.numel():
        kept = "some" if left.numel() > right.numel() else "repeated"
    order = RowOrder(
        axis="rows" if found.axis == "rows" else "columns",
        patterns=tuple(named.pattern for named in names),
        meanings=tuple(named.meaning for named in names),
        line="" if swapped else line,
        transposed=found.transposed,
        remaining=found.remaining,
        kept=kept,
        swapped=swapped,
    )
    return order, any(named.is_usual for named in names)


def order_words(order: RowOrder) -> str:
    """Return an order in words.

    `the same rows in another order, (heads two half) -> (heads half two): rotary halves on the left, …`, or for heads
    that are pruned `the right has some of the left's rows, heads 0–1, 3 of 4: without head 2 (pruned)`.
    """
    ours, theirs = ("right", "left") if order.swapped else ("left", "right")
    words = {
        "all": f"the same {order.axis} in another order",
        "some": f"the {theirs} has some of the {ours}'s {order.axis}",
        "repeated": f"the {theirs} has the {ours}'s {order.axis} several times",
    }[order.kept]
    if order.transposed:
        words += ", transposed"
    named = []
    for pattern, meaning in zip(order.patterns, order.meanings, strict=True):
        named.append(f"{pattern}: {meaning}" if meaning else pattern)
    words += f", {', or '.join(named)}" if named else ", which has no name"
    if not order.remaining:
        return words
    return f"nearly {words}; what remains is {percent(order.remaining)} of its size"


def is_reordered(part: str, found: Mapping[str, RowOrder]) -> bool:
    """Return whether the difference of a part, e.g. `W_q`, is the order of the tensor that has it, by its part."""
    kind, letter = part.split("_")
    for packed, order in found.items():
        packed_kind, letters = packed.split("_")
        if packed_kind == kind and letter in letters and not order.remaining:
            return True
    return False
