"""Queries or keys are rotated by the angles of other positions than their own."""

from __future__ import annotations

from torch import Tensor

from ..pair import Why
from ..turned import tokens_before
from .entered import POSITIONS_FIX
from .operands import scores_differ, unlike_keys
from .pair import CallPair, ranges, restarts

_TURNED = 3
"""The number of cached keys whose angles are read."""


def rotated(pair: CallPair) -> Why | None:
    """Return whether the scores differ because queries or keys are rotated by other positions."""
    queries = pair.queries("q_heads", 2)
    if pair.keys is None or queries is None or not scores_differ(pair):
        return None
    cached = [token for token in unlike_keys(pair, pair.keys) if token < pair.start]
    if cached:
        return _keys_turned_twice(pair, cached, pair.keys.right)
    of_query = _counted_positions(pair) or _angle(pair, "q_heads", queries.right[:, :, 0])
    rows = (pair.tokens == pair.start).nonzero().flatten().tolist()
    if of_query is not None or not rows:
        return of_query
    return _angle(pair, "k_heads", pair.keys.right[:, :, rows[0]])


def _counted_positions(pair: CallPair) -> Why | None:
    """Return whether the tokens of the call are rotated by other positions than their own."""
    position, expected = pair.right.steps.position, pair.left.steps.position
    if position is None or expected is None:
        return None
    offset = position.query_offset
    if offset is None or expected.query_offset is None:
        return None
    right = expected.query_offset + pair.start
    if offset == right:
        return None
    rows = len(pair.tokens) - pair.length
    if offset == rows + expected.query_offset and rows < pair.start:
        return Why(
            "call",
            f"Position {right} is rotated as position {offset}: positions count the {rows} rows that the cache "
            f"keeps, instead of all {pair.start} tokens so far.",
            fix="Count all tokens so far, instead of the rows that the cache keeps.",
        )
    return Why("call", f"Position {right} is rotated as position {offset}{restarts(offset)}.", fix=POSITIONS_FIX)


def _angle(pair: CallPair, stage: str, numbers: Tensor) -> Why | None:
    """Return whether the first token of the call is rotated by the angle of another position, e.g. of an earlier call.

    `numbers` are its query or its key, `batch heads head_dim`.
    """
    fits = _positions_of_angle(pair, stage, pair.start, numbers)
    if len(fits) != 1 or fits[0] == pair.start:
        return None
    subject = f"Position {pair.start}"
    if stage == "k_heads":
        subject = f"The key of position {pair.start}"
    sentence = f"{subject} is rotated by the angle of position {fits[0]}{restarts(fits[0])}."
    return Why("call", sentence, fix=POSITIONS_FIX)


def _keys_turned_twice(pair: CallPair, cached: list[int], keys: Tensor) -> Why | None:
    """Return whether cached keys are rotated a second time; `keys` are those of the call, by row.

    Two turns by the angle of a position are one by the angle of twice that position.
    """
    rows = {int(token): row for row, token in enumerate(pair.tokens)}
    # Position 0 has the angle 0, also twice, and twice a late position is after the last token.
    readable = [token for token in cached if token and 2 * token < pair.stop]
    if not readable:
        return None
    for token in readable[:_TURNED]:
        if _positions_of_angle(pair, "k_heads", token, keys[:, :, rows[token]]) != [2 * token]:
            return None
    return Why(
        "call",
        f"The cached keys of positions {ranges(cached)} are rotated a second time: that of position {readable[0]} "
        f"has the angle of position {2 * readable[0]}.",
        fix="Rotate the new keys alone before they are joined with the cache, or cache keys that are not rotated.",
    )


def _positions_of_angle(pair: CallPair, stage: str, token: int, numbers: Tensor) -> list[int]:
    """Return the positions of the one call at which a projected token has these numbers, `batch heads head_dim`."""
    tokens = tokens_before(pair.left, stage)
    if tokens is None or tokens.length < pair.stop:
        return []
    return tokens.positions_of(token, numbers, 2)
