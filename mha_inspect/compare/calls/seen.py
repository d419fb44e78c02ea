"""A query of the call sees other keys than in one call over all tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..pair import Difference, Why
from .pair import CallPair, ranges

_TOP_LEFT_FIX = "Align the mask bottom right: triu(diagonal=1 + past), past = keys - queries."


def seen(pair: CallPair) -> Why | None:
    """Return whether a query of the call sees other keys than in the one call."""
    both = pair.seen
    empty = (both.right.any(0) & (pair.tokens < 0)).nonzero().tolist()
    if empty:
        query, row = empty[0]
        position = pair.start + query
        return Why("call", f"Position {position} attends to row {row} of the cache, which has no token.")
    by_token = torch.zeros(*both.right.shape[:2], both.left.shape[2], dtype=torch.bool)
    by_token[..., pair.tokens[pair.filled]] = both.right[..., pair.filled]
    if torch.equal(by_token, both.left):
        return None
    if torch.equal(both.right, torch.ones_like(both.right).tril()):
        return _top_left(pair, keys=both.right.shape[2])
    return _unlike(pair, replace(both, right=by_token))


def _top_left(pair: CallPair, keys: int) -> Why:
    """Return that the first token of the call sees the first key alone."""
    fix = _TOP_LEFT_FIX
    if not pair.right.attention.masks or pair.length == 1:
        fix += " A single query needs no mask."
    queries = "1 query" if pair.length == 1 else f"{pair.length} queries"
    aligned = f"The mask is aligned top left: with {queries} and {keys} keys"
    return Why("call", f"{aligned}, position {pair.start} sees key 0 alone.", fix=fix)


def _unlike(pair: CallPair, both: Difference) -> Why:
    """Return which positions the first query with another mask sees or does not see: `batch query token`."""
    query = int((both.right != both.left).any(2).any(0).nonzero()[0])
    position = pair.start + query
    opened = (both.right & ~both.left).any(0)[query]
    closed = (both.left & ~both.right).any(0)[query]
    if not bool(opened.any()):
        places = ranges(closed.nonzero().flatten())
        return Why("call", f"Position {position} does not see positions {places}, which it sees in one call.")
    are_future = bool(opened[position + 1 :].any())
    what = "future positions" if are_future else "positions"
    places = ranges(opened.nonzero().flatten())
    return Why("call", f"Position {position} sees {what} {places}, which are masked out in one call.")
