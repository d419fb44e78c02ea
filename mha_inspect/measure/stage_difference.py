"""Two contents of one stage, in canonical axes: how far they are apart, and what that means beside rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..naming.stages import CANONICAL_AXES
from ..record.rounding import distances, judge, rounding_error
from ..reports.common import Verdict

NoiseFloor = float | Callable[[], float]
"""A noise floor, or what measures it when it is needed: content that is the same needs none."""

BLOCKED_BELOW = -3e4
"""No score is that low but by a mask (-1e9, the lowest number of a dtype, -inf), and exp of it is 0 in every dtype."""

MEAN_OVER_HEADS = "the mean over heads"
MERGED_HEADS = "the heads side by side"


@dataclass(frozen=True)
class StageDifference:
    """One stage of two runs."""

    stage: str
    max_abs_difference: float | None
    """None where there is nothing to subtract: one side lacks the stage, or the shapes differ."""
    relative_difference: float | None
    """‖left - right‖ / ‖left‖ over the elements that are finite on both sides."""
    noise_floor: float | None
    times_noise: float | None
    verdict: Verdict | None
    """None where one side lacks the stage."""
    compared: str
    """What was compared: `batch heads query key`, or what stands for it where the head counts differ."""
    note: str = ""
    """Why it was compared in another form than its own, or not at all; empty where nothing is to be said."""


@dataclass(frozen=True)
class Comparable:
    """Two tensors of one shape that stand for two contents of a stage; `how` is empty for the contents themselves."""

    left: Tensor
    right: Tensor
    how: str = ""


def compare_stage(
    stage: str, left: Tensor | None, right: Tensor | None, noise_floor: NoiseFloor = 0.0
) -> StageDifference:
    """Compare two contents of a stage.

    Where the head counts differ, scores and weights are compared by their mean over heads, and what has features in
    each head by all heads side by side: the split holds the same numbers, cut elsewhere. In `masked_scores` a position
    that a mask blocks on both sides is equal, whatever number the mask puts there.

    Args:
        stage: of `stages.STAGES`.
        left: in the stage's canonical axes; None where this side does not have it.
        right: likewise.
        noise_floor: of this stage, or what measures it, in the form in which it is compared (`stage_noise`).
    """
    axes = CANONICAL_AXES[stage]
    if left is None or right is None:
        lacking = [side for side, tensor in (("left", left), ("right", right)) if tensor is None]
        return StageDifference(stage, None, None, None, None, None, axes, f"not on the {' nor on the '.join(lacking)}")
    pair = comparable(stage, left, right)
    if pair is None:
        note = f"shapes differ: {list(left.shape)} and {list(right.shape)} in {axes}"
        return StageDifference(stage, None, None, None, None, "differs", axes, note)
    largest, relative = distances(pair.left, pair.right)
    if largest == 0:
        return StageDifference(stage, 0.0, relative, None, 0.0, "same", pair.how or axes)
    floor = noise_floor if isinstance(noise_floor, (int, float)) else noise_floor()
    times, verdict = judge(largest, floor)
    return StageDifference(stage, largest, relative, floor, times, verdict, pair.how or axes)


def comparable(stage: str, left: Tensor, right: Tensor) -> Comparable | None:
    """The contents in a form in which they can be subtracted; None where their sizes do not allow it."""
    how = ""
    if left.shape != right.shape:
        names = CANONICAL_AXES[stage].split()
        if "heads" not in names or left.shape[1] == right.shape[1]:
            return None
        how = MERGED_HEADS if names[-1] == "head_dim" else MEAN_OVER_HEADS
        left, right = reduce_heads(left, how), reduce_heads(right, how)
        if left.shape != right.shape:
            return None
    if stage == "masked_scores":
        left, right = _blocked_as_inf(left), _blocked_as_inf(right)
    return Comparable(left, right, how)


def _blocked_as_inf(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores < BLOCKED_BELOW, -math.inf)


def reduce_heads(content: Tensor, how: str) -> Tensor:
    """`batch heads query key` to `batch query key`, or `batch heads query head_dim` to `batch query (heads head_dim)`.

    The mean is taken in float64, so that heads with the lowest number of a dtype for a mask do not sum to -inf.
    """
    if how == MERGED_HEADS:
        return rearrange(content, "batch heads query head_dim -> batch query (heads head_dim)")
    if content.shape[1] == 1 or content.device.type == "mps":
        return content[:, 0] if content.shape[1] == 1 else content.mean(dim=1)
    return content.mean(dim=1, dtype=torch.float64)


def stage_noise(stage: str, content: Tensor, exact: Tensor, like: Tensor | None = None) -> float:
    """Largest rounding error of a stage: its content against the same stage computed in float64.

    Args:
        stage: of `stages.STAGES`.
        content: in canonical axes.
        exact: the same stage of a run in float64, in canonical axes.
        like: the content that `content` is going to be compared with, so that both are brought into the same form.

    For a run that is itself in float64 there is nothing finer: pass its content for `exact`, that of a run in float32
    for `content`, and scale by the ratio of the two dtypes' rounding steps.
    """
    pair = comparable(stage, content, content if like is None else like)
    if pair is None:
        return rounding_error(content, exact)
    reduced = reduce_heads(exact, pair.how) if pair.how else exact
    return rounding_error(pair.left, reduced)
