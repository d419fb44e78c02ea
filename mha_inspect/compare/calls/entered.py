"""The input of the attention differs, e.g. by the positions that are added to it."""

from __future__ import annotations

from ..pair import Difference, Why
from ..turned import tokens_before
from .pair import CallPair, restarts

POSITIONS_FIX = "Count positions from the number of all tokens so far."


def entered(pair: CallPair) -> Why | None:
    """Return where the input of the attention differs, and whether it has the embedding of another position."""
    queries = pair.queries("query", 1)
    if queries is None or queries.is_none:
        return None
    before = f"between attentions {pair.place} and {pair.place + 1}"
    if pair.place == 0:
        before = "before it"
        added = _position_of(pair, queries)
        if added is not None:
            gets = f"Position {pair.start} gets the embedding of position {added}"
            return Why("call", f"{gets}{restarts(added)}.", fix=POSITIONS_FIX)
    first = pair.start + queries.first_unlike(1)
    differs = f"The input of attention {pair.place + 1} differs at position {first}"
    return Why("call", f"{differs}: an operation {before} makes the difference.")


def _position_of(pair: CallPair, queries: Difference) -> int | None:
    """Return the position that the first token of the call has, by its input in the one call; None if unknown.

    The token is put at every position of the one call.
    """
    tokens = tokens_before(pair.left, "query")
    if tokens is None or tokens.length < pair.stop:
        return None
    fits = tokens.positions_of(pair.start, queries.right.select(1, 0), 1, queries.near)
    return fits[0] if fits and pair.start not in fits else None
