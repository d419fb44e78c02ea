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
    attended = pair.seen_in_both[:, None].expand_as(masked.left).to(masked.left.device)
    seen_in_both = masked.among(attended)
    if seen_in_both.is_none:
        return None
    ours, theirs = masked.left - scores.left, masked.right - scores.right
    apart = (theirs - ours).abs().masked_fill(~attended, 0.0)
    differs = (apart > seen_in_both.near).any(3).any(1).any(0).nonzero().flatten().tolist()
    if not differs:
        return None  # the scores differ, and what is added to them does not
    query = differs[0]
    of_query = apart[:, :, query]
    batch, head, row = (int(place) for place in (of_query > 0.999 * of_query.max()).nonzero()[0])
    key = int(pair.tokens[pair.filled][row])
    like = _position_of(pair, theirs[:, :, query])
    more = "" if like is None else f", as for a query at position {like}"
    added, expected = (_written(side[batch, head, query, row]) for side in (theirs, ours))
    return Why(
        "call",
        f"The keys are equal, and the bias differs: position {pair.start + query} adds {added} to the score of key "
        f"{key}{more}; expected {expected}.",
        fix="Count the positions of the queries in the bias from the number of all tokens so far.",
    )


def _position_of(pair: CallPair, added: Tensor) -> int | None:
    """Return the only position of the one call whose bias is this, `batch heads row`; None if not exactly one."""
    masked, scores, weights = (pair.left.stage(stage) for stage in ("masked_scores", "scores", "weights"))
    if masked is None or scores is None or weights is None:
        return None
    tokens = pair.tokens[pair.filled]
    seen = sees(weights, masked)[:, :, tokens].to(added.device)
    whole = (masked - scores)[:, :, :, tokens]
    near = tolerance(scores)
    fits = []
    for position in range(whole.shape[2]):
        is_seen = seen[:, position][:, None].expand_as(added)
        apart = (whole[:, :, position] - added).abs().masked_fill(~is_seen, 0.0)
        if bool(is_seen.any()) and float(apart.max()) <= near:
            fits.append(position)
    return fits[0] if len(fits) == 1 else None


def _written(number: Tensor) -> str:
    """Return a number that is added to a score."""
    rounded = round(float(number), 5)
    return small(rounded) if rounded else "0"
