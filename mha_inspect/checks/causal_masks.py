"""Judge who sees whom against what was declared: causal, or a window."""

from __future__ import annotations

from torch import Tensor

from ..reports.check import Finding
from .seen_keys import SeenKeys


def against_causal(sight: SeenKeys, window: int | None) -> Finding | None:
    """Return a finding if the attention is not causal, within a window if one is given; else None."""
    if sight.queries > sight.keys or not bool(sight.pairs.any()):
        return None
    if sight.over_heads:
        return _laid_over(sight)
    if sight.is_top_left:
        return _aligned_top_left(sight)
    if sight.sees_future and sight.queries > 1:  # after the slot of one token, a ring has older ones
        return _future_seen(sight)
    if bool(sight.hides_itself.any()):
        return _hides_itself(sight)
    missed = sight.visible & ~sight.pairs & (sight.distance > 0)
    # A sliding window is causal too; with --window its width is checked.
    if window is not None or not bool(missed.any()):
        return None
    if sight.is_regular and not sight.alone:
        return None
    if sight.is_by_distance:  # strides and sinks are meant
        return None
    if sight.is_causal_in_groups:  # packed documents see their own past alone
        return None
    return _past_missed(sight, missed)


def _laid_over(sight: SeenKeys) -> Finding:
    return sight.finding(
        "causal",
        "The causal mask is applied along the heads instead of the queries.",
        "All queries see the same keys, while the heads see different keys.",
        "Give it the axes of the scores: mask[None, None, :, :] for batch heads query key.",
    )


def _aligned_top_left(sight: SeenKeys) -> Finding:
    return sight.finding(
        "causal",
        "The causal mask is aligned top left: queries see the oldest keys of the cache instead of their own.",
        f"Query 0 is the token of key {sight.first}, and sees key 0 alone.",
        "Align the mask bottom right: triu(diagonal=1 + past), past = keys - queries.",
    )


def _future_seen(sight: SeenKeys) -> Finding:
    future = sight.pairs & (sight.distance < 0)
    next_tokens = (sight.distance == -1) & sight.visible
    sees_past = bool((sight.pairs & (sight.distance > 0)).any())
    if bool((future == next_tokens).all()):
        sentence = "Each position can see one future token: the causal mask starts one diagonal too late."
    elif not sees_past or sight.almost_causal == "inverted":
        sentence = "Positions can see future tokens instead of their past: the mask is inverted."
    else:
        sentence = "Positions can see future tokens."
    return sight.finding(
        "causal",
        sentence,
        f"{_first_pair(sight, future, 'weight')}; {int(future.sum())} of {int((sight.distance < 0).sum())} such pairs.",
        "Mask out triu(diagonal=1).",
    )


def _hides_itself(sight: SeenKeys) -> Finding:
    past = " + past" if sight.queries < sight.keys else ""
    # A query with every key masked out by a finite number gives weight to all of them.
    weightless = sight.zeros.flatten(0, 1).all(0) & (sight.distance == 0)
    if not bool(weightless.any()):
        return _sees_nothing(sight)
    queries = weightless.any(1).nonzero().flatten().tolist()
    return sight.finding(
        "causal",
        "A position cannot see itself: the mask includes the diagonal.",
        f"{len(queries)} of {sight.queries} queries give no weight to their own key; the first is query {queries[0]}.",
        f"Mask out triu(diagonal=1{past}) instead of diagonal=0{past}.",
    )


def _sees_nothing(sight: SeenKeys) -> Finding:
    """Return the fault of queries that do not see themselves, and give weight to their own key for all that."""
    queries = sight.hides_itself.any(1).nonzero().flatten().tolist()
    return sight.finding(
        "causal",
        "A query has every key masked out, its own too.",
        f"{len(queries)} of {sight.queries} queries; the first is query {queries[0]}.",
        "Leave each query its own key.",
    )


def _past_missed(sight: SeenKeys, missed: Tensor) -> Finding:
    query, key = missed.nonzero()[0].tolist()
    evidence = f"Query {query} gives no weight to key {key}; {int(missed.sum())} past pairs have no weight."
    return sight.finding("causal", "A position cannot see all of its past.", evidence)


def against_window(sight: SeenKeys, width: int, causal: bool | None) -> Finding | None:
    """Return a finding if the attention does not fit a window of this width; else None."""
    if sight.keys <= width or sight.queries < 2:
        return None
    # A two-sided window n may mean 2 · n + 1 positions, n to each side.
    both_sides = causal is not True and sight.sees_future
    distance = sight.distance.abs() if both_sides else sight.distance
    beyond = sight.pairs & (distance >= width)
    if bool(beyond.any()):
        far = int(sight.distance[sight.pairs].max()) + 1
        sentence = f"A position sees {far} positions, including its own; expected a window of {width}."
        return sight.finding("window", sentence, f"{_first_pair(sight, beyond, 'weight')}.")
    if causal is False or sight.sees_future:
        return None
    missing = (sight.distance >= 0) & (sight.distance < width) & sight.visible & ~sight.pairs
    if not bool(missing.any()):
        return None
    sentence = f"A position cannot see all of its window of {width}."
    return sight.finding("window", sentence, f"{_first_pair(sight, missing, 'no weight')}.")


def _first_pair(sight: SeenKeys, marks: Tensor, what: str) -> str:
    """Return the first marked pair in words: `Query 3 gives weight to key 5, 2 after it`."""
    query, key = marks.nonzero()[0].tolist()
    distance = int(sight.distance[query, key])
    if distance > 0:
        place = f"{distance} before it"
    elif distance < 0:
        place = f"{-distance} after it"
    else:
        place = "its own"
    return f"Query {query} gives {what} to key {key}, {place}"
