"""Why two sides differ after the same scores: in the keys that a query sees, or in a bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose, isfinite

import torch
from torch import Tensor

from ...measure.slopes import NEAR, rises_with_distance, slopes_in
from ...naming.visibility import sees_by_head
from ...text import listed, plural, small, spans
from ..pair import Difference, Pair, Side, Where, Why

_AFTER_SCORES = ("masked_scores", "weights")
_LOWERED = 1e-3
"""What a mask takes from a score at least; less may be rounding."""
_MASKED_OUT = 1e4
"""A score that is lowered by this gets no weight in any dtype."""
_HEADS = 8
"""The most slopes to list."""
_OF_BIASES = ("add", "fill", "times", "scale")
"""Steps from the scores to the softmax that mask, scale, or add a bias."""


def mask(pair: Pair, difference: Difference) -> Why | None:
    """Return how the masks differ, where the scores are the same and the masked scores or weights are not."""
    if difference.stage not in _AFTER_SCORES:
        return None
    sentence = visible_pairs(pair)
    if sentence:
        return Why("mask", sentence, is_all=_is_of_sight_alone(pair, difference))
    if not _changes_scores(pair.left) and not _changes_scores(pair.right):
        sentence = _of_slopes(pair) or _of_biases(pair) or _of_lowered_scores(pair)
    return Why("mask", sentence) if sentence else None


def _is_of_sight_alone(pair: Pair, difference: Difference) -> bool:
    """Return whether scores and weights are those of the other side where both sides see a key."""
    left, right = difference.left, difference.right
    both = _seen_by_both(pair)
    if both is None or left.shape[-2:] != both.shape:
        return False
    both = both.to(left.device).expand_as(left)
    if difference.stage != "masked_scores":
        # Fewer keys share the same sum.
        return difference.is_factor_of_rows(both)
    hidden = ~both | ~left.isfinite() | ~right.isfinite()
    return difference.of_both(lambda scores: scores.masked_fill(hidden, 0.0)).is_none


def _seen_by_both(pair: Pair) -> Tensor | None:
    """Return `query key`: True for the keys that a query sees on both sides; None if it is unknown."""
    ours, theirs = pair.left.seen, pair.right.seen
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    return ours & theirs


def _changes_scores(side: Side) -> bool:
    """Return whether a function changes the scores, e.g. a soft cap: the rest is then no bias alone."""
    return any(step not in _OF_BIASES for step, _ in side.attention.scoring)


# -- visible keys -----------------------------------------------------------------------------------------------------


def visible_pairs(pair: Pair) -> str:
    """Return which pairs of a query and a key only one side sees; empty if both see the same, or it is unknown."""
    ours, theirs, where = pair.left.seen, pair.right.seen, pair.where
    if ours is None or theirs is None:
        return ""
    if ours.shape != theirs.shape or torch.equal(ours, theirs):
        return ""
    apart = ours != theirs
    query = int(apart.any(1).nonzero()[0])
    return (
        f"The masks differ in {int(apart.sum()):,} of {plural(apart.numel(), 'pair')} of a query and a key: query "
        f"{query} sees {_keys(ours[query])} {where.left} and {_keys(theirs[query])} {where.right}."
    )


def _keys(seen: Tensor) -> str:
    """Return the keys that a query sees in words: `keys 0–3`."""
    places = seen.nonzero().flatten().tolist()
    if not places:
        return "no key"
    word = "key" if len(places) == 1 else "keys"
    return f"{word} {spans(places)}"


# -- biases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Biased:
    """Scores with a bias, `batch heads query key`."""

    scores: Tensor
    """The scores without it."""
    masked: Tensor
    """The scores with it."""
    seen: Tensor
    """True for the keys that a query sees."""

    @property
    def slopes(self) -> Sequence[float]:
        """The slope of each head by the position of the key; empty if the bias is not linear in it."""
        return slopes_in(self.scores, self.masked, self.seen)

    @property
    def rises_with_distance(self) -> bool:
        """Whether keys far from their query get higher scores."""
        return rises_with_distance(self.scores, self.masked, self.seen)

    @property
    def bias(self) -> Tensor:
        """The bias; 0 where a query does not see a key."""
        added = self.masked.double() - self.scores.double()
        return added.masked_fill(~self.seen, 0.0)


def _biased(side: Side) -> _Biased | None:
    """Return the scores of an attention without and with a bias; None if one of them is unknown."""
    scores = side.stage("scores")
    masked = side.stage("masked_scores")
    weights = side.stage("weights")
    if scores is None or masked is None or weights is None:
        return None
    if not scores.shape == masked.shape == weights.shape:
        return None
    return _Biased(scores, masked, sees_by_head(weights, masked))


def _of_slopes(pair: Pair) -> str:
    """Return the slopes of two biases that are linear in the position of the key; empty for other or equal biases."""
    ours, theirs, where = _biased(pair.left), _biased(pair.right), pair.where
    if ours is None or theirs is None:
        return ""
    slopes = ours.slopes
    right_slopes = theirs.slopes
    if not slopes or len(slopes) != len(right_slopes):
        return ""
    if not _are_close(slopes, right_slopes):
        return (
            f"The slopes of the bias by head are {_shown(slopes)} {where.left} and {_shown(right_slopes)} "
            f"{where.right}.{_off_by_one_head(slopes, right_slopes, where)}"
        )
    if ours.rises_with_distance == theirs.rises_with_distance:
        return ""
    rises, falls = where.right, where.left
    if ours.rises_with_distance:
        rises, falls = where.left, where.right
    return (
        f"The slopes of the bias by head are {_shown(slopes)} on both sides, with opposite signs. Keys far from their "
        f"query get higher scores {rises} and lower ones {falls}."
    )


def _shown(slopes: Sequence[float]) -> str:
    """Return the slopes of the first heads: `0.25, 0.0625, …`."""
    shown = ", ".join(map(small, slopes[:_HEADS]))
    return f"{shown}, …" if len(slopes) > _HEADS else shown


def _are_close(left: Sequence[float], right: Sequence[float]) -> bool:
    """Return whether the slopes of two ladders are equal, head by head."""
    return all(isclose(ours, theirs, rel_tol=NEAR) for ours, theirs in zip(left, right, strict=True))


def _off_by_one_head(left: Sequence[float], right: Sequence[float], where: Where) -> str:
    """Return that one ladder is the other one, a step off; empty if it is not."""
    here, there = "", ""
    if _are_close(left[1:], right[:-1]):
        here, there = where.left, where.right
    elif _are_close(right[1:], left[:-1]):
        here, there = where.right, where.left
    if not here:
        return ""
    return f" Head 1 {here} has the slope of head 0 {there}: the slopes are off by one head."


def _of_biases(pair: Pair) -> str:
    """Return where two biases differ most, if both sides see the same keys; empty otherwise, or if it is unknown."""
    ours, theirs = _biased(pair.left), _biased(pair.right)
    if ours is None or theirs is None or ours.scores.shape != theirs.scores.shape:
        return ""
    if not torch.equal(ours.seen, theirs.seen):
        return ""
    apart = (ours.bias - theirs.bias).abs()
    largest = float(apart.max())
    if not isfinite(largest) or largest <= _LOWERED:
        return ""
    place = torch.unravel_index(apart.argmax(), apart.shape)
    left = float(ours.bias[place])
    right = float(theirs.bias[place])
    here, there = pair.where.left, pair.where.right
    ratio = left / right if right else 0.0
    unlike = (ours.bias - ratio * theirs.bias).abs()
    if ratio and float(unlike.max()) <= _LOWERED:
        return f"The bias {here} is {small(ratio)} times the bias {there}."
    _, head, query, key = map(int, place)
    count = int((apart > _LOWERED).sum())
    visible = int(ours.seen.sum())
    return (
        f"The bias differs in {count:,} of {visible:,} visible scores. Head {head} adds {small(left)} to "
        f"the score of query {query} and key {key} {here}, and {small(right)} {there}."
    )


# -- scores whose axes have no names ----------------------------------------------------------------------------------


def _of_lowered_scores(pair: Pair) -> str:
    """Return how many scores only one side's mask lowers, or how many get other numbers; empty if it is unknown.

    What a side adds is its masked scores without its scores.
    """
    ours = _added(pair.left)
    theirs = _added(pair.right)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return ""
    here = _lowered_alone(ours, theirs, pair.where.left)
    there = _lowered_alone(theirs, ours, pair.where.right)
    alone = [phrase for phrase in (here, there) if phrase]
    if alone:
        return f"The masks differ: of {ours.numel():,} scores, they lower {listed(alone)}."
    apart = (ours - theirs).nan_to_num(0.0).abs()
    count = int((apart > _LOWERED).sum())
    if not count:
        return ""
    return f"The masks add different numbers to {count:,} of {ours.numel():,} scores."


def _added(side: Side) -> Tensor | None:
    """Return what a mask adds to the scores, in the axes of the masked scores; None if it is unknown."""
    masked = side.as_made("masked_scores")
    scores = side.as_made("scores")
    if masked is None or scores is None or scores.numel() != masked.numel():
        return None
    return masked.double() - scores.double().reshape(masked.shape)


def _lowered_alone(added: Tensor, beside: Tensor, called: str) -> str:
    """Return how many scores a mask lowers that the other one, `beside`, does not lower; empty for none."""
    alone = (added < -_LOWERED) & (beside >= -_LOWERED)
    if not bool(alone.any()):
        return ""
    most = -float(added[alone].min())
    by = f"by up to {most:.4g}" if most < _MASKED_OUT else "so far that they are masked out"
    return f"{int(alone.sum()):,} {called} alone, {by}"
