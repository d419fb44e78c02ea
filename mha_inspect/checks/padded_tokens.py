"""Which tokens of a run are padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..compare.replay import Recorded
from .arguments import Source
from .factors import first_key
from .intent import Intent
from .sight import sights_of


def hidden_tokens(recorded: Recorded, source: Source, values: Mapping[str, Any], intent: Intent) -> Tensor | None:
    """Return the tokens, `batch position`, that an argument marks and no other query sees; None if none are.

    `values` are the arguments by name.
    """
    declared = _declared_padding(source, values, intent)
    marked = list(marked_tokens(source, values))
    if declared is None and not marked:
        return None
    seen = _seen_without_padding(recorded, source)
    return _first_hidden(marked, seen) if declared is None else _unseen(declared, seen)


def dropped_tokens(output: Tensor, marked: Iterator[Tensor]) -> Tensor | None:
    """Return the marked tokens that nested tensors leave out: all of them, and no others, have one output.

    `output` is `batch position ...`, and the tokens are `batch position`. None if none are.
    """
    for pads in marked:
        if not bool(pads.any()):
            continue
        filled = output[pads][0]
        if torch.equal((output == filled).flatten(2).all(2), pads):
            return pads
    return None


def _seen_without_padding(recorded: Recorded, source: Source) -> list[Tensor]:
    """Return who sees whom in each attention over all tokens, `batch query key`, where no token is padding."""
    shape = (source.rows, source.length, source.length)
    seen = []
    for sight in sights_of(recorded, partial(first_key, recorded)):
        if sight.seen.shape == shape:
            seen.append(sight.seen)
    return seen


def _declared_padding(source: Source, values: Mapping[str, Any], intent: Intent) -> Tensor | None:
    """Return the tokens, `batch position`, that a declared mask marks as padding; None without such a mask."""
    mask = values.get(intent.padding or "")
    means = intent.padding_true
    if not means or not isinstance(mask, Tensor):
        return None
    if mask.shape != (source.rows, source.length):
        return None
    is_set = mask != 0
    is_boolean = mask.dtype == torch.bool or bool((~is_set | (mask == 1)).all())
    if not is_boolean:
        return None
    return is_set.cpu() if means == "ignore" else ~is_set.cpu()


def marked_tokens(source: Source, values: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tokens, `batch position`, with one of the two values of an argument."""
    shape = (source.rows, source.length)
    for name, value in values.items():
        if name in source.names or not isinstance(value, Tensor):
            continue
        if value.numel() != prod(shape) or value.is_complex():
            continue
        marks = torch.unique(value)
        if len(marks) != 2:
            continue
        for mark in marks:
            yield (value == mark).reshape(shape).cpu()


def _leaves_tokens(pads: Tensor) -> bool:
    """Return whether the first batch item has a token that is no padding, of `batch position`."""
    return not bool(pads[0].all())


def _unseen(pads: Tensor, seen: Sequence[Tensor]) -> Tensor | None:
    """Return padding, `batch position`, if no other token sees it in any attention; None if it is seen, or unknown."""
    if not seen or any(_sees_padding(pairs, pads) for pairs in seen):
        return None
    return pads


def _first_hidden(candidates: Sequence[Tensor], seen: Sequence[Tensor]) -> Tensor | None:
    """Return the first tokens, `batch position`, that every attention hides from all others; None without such."""
    if not seen:
        return None
    for pads in candidates:
        if _leaves_tokens(pads) and all(_hides(pairs, pads) for pairs in seen):
            return pads
    return None


def _sees_padding(seen: Tensor, pads: Tensor) -> bool:
    """Return whether a token that is no padding sees padding: `batch query key` and `batch position`."""
    return bool((seen & _real_with_padding(pads)).any())


def _real_with_padding(pads: Tensor) -> Tensor:
    """Return `batch query key` from `batch position`: True for a query that is no padding and a key that is."""
    return ~pads[:, :, None] & pads[:, None]


def _hides(seen: Tensor, pads: Tensor) -> bool:
    """Return whether no token that is no padding sees padding, and not because of the order of tokens alone.

    If the other tokens see nothing at all, e.g. because the marks are turned round, nothing is hidden from them. If
    the marked tokens see each other and no other token, they are a document of their own.
    """
    is_real = ~pads[:, :, None]  # batch query 1
    if not bool((seen & is_real).any()) or _sees_padding(seen, pads):
        return False
    sees_marked = bool((seen & pads[:, :, None] & pads[:, None]).any())
    sees_others = bool((seen & pads[:, :, None] & ~pads[:, None]).any())
    if sees_marked and not sees_others:
        return False
    past = torch.ones(seen.shape[1:], dtype=torch.bool).tril(-1)
    hidden = _real_with_padding(pads)
    if not bool((seen & past.mT).any()):
        # No token sees a later one: padding after a token is hidden without a mask of padding.
        hidden = hidden & past
    if bool(hidden.any()):
        return True
    of_past = pads[:, None] & past  # padding before a query, which may be padding too
    return bool(of_past.any()) and not bool((seen & of_past).any())
