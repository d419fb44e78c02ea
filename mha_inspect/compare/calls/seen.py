"""A query of the call sees other keys than in one call over all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pair import Why
from .pair import CallPair, ranges

_TOP_LEFT_FIX = "Align the mask bottom right: triu(diagonal=1 + past), past = keys - queries."


def seen(pair: CallPair) -> Why | None:
    """Return whether a query of the call sees other keys than in the one call."""
    both = pair.seen
    whole, call = both.left, both.right
    empty = (call.any(0) & (pair.tokens < 0)).nonzero().tolist()
    if empty:
        query, row = empty[0]
        position = pair.start + query
        return Why("call", f"Position {position} attends to row {row} of the cache, which has no token.")
    by_token = torch.zeros(*call.shape[:2], whole.shape[2], dtype=torch.bool)
    by_token[..., pair.tokens[pair.filled]] = call[..., pair.filled]
    if torch.equal(by_token, whole):
        return None
    first_key_alone = torch.ones_like(call).tril()
    if torch.equal(call, first_key_alone):
        return _top_left(pair, keys=call.shape[2])
    return _unlike(pair, whole, by_token)


def _top_left(pair: CallPair, keys: int) -> Why:
    """Return that the first token of the call sees the first key alone."""
    fix = _TOP_LEFT_FIX
    if not pair.right.attention.masks or pair.length == 1:
        fix += " A single query needs no mask."
    queries = "1 query" if pair.length == 1 else f"{pair.length} queries"
    aligned = f"The mask is aligned top left: with {queries} and {keys} keys"
    return Why("call", f"{aligned}, position {pair.start} sees key 0 alone.", fix=fix)


def _unlike(pair: CallPair, whole: Tensor, call: Tensor) -> Why:
    """Return which positions the first query with another mask sees or does not see: `batch query token`."""
    by_query = (call != whole).any(2).any(0)
    query = int(by_query.nonzero()[0])
    position = pair.start + query
    opened = (call & ~whole).any(0)[query]
    closed = (whole & ~call).any(0)[query]
    if not bool(opened.any()):
        places = _positions(closed)
        return Why("call", f"Position {position} does not see {places}, which it sees in one call.")
    later = opened[position + 1 :]
    when = "future " if bool(later.any()) else ""
    verb = "is" if int(opened.sum()) == 1 else "are"
    sentence = f"Position {position} sees {when}{_positions(opened)}, which {verb} masked out in one call."
    return Why("call", sentence)


def _positions(marks: Tensor) -> str:
    """Return the marked positions: `position 3`, `positions 3–5`."""
    places = marks.nonzero().flatten()
    word = "position" if len(places) == 1 else "positions"
    return f"{word} {ranges(places)}"
