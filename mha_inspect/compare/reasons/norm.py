"""Queries and keys are normalized on one side alone, or over other features.

    q = self.q_norm(q.view(b, t, heads, head_dim))      # in each head
    q = self.q_norm(q).view(b, t, heads, head_dim)      # over all heads together

A norm gives every vector that it is over one length. A rotation after it does not change the length.
"""

from __future__ import annotations

from torch import Tensor

from ..pair import Difference, Pair, Why

_STAGES = {"q_heads": "queries", "k_heads": "keys"}
_NEAR = 1e-2
"""Lengths that differ by less are one: a norm adds a small number to the variance."""


def norm(pair: Pair, difference: Difference) -> Why | None:
    """Return that queries or keys are normalized in other ways."""
    if difference.stage not in _STAGES:
        return None
    where = difference.where
    for stage, what in _STAGES.items():
        ours = _normalized(pair.left.stage(stage))
        theirs = _normalized(pair.right.stage(stage))
        if ours is None or theirs is None or ours == theirs:
            continue
        sentence = f"The {what} are {ours} {where.left} and {theirs} {where.right}."
        # A norm multiplies each vector by a number.
        is_all = difference.is_finite and difference.is_factor_of_rows()
        return Why("norm", sentence, fact=f"{ours}, {theirs}", is_all=is_all)
    return None


def _normalized(heads: Tensor | None) -> str | None:
    """Return over what queries or keys, `batch heads position head_dim`, have one length; None if unknown."""
    if heads is None or heads.dim() != 4:
        return None
    tokens = heads.shape[0] * heads.shape[2]
    if tokens < 2 or not bool(heads.isfinite().all()):
        return None
    squares = heads.double().square()
    if _is_one_number(squares.sum(-1)):
        return "normalized in each head"
    if _is_one_number(squares.sum((1, 3))):
        return "normalized over all heads together"
    return "of different lengths"  # not normalized, or multiplied by a gain for each feature


def _is_one_number(squares: Tensor) -> bool:
    """Return whether positive numbers are all the same."""
    lowest, highest = float(squares.min()), float(squares.max())
    return lowest > 0 and highest - lowest <= _NEAR * highest
