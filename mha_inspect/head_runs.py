"""One recorded run for each head count, and the rounding error of the baseline's, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .forward import Forward
from .noise import first_tensor, rounding_error
from .reports.common import Verdict
from .stage_contents import StageContents, exact_forward, in_dtype
from .stage_difference import comparable, compare_stage, stage_noise

_GIVEN = ("query", "key", "value")
_CORNER = 32
"""Positions that are looked at before all of them are."""
_FAR_APART = 1000.0
"""Times the noise floor at which a corner is enough: a floor that is measured in a corner may be a lucky one."""


@dataclass(frozen=True, eq=False)
class HeadRun:
    """One head count, run once and recorded with its tensors kept."""

    forward: Forward
    contents: StageContents
    output: Tensor
    """As the layer returned it."""

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self.forward.spec.num_heads

    @property
    def final(self) -> Tensor:
        """The output as `batch query embed` (the heads side by side where there is no output projection)."""
        content = self.contents.get(self.contents.stages[-1]) if self.contents.stages else None
        if content is None:
            raise ValueError(f"layer {self.forward.layer} has no output that can be laid out as batch query embed")
        return content


def run_once(forward: Forward, like: StageContents | None = None) -> HeadRun:
    """Record one opened run. `like` is a run of the same layer whose axes have been named already."""
    seen = forward.recorded(keep=True)
    return HeadRun(forward, StageContents(forward, seen, like), first_tensor(seen.returned).detach())


class Noise:
    """The rounding error of the baseline, measured against the same run in float64.

    For a baseline in float64 there is nothing finer: a run in float32 is measured against it, and scaled by the ratio
    of the two dtypes' rounding steps.
    """

    def __init__(self, baseline: HeadRun) -> None:
        self._baseline = baseline
        self._in_float64 = baseline.forward.spec.dtype == "float64"
        other = in_dtype(baseline.forward, torch.float32) if self._in_float64 else exact_forward(baseline.forward)
        self._other = run_once(other, baseline.contents)
        steps = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        self._scale = steps if self._in_float64 else 1.0
        self._floors: dict[tuple[str, bool, tuple[int, ...]], float] = {}

    @cached_property
    def of_output(self) -> float:
        """Of the output."""
        return rounding_error(self._baseline.output, self._other.output) * self._scale

    def of_stage(self, stage: str, other: Tensor, *, corner: bool = False) -> float:
        """Of a stage, or of a corner of it, in the form in which it is compared with `other`."""
        form = (stage, corner, tuple(other.shape))
        if form not in self._floors:
            mine, measured = self._baseline.contents.get(stage), self._other.contents.get(stage)
            assert mine is not None, stage
            assert measured is not None, stage
            if corner:
                mine, measured = _corner(mine), _corner(measured)
            content, exact = (measured, mine) if self._in_float64 else (mine, measured)
            self._floors[form] = stage_noise(stage, content, exact, other) * self._scale
        return self._floors[form]


@dataclass(frozen=True)
class Walk:
    """The stages of two runs side by side, in order."""

    same: tuple[str, ...]
    """Those before the first that differs whose content is the same."""
    first: str | None
    """The first whose content differs."""
    note: str = ""
    """Why it could not be subtracted, where the shapes differ."""
    rejoined: str | None = None
    """The stage after it from which on everything is the same again."""


def walk(baseline: HeadRun, other: HeadRun, noise: Noise, *, to_the_end: bool) -> Walk:
    """Compare stage by stage, by content, until one differs; `to_the_end` goes on to see where they meet again."""
    same: list[str] = []
    first: str | None = None
    note = ""
    rejoined: str | None = None
    for stage in baseline.contents.stages:
        if first is not None and not to_the_end:
            break
        left, right = baseline.contents.get(stage), other.contents.get(stage)
        if stage in _GIVEN or left is None or right is None:
            continue
        verdict, why = _verdict(stage, left, right, noise)
        if first is None:
            if verdict == "differs":
                first, note = stage, why
            else:
                same.append(stage)
        else:
            rejoined = None if verdict == "differs" else rejoined or stage
    return Walk(tuple(same), first, note, rejoined)


def _verdict(stage: str, left: Tensor, right: Tensor, noise: Noise) -> tuple[Verdict, str]:
    """Whether the contents of a stage differ, and why they could not be subtracted.

    Scores of many heads are the largest tensors of all. Those that are far apart in a corner are not looked at further.
    """
    if comparable(stage, left[:1, ..., :1, :], right[:1, ..., :1, :]) is None or left.shape[0] != right.shape[0]:
        return "differs", f"{list(right.shape)} instead of {list(left.shape)}"
    corner = _corner(right)
    look = compare_stage(stage, _corner(left), corner, lambda: noise.of_stage(stage, corner, corner=True))
    if look.verdict == "differs" and look.noise_floor and (look.times_noise or 0.0) > _FAR_APART:
        return "differs", ""
    found = compare_stage(stage, left, right, lambda: noise.of_stage(stage, right))
    return found.verdict or "same", found.note


def _corner(content: Tensor) -> Tensor:
    """A few positions of the first row of the batch, in every head."""
    return content[:1, ..., :_CORNER, :]
