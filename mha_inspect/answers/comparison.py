"""Two runs side by side: their attentions in the order in which they are computed, each stage of both compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from einops import repeat
from torch import Tensor

from ..measure.stage_difference import StageDifference, compare_stage
from ..naming.axes import AxisNames
from ..naming.stages import CANONICAL_AXES, STAGES
from ..naming.visibility import Rows
from ..reports.common import Verdict
from .comparable_run import ComparableRun

_AFTER_A_MASK = frozenset({"weights", "context", "concat", "output"})
"""Stages in which a query without keys has no result that rounding could be measured against."""
_OF_SHARED_HEADS = ("k_proj", "v_proj")
R = TypeVar("R", bound=ComparableRun)


@dataclass(frozen=True, eq=False)
class ComparedStage:
    """A stage of two attentions that stand in the same place."""

    place: int
    """Of the attentions, from 0."""
    name: str
    left: Tensor | None
    """In canonical axes; None where this side does not have it, or an axis has no name."""
    right: Tensor | None
    difference: StageDifference | None
    """None where a side is missing."""


class Comparison(Generic[R]):
    """Two runs, compared stage by stage in canonical axes, and by what they return."""

    def __init__(self, left: R, right: R, measured: Sequence[R] | None = None) -> None:
        """Take two runs; `measured` are those whose rounding error, the larger one, is the noise floor: both."""
        self.left, self.right = left, right
        self._measured = (left, right) if measured is None else measured

    @cached_property
    def masked(self) -> list[Rows]:
        """For each place the queries that have no key to look at, on either side."""
        sides = (self.left, self.right)
        every = range(max(len(side.attentions) for side in sides))
        return [tuple(sorted({row for side in sides for row in side.masked_queries(place)})) for place in every]

    def rows(self, place: int) -> Iterator[ComparedStage]:
        """Yield the stages of the attentions in one place, in order, those that either side has."""
        sides = (self.left, self.right)
        for stage in STAGES:
            if any(place < len(s.attentions) and stage in s.attentions[place][0].stages for s in sides):
                yield self._compared(place, stage)

    def _compared(self, place: int, stage: str) -> ComparedStage:
        left, right = (side.content(place, stage) for side in (self.left, self.right))
        if left is None or right is None:
            return ComparedStage(place, stage, left, right, None)
        ours, theirs, note = left, right, ""
        if stage in _OF_SHARED_HEADS and left.shape != right.shape:
            ours, theirs, note = self._in_query_heads(place, left, right)
        # Up to its scores the first attention has what it has for every query, whatever a mask leaves it.
        rows = self.masked[place] if place or stage in _AFTER_A_MASK else ()

        def floor() -> float:
            likes = ((self.left, theirs), (self.right, ours))
            return max(run.floor(place, stage, like, rows) for run, like in likes if run in self._measured)

        difference = compare_stage(stage, ours, theirs, floor)
        if difference.compared != CANONICAL_AXES[stage]:
            note = f"compared by {difference.compared}"
        return ComparedStage(place, stage, left, right, replace(difference, note=note or difference.note))

    def _in_query_heads(self, place: int, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, str]:
        """Return keys or values of both with one for every head, and which are shared; as they are where none fits."""
        names = [side.attentions[place][1] for side in (self.left, self.right)]
        (ours, of_left), (theirs, of_right) = map(_repeated, (left, right), names)
        if ours.shape != theirs.shape:
            return left, right, ""
        shared = zip(("left", "right"), names, (of_left, of_right), strict=True)
        notes = [
            f"each key/value head on the {side}, of {of.num_kv_heads}, stands for {each}"
            for side, of, each in shared
            if each > 1
        ]
        return ours, theirs, " and ".join(notes)

    def output(self, rows: Rows) -> StageDifference:
        """Compare what both return; the rounding error is measured without these queries."""

        def floor() -> float:
            return max(run.output_floor(rows) for run in self._measured)

        return compare_stage("output", self.left.output, self.right.output, floor)


def _repeated(content: Tensor, names: AxisNames) -> tuple[Tensor, int]:
    """Return `batch key (heads head_dim)` with a key and value for every head, and how many each stands for."""
    count = names.num_kv_heads
    each = names.num_heads // count if count and names.num_heads % count == 0 else 1
    if each == 1 or content.shape[-1] != count * names.head_dim:
        return content, 1
    pattern = "batch key (kv_heads head_dim) -> batch key (kv_heads group head_dim)"
    return repeat(content, pattern, kv_heads=count, group=each), each


def overall(verdicts: Sequence[Verdict | None]) -> Verdict:
    """Return `differs` where one does, `same` where all are."""
    return "differs" if "differs" in verdicts else "inconclusive" if "inconclusive" in verdicts else "same"
