"""What is added to the score of a key differs, where both calls attend to it."""

from __future__ import annotations

from torch import Tensor

from ...naming.visibility import sees
from ...text import small
from ..pair import Why, tolerance
from .pair import CallPair


def bias(pair: CallPair) -> Why | None:
    """Return whether what is added to the scores differs where both runs attend."""
    masked, scores = pair.of_rows("masked_scores"), pair.of_rows("scores")
    if masked is None or scores is None:
        return None
    attended = pair.seen_in_both[:, None].expand_as(masked.left)
    attended = attended.to(masked.left.device)
    seen_in_both = masked.among(attended)
    if seen_in_both.is_none:
        return None
    expected = masked.left - scores.left
    added = masked.right - scores.right
    apart = (added - expected).abs().masked_fill(~attended, 0.0)
    by_query = apart.amax((0, 1, 3))
    differs = (by_query > seen_in_both.near).nonzero().flatten().tolist()
    if not differs:
        return None  # the scores differ, and what is added to them does not
    query = differs[0]
    of_query = apart[:, :, query]
    largest = (of_query > 0.999 * of_query.max()).nonzero()[0]
    batch, head, row = largest.tolist()
    key = int(pair.tokens[pair.filled][row])
    place = batch, head, query, row
    like = _position_of(pair, added[:, :, query])
    more = "" if like is None else f", as for a query at position {like}"
    return Why(
        "call",
        f"The keys are equal, and the bias differs: position {pair.start + query} adds {_written(added[place])} to the "
        f"score of key {key}{more}; expected {_written(expected[place])}.",
        fix="Count the positions of the queries in the bias from the number of all tokens so far.",
    )


def _position_of(pair: CallPair, added: Tensor) -> int | None:
    """Return the only position of the one call whose bias is this, `batch heads row`; None if not exactly one."""
    masked = pair.left.stage("masked_scores")
    scores = pair.left.stage("scores")
    weights = pair.left.stage("weights")
    if masked is None or scores is None or weights is None:
        return None
    tokens = pair.tokens[pair.filled]
    seen = sees(weights, masked)[:, :, tokens].to(added.device)
    whole = (masked - scores)[:, :, :, tokens]
    near = tolerance(scores)
    fits = []
    for position in range(whole.shape[2]):
        hidden = ~seen[:, None, position].expand_as(added)
        apart = (whole[:, :, position] - added).abs()
        apart = apart.masked_fill(hidden, 0.0)
        if not bool(hidden.all()) and float(apart.max()) <= near:
            fits.append(position)
    return fits[0] if len(fits) == 1 else None


def _written(number: Tensor) -> str:
    """Return a number that is added to a score."""
    rounded = round(float(number), 5)
    return small(rounded) if rounded else "0"
