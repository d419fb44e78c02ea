"""Compare two runs stage by stage, with their attentions paired in the order of computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from einops import repeat
from torch import Tensor

from ..measure.content import StageDifference, compare_stage
from ..naming.axes import AxisNames
from ..naming.pattern import CANONICAL_AXES, STAGES
from ..naming.visibility import Rows
from ..record.rounding import distances, judge
from ..reports.common import Difference, Verdict
from .comparable_run import ComparableRun

_AFTER_A_MASK = frozenset({"weights", "context", "concat", "output"})
"""Stages in which a query with every key masked out has no defined result."""


@dataclass(frozen=True, eq=False)
class ComparedStage:
    """A stage of two paired attentions."""

    place: int
    """The place of the attentions, from 0."""
    name: str
    left: Tensor | None
    """The left tensor in canonical axes; None if the side lacks the stage, or an axis has no name."""
    right: Tensor | None
    difference: StageDifference | None
    """The difference; None if a side is missing, or without a measurement."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs, compared by their stages in canonical axes and by their outputs."""

    left: ComparableRun
    right: ComparableRun
    measured: ComparableRun | None = None
    """The run whose rounding error is the noise floor; None means the larger error of both runs."""

    @cached_property
    def masked(self) -> list[Rows]:
        """For each pair of attentions the queries with every key masked out, on either side."""
        sides = (self.left, self.right)
        every = range(max(len(side.attentions) for side in sides))
        return [tuple(sorted({row for side in sides for row in side.masked_queries(place)})) for place in every]

    @property
    def _measured(self) -> tuple[ComparableRun, ...]:
        return (self.left, self.right) if self.measured is None else (self.measured,)

    def rows(self, *, measured: bool = True) -> Iterator[ComparedStage]:
        """Yield the stages of each pair of attentions, in order; without a difference unless `measured`."""
        for place in range(len(self.masked)):
            both = [run.attentions[place][0].stages for run in (self.left, self.right) if place < len(run.attentions)]
            names = [stage for stage in STAGES if any(stage in stages for stages in both)]
            yield from (self._compared(place, stage, measured=measured) for stage in names)

    def _compared(self, place: int, stage: str, *, measured: bool) -> ComparedStage:
        left, right = (run.content(place, stage) for run in (self.left, self.right))
        if left is None or right is None or not measured:
            return ComparedStage(place, stage, left, right, None)
        ours, theirs, note = left, right, ""
        if stage in ("k_proj", "v_proj") and left.shape != right.shape:
            names = [run.attentions[place][1] for run in (self.left, self.right)]
            ours, theirs = _for_each_head(left, names[0]), _for_each_head(right, names[1])
            shared = [(side, of) for side, of in zip(("left", "right"), names, strict=True) if of.num_kv_heads]
            note = " and ".join(
                f"each of the {of.num_kv_heads} key/value heads on the {side} is repeated "
                f"{of.num_heads // of.num_kv_heads} times"
                for side, of in shared
                if of.num_heads > of.num_kv_heads
            )
        # Up to its scores, the first attention is defined for every query, whatever the mask.
        rows = self.masked[place] if place or stage in _AFTER_A_MASK else ()

        def floor() -> float:
            likes = ((self.left, theirs), (self.right, ours))
            return max(run.floor(place, stage, like, rows) for run, like in likes if run in self._measured)

        difference = compare_stage(stage, ours, theirs, floor)
        if difference.compared != CANONICAL_AXES[stage]:
            note = f"compared by {difference.compared}"
        return ComparedStage(place, stage, left, right, replace(difference, note=difference.note or note))

    def output(self, rows: Rows) -> StageDifference:
        """Compare both outputs; the rounding error is measured without these queries."""

        def floor() -> float:
            return max(run.output_floor(rows) for run in self._measured)

        return compare_stage("output", self.left.output, self.right.output, floor)


def _for_each_head(content: Tensor, names: AxisNames) -> Tensor:
    """Return `batch key (heads head_dim)` with a key or value for every query head."""
    count = names.num_kv_heads
    if not count or names.num_heads % count or content.shape[-1] != count * names.head_dim:
        return content
    pattern = "batch key (kv_heads head_dim) -> batch key (kv_heads group head_dim)"
    return repeat(content, pattern, kv_heads=count, group=names.num_heads // count)


def difference_of(left: Tensor, right: Tensor, noise_floor: float) -> Difference:
    """Return the difference of two tensors of one shape, judged by a measured rounding error."""
    largest, relative = distances(left, right)
    return Difference(largest, relative, noise_floor, *judge(largest, noise_floor))


def overall(verdicts: Sequence[Verdict | None]) -> Verdict:
    """Return `differs` if any verdict is that, otherwise `inconclusive` if any is, otherwise `same`."""
    return "differs" if "differs" in verdicts else "inconclusive" if "inconclusive" in verdicts else "same"
