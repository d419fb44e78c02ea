"""The scores differ: by queries, by new or cached keys, or by the scale."""

from __future__ import annotations

from dataclasses import replace

from ..forms import FOR_ALL, form_of
from ..pair import Difference, Why, are_near
from .pair import CallPair, ranges

_SAME_SCALE = 1e-3
"""Scales whose ratio is this close to 1 are the same."""


def operands(pair: CallPair) -> Why | None:
    """Return whether the scores differ where both runs attend, and which of queries and keys make them differ."""
    if not scores_differ(pair):
        return None
    queries = pair.queries("q_heads", 2)
    if pair.keys is None or queries is None:
        return Why("call", "The scores differ from those of one call.")
    unlike = unlike_keys(pair, pair.keys)
    cached = [token for token in unlike if token < pair.start]
    if cached:
        which = "cached keys" if cached == unlike else "keys"
        differ = f"The {which} of positions {ranges(unlike)} differ from those of one call."
        return Why("call", f"{differ}{tried(pair, 'k_heads')}")
    sides = []
    if not queries.is_none:
        sides.append("queries")
    if unlike:
        sides.append("keys")
    if not sides:
        return _unlike_scale(pair)
    differ = f"The {' and the '.join(sides)} of the new position {pair.start} differ from those of one call."
    return Why("call", f"{differ}{tried(pair, 'q_heads' if 'queries' in sides else 'k_heads')}")


def scores_differ(pair: CallPair) -> bool:
    """Return whether the scores differ where both runs attend."""
    scores = pair.of_rows("scores")
    if scores is None:
        return False
    seen = pair.seen_in_both[:, None].expand_as(scores.left)
    return not scores.among(seen).is_none


def unlike_keys(pair: CallPair, keys: Difference) -> list[int]:
    """Return the tokens that both runs attend to, and whose keys differ."""
    are_read = pair.seen_in_both.any(1).any(0)
    unlike = []
    for row in pair.filled[are_read].tolist():
        token = int(pair.tokens[row])
        if not are_near(keys.left[:, :, token], keys.right[:, :, row], keys.near):
            unlike.append(token)
    return unlike


def _unlike_scale(pair: CallPair) -> Why:
    """Return how scores of equal queries and keys differ: by their scale, or it is not known how."""
    expected = pair.left.attention.scale
    scale = pair.right.attention.scale
    if expected and scale and abs(expected / scale - 1) > _SAME_SCALE:
        return Why("call", f"The scores are scaled by {scale:.4g}, and in one call by {expected:.4g}.")
    return Why("call", "The scores differ from those of one call, although queries and keys are equal.")


def tried(pair: CallPair, stage: str) -> str:
    """Return, as a further sentence, the change that makes a stage of this call that of one call; empty if none."""
    both = pair.alike(stage, 2)
    if both is None:
        return ""
    for part in _parts_to_try(pair, both):
        form = None if part.is_none else form_of(part, FOR_ALL)
        if form is not None:
            return f" {form.sentence}"
    return ""


def _parts_to_try(pair: CallPair, both: Difference) -> list[Difference]:
    """Return what may be changed alike in a stage, `batch heads position head_dim`.

    Of queries, and of keys without a cache, it is the whole stage. Of keys and values that are a row for each token so
    far, it is all of them, then the cached ones and the new ones.
    """
    start, stop = pair.start, pair.stop
    positions = both.right.shape[2]
    if both.left.shape[2] < stop:
        return []
    if positions == pair.length:
        own = both.left[:, :, start:stop]
        return [replace(both, left=own)]
    if positions != stop:
        return []
    so_far = both.left[:, :, :stop]
    every = replace(both, left=so_far)
    cached = every.of_both(lambda tensor: tensor[:, :, :start])
    new = every.of_both(lambda tensor: tensor[:, :, start:])
    return [every, cached, new]
