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

from ..files.attentions import NamedAttention
from ..measure.reorder import Reordering, explain
from ..reports.diff import RowOrder
from ..text import percent
from .two_files import AttentionPair, TwoFiles

_APART = ("q", "k", "v")
"""The projections that one tensor may pack, in the order in which they are put together."""


@dataclass(frozen=True)
class Reordered:
    """A tensor of the left, or several, and the tensor of the right that has their rows in another order."""

    names: tuple[str, ...]
    right_name: str
    part: str
    """What both are: `W_q`, `b_qkv`."""
    order: RowOrder
    is_usual: bool
    """Whether most models have such an order: it shows the number of heads."""


def reordered(pair: AttentionPair, files: TwoFiles, is_same: Callable[[str, str], bool]) -> Iterator[Reordered]:
    """Yield the tensors of two attentions that are the same but for the order of their rows or columns.

    `is_same` says of two tensors, by their names on the left and on the right, that they need no comparison.
    """
    left = _by_part(pair.left)
    right = _by_part(pair.right)
    for part, name in left.items():
        if part not in right or is_same(name, right[part]):
            continue
        yield from _reordered((name,), right[part], part, pair, files)
    for part, right_name in right.items():
        if part in left:
            continue
        names = tuple(left[single] for single in _singles(part) if single in left)
        if len(names) > 1 and len(names) == len(_singles(part)):
            yield from _reordered(names, right_name, part, pair, files)


def _by_part(attention: NamedAttention) -> dict[str, str]:
    """Return the tensor of each part: `{"W_q": "layers.0.attention.wq.weight"}`."""
    names = {}
    for name, role in attention.roles.items():
        if role.part:
            names[role.part] = name
    return names


def _singles(part: str) -> list[str]:
    """Return the parts that a packed one has: `W_qkv` has `W_q`, `W_k` and `W_v`."""
    kind, letters = part.split("_")
    return [f"{kind}_{letter}" for letter in _APART if letter in letters]


def _reordered(
    names: tuple[str, ...], right_name: str, part: str, pair: AttentionPair, files: TwoFiles
) -> Iterator[Reordered]:
    """Yield how a tensor of the right is a tensor of the left, or several one after the other, in another order.

    Nothing if it is not, or is only transposed. A right tensor with more rows may have those of the left in it.
    """
    tensors = [files.left.read(name) for name in names]
    shapes = {tensor.shape[1:] for tensor in tensors}
    if len(shapes) > 1:
        return
    left = tensors[0]
    if len(tensors) > 1:
        left = torch.cat(tensors)
    right = files.right.read(right_name)
    found = explain(left, right, _sizes(pair.left, pair.right, part))
    swapped = found is None and left.numel() < right.numel()
    if swapped:
        left, right = right, left
        found = explain(left, right, _sizes(pair.right, pair.left, part))
    if found is None:
        return
    is_in_order = found.order == tuple(range(len(found.order)))
    if is_in_order and left.numel() == right.numel():
        return
    order = _described(found, left, right, swapped=swapped)
    is_usual = any(named.is_usual for named in found.names)
    yield Reordered(names, right_name, part, order, is_usual)


def _sizes(attention: NamedAttention, beside: NamedAttention, part: str) -> dict[str, int]:
    """Return the sizes by which an order may be named, from the attention beside if it alone has a number of heads.

    Empty without a number of heads.
    """
    stored = attention.stored if attention.stored.num_heads else beside.stored
    if stored.num_heads is None or stored.head_dim is None:
        return {}
    return {
        "heads": stored.num_heads,
        "kv_heads": stored.num_kv_heads or stored.num_heads,
        "head_dim": stored.head_dim,
        "parts": max(1, len(_singles(part))),
    }


def _described(reordering: Reordering, left: Tensor, right: Tensor, *, swapped: bool) -> RowOrder:
    """Return an order as reports have it; `swapped` if the left tensor of it is that of the right file."""
    names = reordering.names
    line = ""
    if names and not swapped:
        weight = "w.T" if reordering.transposed else "w"
        line = names[0].line(weight, reordering.axis)
    kept: Literal["all", "some", "repeated"] = "all"
    if left.numel() > right.numel():
        kept = "some"
    elif left.numel() < right.numel():
        kept = "repeated"
    return RowOrder(
        axis="rows" if reordering.axis == "rows" else "columns",
        patterns=tuple(named.pattern for named in names),
        meanings=tuple(named.meaning for named in names),
        line=line,
        transposed=reordering.transposed,
        remaining=reordering.remaining,
        kept=kept,
        swapped=swapped,
    )


def order_words(order: RowOrder) -> str:
    """Return an order in words.

    `the same rows in another order, (heads two half) -> (heads half two): rotary halves on the left, …`, or for heads
    that are pruned `the right has some of the left's rows, heads 0–1, 3 of 4: without head 2 (pruned)`.
    """
    source, result = "left", "right"
    if order.swapped:
        source, result = "right", "left"
    if order.kept == "all":
        words = f"the same {order.axis} in another order"
    elif order.kept == "some":
        words = f"the {result} has some of the {source}'s {order.axis}"
    else:
        words = f"the {result} has the {source}'s {order.axis} several times"
    if order.transposed:
        words += ", transposed"
    words += f", {_names_of(order)}"
    if not order.remaining:
        return words
    return f"nearly {words}; what remains is {percent(order.remaining)} of its size"


def _names_of(order: RowOrder) -> str:
    """Return the patterns that an order may be, with their meanings: `(heads two half) -> (heads half two): …`."""
    if not order.patterns:
        return "which has no name"
    named = []
    for pattern, meaning in zip(order.patterns, order.meanings, strict=True):
        if meaning:
            named.append(f"{pattern}: {meaning}")
        else:
            named.append(pattern)
    return ", or ".join(named)


def is_reordered(part: str, orders: Mapping[str, RowOrder]) -> bool:
    """Return whether a part, e.g. `W_q`, is in a tensor that differs in its order alone. `orders` is by part."""
    kind, letter = part.split("_")
    for packed, order in orders.items():
        packed_kind, letters = packed.split("_")
        if packed_kind == kind and letter in letters and not order.remaining:
            return True
    return False
