"""Two contents of one stage, in canonical axes: how far they are apart, and what that means beside rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..naming.stages import CANONICAL_AXES
from ..record.rounding import judge, rounding_error
from ..reports.common import Verdict
from .compare import parts

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
    largest, relative = (0.0, 0.0) if _equal(pair.left, pair.right) else distances(pair.left, pair.right)
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


def distances(left: Tensor, right: Tensor, size: float | None = None) -> tuple[float, float]:
    """Largest difference, and ‖left - right‖ / ‖left‖, of two tensors of one shape.

    Numbers of float32 and less are subtracted in float32, which is off by at most 2⁻²⁴ of a difference, and squares are
    summed in float64. NaN beside NaN and an infinity beside the same infinity are no difference; beside anything else
    they are an infinite one. ‖left‖ is over its finite elements: `size_of(left)`, or `size` where that is known.
    """
    if left is right:
        return 0.0, 0.0
    largest = apart = 0.0
    for one, other in parts(left, right):
        difference = _wide(one) - _wide(other)
        bounds = [float(bound) for bound in torch.aminmax(difference)] if difference.numel() else [0.0, 0.0]
        if not all(map(math.isfinite, bounds)):
            one, other = one.double(), other.double()
            same = (one == other) | (one.isnan() & other.isnan())
            difference = (one - other).nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
            difference = difference.masked_fill_(same, 0.0)
            bounds = [float(bound) for bound in torch.aminmax(difference)]
        largest = max(largest, -bounds[0], bounds[1])
        apart += float(torch.linalg.vector_norm(difference.double())) ** 2
    if apart == 0:
        return largest, 0.0
    whole = size_of(left) if size is None else size
    return largest, math.sqrt(apart) / whole if whole else math.inf


def size_of(tensor: Tensor) -> float:
    """‖tensor‖ over its finite elements, summed in float64."""
    total = 0.0
    for part, _ in parts(tensor, tensor):
        norm = float(torch.linalg.vector_norm(part.double()))
        if not math.isfinite(norm):
            norm = float(torch.linalg.vector_norm(part.double().masked_fill(~part.isfinite(), 0.0)))
        total += norm**2
    return math.sqrt(total)


def _wide(numbers: Tensor) -> Tensor:
    if numbers.dtype in (torch.float32, torch.float64):
        return numbers
    return numbers.float() if numbers.is_floating_point() else numbers.double()


def _equal(left: Tensor, right: Tensor) -> bool:
    """Whether both hold the same numbers; False as well where one is not finite, and more must be looked at.

    The difference of two numbers is 0 only where they are equal, and to subtract is far quicker than to compare.
    """
    if left.dtype != right.dtype or left.device != right.device or not left.numel():
        return False
    for one, other in parts(left, right):
        low, high = torch.aminmax(one - other)
        if not (bool(low == 0) and bool(high == 0)):
            return False
    return True
