"""Compute a tensor's statistics and its elements as text, and the difference of a stage between two runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor
from torch._tensor_str import printoptions

from ..layers.spec import Show
from ..naming.pattern import CANONICAL_AXES
from ..record.rounding import distances, judge, rounding_error
from ..reports.common import Difference, Stats, Values, Verdict


def stats_of(tensor: Tensor, masked: Tensor | None = None) -> Stats | None:
    """Return statistics of the finite elements in float64, NaN without any finite element; None on meta.

    The tensor is not complex. `masked` is boolean, broadcastable to the tensor; True where a mask wrote -inf, which
    then does not count as inf. The standard deviation is torch's (divided by n - 1), and 0 for a single element.
    """
    if tensor.is_meta:
        return None
    flat = tensor.detach().reshape(-1)
    if flat.device.type == "mps":
        flat = flat.cpu()  # mps has no float64
    masked_out = 0
    if masked is not None:
        masked_out = int((masked.expand(tensor.shape).reshape(-1) & (flat == -math.inf)).sum())
    numbers = flat[flat.isfinite()].double()
    count = numbers.numel()
    smallest = largest = std = math.nan
    if count:
        smallest, largest = map(float, numbers.aminmax())
        std = float(numbers.std(correction=1 if count > 1 else 0))
    return Stats(
        mean=float(numbers.mean()),
        std=std,
        min=smallest,
        max=largest,
        nan=int(flat.isnan().sum()),
        inf=int(flat.isinf().sum()) - masked_out,
        masked=masked_out,
    )


def values_of(tensor: Tensor, show: Show) -> Values | None:
    """Return the elements as torch prints them, and as nested lists if show.full_values is set; None on meta.

    All print options are set for this text, so the same tensor gives the same text in every session.
    """
    if tensor.is_meta:
        return None
    plain = tensor.detach().cpu()
    with printoptions(precision=4, edgeitems=3, threshold=1000, linewidth=80, sci_mode=None):
        text = repr(plain)
    if not show.full_values:
        return Values(text=text, data=None)
    elements = plain if plain.dim() else plain.reshape(1)
    return Values(text=text, data=elements.tolist())


BLOCKED_BELOW = -3e4
"""A score this low is masked out (-1e9, the lowest number of a dtype, -inf). Its exp is 0 in every dtype."""

MEAN_OVER_HEADS = "the mean over heads"
MERGED_HEADS = "the heads side by side"


@dataclass(frozen=True)
class StageDifference(Difference):
    """The difference of one stage between two runs."""

    verdict: Verdict
    compared: str
    """The compared axes: `batch heads query key`, or the form that replaces them if the numbers of heads differ."""
    note: str = ""
    """Why the stages could not be compared; empty if they were."""


def compare_stage(stage: str, left: Tensor, right: Tensor, noise_floor: Callable[[], float]) -> StageDifference:
    """Return the difference of two tensors of one stage, both in its canonical axes, in the units of the tensors.

    If the numbers of heads differ, scores and weights are compared by their mean over heads, and stages with features
    in each head by all heads concatenated. In `masked_scores` a position that is masked out on both sides is equal,
    whatever number the mask writes.

    `noise_floor` measures the rounding error of this stage in the compared form (`stage_noise`). It is called only if
    the tensors differ. Tensors that cannot be compared give the verdict `differs` and a `note`; no error is raised.
    """
    axes = CANONICAL_AXES[stage]
    pair = _comparable(stage, left, right)
    if pair is None:
        note = f"shapes differ: {list(left.shape)} and {list(right.shape)} in {axes}"
        return StageDifference(None, None, None, None, "differs", axes, note)
    left, right, how = pair
    if stage == "masked_scores":
        count = int((left.isneginf() != right.isneginf()).sum())
        if count and not bool(left.isnan().any()) and not bool(right.isnan().any()):
            note = f"{count:,} of {left.numel():,} scores are below -30,000, as a mask makes them, on one side alone"
            return StageDifference(None, None, None, None, "differs", how or axes, note)
    largest, relative = distances(left, right)
    floor = noise_floor() if largest else None
    return StageDifference(largest, relative, floor, *judge(largest, floor or 0.0), how or axes)


def _comparable(stage: str, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, str] | None:
    """Return both tensors in a form that can be subtracted, and the name of that form; empty if unchanged.

    None if their sizes do not fit.
    """
    how = ""
    if left.shape != right.shape:
        names = CANONICAL_AXES[stage].split()
        if "heads" not in names or left.shape[1] == right.shape[1]:
            return None
        how = MERGED_HEADS if names[-1] == "head_dim" else MEAN_OVER_HEADS
        left, right = _reduce_heads(left, how), _reduce_heads(right, how)
        if left.shape != right.shape:
            return None
    if stage == "masked_scores":
        left = left.masked_fill(left < BLOCKED_BELOW, -math.inf)
        right = right.masked_fill(right < BLOCKED_BELOW, -math.inf)
    return left, right, how


def _reduce_heads(content: Tensor, how: str) -> Tensor:
    """Reduce `batch heads query key` to `batch query key`, or concatenate the heads of `batch heads query head_dim`.

    The mean is taken in float64: in a smaller dtype the lowest numbers of masked heads would sum to -inf.
    """
    if how == MERGED_HEADS:
        return rearrange(content, "batch heads query head_dim -> batch query (heads head_dim)")
    if content.shape[1] == 1:
        return content[:, 0]
    if content.device.type == "mps":
        return content.mean(dim=1)
    return content.mean(dim=1, dtype=torch.float64)


def stage_noise(stage: str, content: Tensor, exact: Tensor, like: Tensor | None = None) -> float:
    """Return the largest rounding error of a stage, in canonical axes: its difference from that of a run in float64.

    `like` is the tensor that `content` will be compared with; both are brought into the same form.

    For a run in float64 there is no finer run: pass its tensor as `exact`, that of a run in float32 as `content`, and
    scale by the ratio of the two dtypes' rounding steps.
    """
    pair = _comparable(stage, content, content if like is None else like)
    if pair is None:
        return rounding_error(content, exact)
    comparable, _, how = pair
    return rounding_error(comparable, _reduce_heads(exact, how) if how else exact)
