"""diff: two subjects with the same input, and the same weights as far as those can be carried, stage by stage."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..measure.stage_difference import BLOCKED_BELOW, compare_stage
from ..naming.stage_facts import unlike_dot
from ..naming.stages import CANONICAL_AXES, STAGES
from ..reports.diff import (
    DiffReport,
    MaskedRowPair,
    NoiseSource,
    OtherWay,
    OutputDifference,
    RowContent,
    SideName,
    StageRow,
    StageSide,
)
from .diff_answer import Blocked, answer, notes, stage_note
from .look import Rows, without
from .masked_rows import row_content
from .parameter_pairs import parameter_pairs
from .run_report import has_shape_only
from .shared_weights import AS_THEY_ARE, Shared, in_the_fuller, share
from .side import Side

_AFTER_A_MASK = frozenset({"weights", "context", "concat", "output"})
"""Stages in which a query without keys has no result that rounding could be measured against."""
_MEASURED = ("max_abs_difference", "relative_difference", "noise_floor", "times_noise", "verdict")
_NOT_MEASURED: dict[str, Any] = dict.fromkeys(_MEASURED)


def diff(left: Side, right: Side, *, carry: bool = True) -> DiffReport:
    """Compare two sides that get the same input, with the same weights as far as those can be carried.

    Without `carry` each keeps the weights that it has. The attentions of both are paired in the order in which they are
    computed. Stages are compared in canonical axes, and judged by the larger rounding error of the two, measured
    against float64 in this run.

    Raises:
        InputError: a side cannot be run in float64.
        WeightsError: both are layers, and the weights of the one cannot be those of the other.
    """
    return _Comparison(left, right, share(left, right) if carry else AS_THEY_ARE).report()


class _Comparison:
    """Two sides with their weights in place, run."""

    def __init__(self, left: Side, right: Side, shared: Shared) -> None:
        self._left, self._right, self._shared = left, right, shared
        self._sides = (left, right)

    @cached_property
    def _counts(self) -> list[int]:
        return [len(side.attentions) for side in self._sides]

    @cached_property
    def _masked(self) -> list[Rows]:
        """For each attention the queries that have no key to look at, on either side."""
        every = range(max(self._counts))
        return [sorted({row for side in self._sides for row in side.masked_queries(place)}) for place in every]

    @cached_property
    def _masked_outputs(self) -> Rows:
        """The masked queries of all attentions that are rows of the output."""
        every = {row for masked in self._masked for row in masked}
        return sorted(row for row in every if self._left.has_row(*row))

    def _number(self, place: int) -> int | None:
        """Which of several attentions, from 1; None where each side has one."""
        return place + 1 if max(self._counts) > 1 else None

    def report(self) -> DiffReport:
        """Return the report, with its sentences."""
        left, right, shared, rows = self._left, self._right, self._shared, self._masked_outputs
        every = range(max(self._counts))
        stages = tuple(row for place in every for stage in STAGES for row in self._stage(place, stage))
        output = self._compare_outputs(left, right)
        report = DiffReport(
            left=left.report(rows),
            right=right.report(rows),
            weights=replace(shared.report, other_way=self._other_way()),
            noise=_noise_source(left.dtype, right.dtype),
            stages=stages,
            first_differing_stage=next((row.name for row in stages if row.verdict == "differs"), None),
            output=output,
            verdict=output.verdict,
            parameters=parameter_pairs(left, right),
            masked_rows=tuple(self._masked_row(place, *row) for place in every for row in self._masked[place]),
            elsewhere=self._elsewhere(),
            notes=(),
            answer=(),
        )
        blocked = self._blocked() if self._masked else None
        own = dict.fromkeys(note for side in self._sides for note in side.notes)
        noted = (*notes(report, (left.drops, right.drops), self._counts, blocked), *own)
        noted += tuple(f"{side.label}: {note}" for side in self._sides for note in unlike_dot(side.run))
        return replace(report, notes=noted, answer=answer(report, shared, blocked))

    def _stage(self, place: int, stage: str) -> Iterator[StageRow]:
        """Yield a stage on both sides, compared; nothing where neither has it."""
        left, right = self._sides
        one, other = left.stage(place, stage), right.stage(place, stage)
        ours, theirs = left.get(place, stage), right.get(place, stage)
        named: dict[str, Any] = {"name": stage, "left": one, "right": other, "attention": self._number(place)}
        if one is None and other is None:
            return
        if ours is None or theirs is None:
            note = self._why_not_compared(place, stage, one, other)
            yield StageRow(**named, **_NOT_MEASURED, compared=CANONICAL_AXES[stage], note=note)
            return
        # Up to its scores the first attention has what it has for every query, whatever a mask leaves it.
        rows = self._masked[place] if place or stage in _AFTER_A_MASK else []
        note = ""
        if stage in ("k_proj", "v_proj") and ours.shape != theirs.shape:
            ours, theirs, note = self._in_query_heads(place, ours, theirs)

        def floor() -> float:
            return max(left.floor(place, stage, theirs, rows), right.floor(place, stage, ours, rows))

        found = compare_stage(stage, ours, theirs, floor)
        if found.verdict == "differs" and _leaves_some(stage, ours, rows):
            rest = compare_stage(stage, without(stage, ours, rows), without(stage, theirs, rows), floor)
            note = f"without the fully masked queries: {rest.verdict}" if rest.verdict != "differs" else note
        if found.compared != CANONICAL_AXES[stage]:
            note = f"compared by {found.compared}"
        yield StageRow(**named, **{**vars(found), "note": note or found.note})

    def _in_query_heads(self, place: int, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, str]:
        """Keys or values of both with one for every head, those that are shared repeated."""
        one, left = self._left.in_query_heads(place, ours)
        other, right = self._right.in_query_heads(place, theirs)
        if one.shape != other.shape:
            return ours, theirs, ""
        said = [
            f"each key/value head on the {side.name}, of {side.attentions[place][1].num_kv_heads}, stands for {each}"
            for side, each in zip(self._sides, (left, right), strict=True)
            if each > 1
        ]
        return one, other, " and ".join(said)

    def _why_not_compared(self, place: int, stage: str, one: StageSide | None, other: StageSide | None) -> str:
        for side in self._sides:
            if place >= len(side.attentions):
                return f"{side.label} has no attention {place + 1}"
            tensor = side.attentions[place][0].stages.get(stage)
            if tensor is not None and has_shape_only(side.run, tensor):
                return f"{side.label} never makes it: its kernel has more scores than are made beside it"
        for side, found in zip(self._sides, (one, other), strict=True):
            if found is not None and {"qkv", "qk", "kv", "packed"} & set(re.findall(r"\w+", found.axes)):
                how = "makes it in one product with others, and cuts that into heads and projections at once"
                return f"{side.label} {how}"
        return stage_note(stage, *((side.label, set(side.attentions[place][0].stages)) for side in self._sides))

    def _compare_outputs(
        self, left: Side, right: Side, floors: Iterable[Side] = (), *, leave_out: bool = False
    ) -> OutputDifference:
        """The outputs, judged by the larger rounding error of both, or of `floors`; with `leave_out` without the rows
        of masked queries."""
        rows, ours, theirs = self._masked_outputs, left.output, right.output
        if leave_out and ours.shape == theirs.shape:
            ours, theirs = (without("output", output, rows) for output in (ours, theirs))
        measured = tuple(floors) or (left, right)
        found = compare_stage("output", ours, theirs, lambda: max(side.output_floor(rows) for side in measured))
        return OutputDifference(**{name: getattr(found, name) for name in _MEASURED})

    def _elsewhere(self) -> OutputDifference | None:
        """The outputs without the masked rows; None where there are none, or no others, or they are not rows of it."""
        rows, shape = self._masked_outputs, self._left.rows
        if not rows or shape is None or len(rows) == shape[0] * shape[1]:
            return None
        return self._compare_outputs(*self._sides, leave_out=True)

    def _other_way(self) -> OtherWay | None:
        """What comes of the numbers of the side with a place for fewer in the other one; None where there is none."""
        found = in_the_fuller(self._shared, *self._sides)
        if found is None:
            return None
        poorer, fuller, again = found
        # The copy rounds as the fuller side does: it need not be run in float64 once more.
        both = self._compare_outputs(poorer, again, (poorer, fuller), leave_out=poorer.rows is not None)
        if both.max_abs_difference is None or both.times_noise is None:
            return None
        return OtherWay(
            source=poorer.name,
            max_abs_difference=both.max_abs_difference,
            times_noise=both.times_noise,
            verdict=both.verdict,
            sentence=f"with the numbers of {poorer.label} in {fuller.label}, both outputs are {both.verdict}",
        )

    def _masked_row(self, place: int, batch: int, query: int) -> MaskedRowPair:
        """What comes out of a query that has no key to look at, on both sides."""

        def of_weights(side: Side) -> RowContent:
            content = side.get(place, "weights")
            inside = content is not None and batch < content.shape[0] and query < content.shape[2]
            return _weights_content(content[batch, :, query]) if content is not None and inside else "finite"

        def of_output(side: Side) -> RowContent:
            return row_content(side.output[batch, query]) if side.has_row(batch, query) else "finite"

        left, right = self._sides
        found = of_weights(left), of_weights(right), of_output(left), of_output(right)
        return MaskedRowPair(batch, query, *found, self._number(place))

    def _blocked(self) -> Blocked | None:
        """What a mask puts in the place of a score on each side; None where there is no mask on a side."""
        found = [side.get(0, stage) for stage in ("masked_scores", "weights") for side in self._sides]
        known = [tensor.cpu() for tensor in found if tensor is not None]
        if len(known) != 4 or len({tensor.shape for tensor in known}) != 1:
            return None
        left, right, *weights = known
        places = (left < BLOCKED_BELOW) & (right < BLOCKED_BELOW)
        for batch, query in self._masked[0]:
            places[batch, :, query] = False
        if not bool(places.any()):
            return None
        zero = all(not bool(tensor[places].any()) for tensor in weights)
        return Blocked(_written(left[places]), _written(right[places]), int(places.sum()), zero)


def _leaves_some(stage: str, content: Tensor, rows: Rows) -> bool:
    """Whether there are such queries, and others beside them."""
    queries = content.shape[2 if "heads" in CANONICAL_AXES[stage].split() else 1]
    return 0 < len(rows) < content.shape[0] * queries


def _noise_source(left: str, right: str) -> NoiseSource:
    """What the rounding is of: the coarser dtype, and the sides that have it."""
    sides: dict[SideName, str] = {"left": left, "right": right}
    steps = {name: torch.finfo(getattr(torch, dtype)).eps for name, dtype in sides.items()}
    names = tuple(name for name in sides if steps[name] == max(steps.values()))
    return NoiseSource(sides[names[0]], names)


def _weights_content(row: Tensor) -> RowContent:
    low, high = row.double().aminmax()
    found = row_content(row)
    return "uniform" if found == "finite" and float(high - low) <= 1e-2 * float(high) else found


def _written(scores: Tensor) -> str:
    lowest = float(scores.double().min())
    return "−inf" if lowest == float("-inf") else f"about {lowest:.2g}".replace("-", "−").replace("e+", "e")
