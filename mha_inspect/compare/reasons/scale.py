"""The scores are scaled by another number on each side."""

from __future__ import annotations

from ...naming.score_formulas import scale_text
from ..pair import Difference, Pair, Why

_SAME_RATIO = 1e-6
"""Scales are the same if their ratio is 1 up to this."""


def scale(pair: Pair, difference: Difference) -> Why | None:
    """Return both scales, if their ratio is all of the difference."""
    if difference.stage not in ("scores", "masked_scores"):
        return None
    ours = pair.left.attention.scale
    theirs = pair.right.attention.scale
    if not ours or not theirs:
        return None
    ratio = ours / theirs
    if abs(ratio - 1) <= _SAME_RATIO:
        return None
    scaled = ratio * difference.theirs
    if not difference.is_explained_by(scaled, max(1.0, abs(ratio))):
        return None
    where = difference.where
    here = f"{_words(ours)} {where.left}"
    there = f"{_words(theirs)} {where.right}"
    return Why("scale", f"The scores are {here} and {there}.")


def _words(scale: float) -> str:
    """Return a scale in words: `divided by √8`."""
    text = scale_text(scale).strip()
    if not text:
        return "not scaled"
    if text.startswith("/"):
        return f"divided by {text.removeprefix('/').strip()}"
    return f"multiplied by {text[1:].strip()}"
