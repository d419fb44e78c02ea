"""What a diff of two runs looks at whatever they are of: outputs, what a mask blocks, queries without a key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...measure.stage_difference import BLOCKED_BELOW, compare_stage
from ...naming.stages import CANONICAL_AXES
from ...record.rounding import rounding_error
from ...reports.common import Verdict
from ...reports.diff import (
    MaskedRowPair,
    NoiseSource,
    OtherWay,
    OutputDifference,
    RowContent,
    SideName,
    StageRow,
    StageSide,
)
from .words import Blocked

Rows = Sequence[tuple[int, int]]
"""(batch, query) of queries whose every key is masked."""

_OF_KEYS = ("key", "value", "k_proj", "v_proj", "k_heads", "v_heads")


class ComparedRun(ABC):
    """One side, run."""

    @property
    @abstractmethod
    def unit(self) -> float:
        """What a measured rounding error counts: that of float64 is measured in float32, and is less."""

    @property
    @abstractmethod
    def output(self) -> Tensor:
        """What the plain forward returns, in canonical axes where they are known."""

    @property
    @abstractmethod
    def rows(self) -> tuple[int, int] | None:
        """How many sequences and queries the output has, where it is `batch query` and one more."""

    @abstractmethod
    def measured_outputs(self) -> tuple[Tensor, Tensor]:
        """The output as its rounding is measured, computed step by step, and that in float64."""

    def output_floor(self, rows: Rows = ()) -> float:
        """Rounding error of the output, computed step by step, without these queries."""
        return self._apart(*self.measured_outputs(), rows) * self.unit

    def output_error(self, rows: Rows = ()) -> float:
        """How far the plain output is from that in float64, without these queries."""
        return self._apart(self.output, self.measured_outputs()[1], rows)

    def _apart(self, output: Tensor, exact: Tensor, rows: Rows) -> float:
        if self.rows is not None:
            output, exact = (without("output", tensor, rows) for tensor in (output, exact))
        return rounding_error(output, exact)


def without(stage: str, content: Tensor, rows: Rows) -> Tensor:
    """The stage, in canonical axes, with zeros for these queries; those that it does not have are passed over."""
    if stage in _OF_KEYS or not rows:
        return content
    cleared = content.clone()
    by_query = cleared.transpose(1, 2) if "heads" in CANONICAL_AXES[stage].split() else cleared
    for batch, query in rows:
        if batch < by_query.shape[0] and query < by_query.shape[1]:
            by_query[batch, query] = 0
    return cleared


def _leaves_some(stage: str, content: Tensor, rows: Rows) -> bool:
    """Whether there are such queries, and others beside them."""
    queries = content.shape[2 if "heads" in CANONICAL_AXES[stage].split() else 1]
    return 0 < len(rows) < content.shape[0] * queries


def stage_row(
    stage: str,
    sides: tuple[StageSide | None, StageSide | None],
    contents: tuple[Tensor | None, Tensor | None],
    rows: Rows,
    floor: Callable[[], float],
    missing: Callable[[], str],
    note: str = "",
) -> StageRow:
    """A stage on both sides, compared.

    Args:
        stage: of `stages.STAGES`.
        sides: how each side has it; None where it does not.
        contents: in canonical axes; None where they are not known.
        rows: queries whose every key is masked.
        floor: measures the rounding error, without these queries.
        missing: says why it was not compared, where it was not.
        note: what is to be said of the contents.
    """
    ours, theirs = contents
    found = compare_stage(stage, ours, theirs, floor)
    if found.verdict is None:
        note = missing()
    elif found.verdict == "differs" and ours is not None and theirs is not None and _leaves_some(stage, ours, rows):
        rest = compare_stage(stage, without(stage, ours, rows), without(stage, theirs, rows), floor)
        note = f"without the fully masked queries: {rest.verdict}" if rest.verdict != "differs" else note
    if found.compared != CANONICAL_AXES[stage]:
        note = f"compared by {found.compared}"
    return StageRow(
        name=stage,
        left=sides[0],
        right=sides[1],
        compared=found.compared,
        max_abs_difference=found.max_abs_difference,
        relative_difference=found.relative_difference,
        noise_floor=found.noise_floor,
        times_noise=found.times_noise,
        verdict=found.verdict,
        note=note or found.note,
    )


def compare_outputs(left: ComparedRun, right: ComparedRun, rows: Rows, *, leave_out: bool = False) -> OutputDifference:
    """The outputs of the plain forwards, judged by the rounding of the step by step computation.

    With `leave_out` the rows are not looked at.
    """
    ours, theirs = left.output, right.output
    if ours.shape != theirs.shape:
        return OutputDifference(None, None, None, None, "differs")
    if leave_out:
        ours, theirs = (without("output", side, rows) for side in (ours, theirs))
    found = compare_stage("output", ours, theirs, lambda: max(left.output_floor(rows), right.output_floor(rows)))
    verdict: Verdict = found.verdict or "differs"
    return OutputDifference(
        found.max_abs_difference, found.relative_difference, found.noise_floor, found.times_noise, verdict
    )


def compare_elsewhere(left: ComparedRun, right: ComparedRun, rows: Rows) -> OutputDifference | None:
    """The outputs without these rows; None where there are none, or no others, or the outputs are not laid out so."""
    if not rows or left.rows is None or len(rows) == left.rows[0] * left.rows[1]:
        return None
    return compare_outputs(left, right, rows, leave_out=True)


def other_way(
    poorer: ComparedRun, fuller: ComparedRun, rows: Rows, source: SideName, name: str, other: str
) -> OtherWay | None:
    """What comes of the numbers of the side that has a place for fewer in the other one; None where it cannot be told.

    Args:
        poorer: the side that they are of.
        fuller: the other one, with these numbers.
        rows: queries whose every key is masked: they are not looked at.
        source: which side the poorer is.
        name: what to call it.
        other: what to call the other one.
    """
    found = compare_outputs(poorer, fuller, rows, leave_out=poorer.rows is not None)
    if found.max_abs_difference is None or found.times_noise is None:
        return None
    return OtherWay(
        source=source,
        max_abs_difference=found.max_abs_difference,
        times_noise=found.times_noise,
        verdict=found.verdict,
        sentence=f"with the numbers of {name} in {other}, both outputs are {found.verdict}",
    )


def noise_source(**dtypes: str) -> NoiseSource:
    """What the rounding is of, by the dtype of each side: `noise_source(left="float32", right="bfloat16")`."""
    steps = {name: torch.finfo(getattr(torch, dtype)).eps for name, dtype in dtypes.items()}
    sides: tuple[SideName, ...] = ("left", "right")
    names = tuple(name for name in sides if steps[name] == max(steps.values()))
    return NoiseSource(dtypes[names[0]], names)


def masked_queries(scores: Tensor) -> list[tuple[int, int]]:
    """(batch, query) of queries to which no key is left in at least one head.

    Args:
        scores: `batch heads query key`, masked.
    """
    rows = (scores < BLOCKED_BELOW).all(dim=-1).any(dim=1)
    return [(int(batch), int(query)) for batch, query in rows.nonzero().tolist()]


def masked_row(
    row: tuple[int, int], weights: Sequence[Tensor | None], runs: Sequence[ComparedRun], attention: int | None = None
) -> MaskedRowPair:
    """What comes out of a query that has no key to look at, on both sides.

    Args:
        row: (batch, query).
        weights: of the left and of the right, `batch heads query key`; None where they are not known.
        runs: the left and the right.
        attention: which of several, from 1.
    """
    batch, query = row

    def of_weights(content: Tensor | None) -> RowContent:
        inside = content is not None and batch < content.shape[0] and query < content.shape[2]
        return _content(content[batch, :, query]) if content is not None and inside else "finite"

    def of_output(run: ComparedRun) -> RowContent:
        inside = run.rows is not None and batch < run.rows[0] and query < run.rows[1]
        kind = _content(run.output[batch, query]) if inside else "finite"
        return "finite" if kind == "uniform" else kind

    (left, right), (ours, theirs) = weights, runs
    found = (of_weights(left), of_weights(right), of_output(ours), of_output(theirs))
    return MaskedRowPair(batch, query, *found, attention)


def _content(row: Tensor) -> RowContent:
    if bool(row.isnan().any()):
        return "nan"
    if not bool(row.any()):
        return "zero"
    low, high = row.double().aminmax()
    return "uniform" if float(high - low) <= 1e-2 * float(high) else "finite"


def blocked(scores: Sequence[Tensor | None], weights: Sequence[Tensor | None], rows: Rows) -> Blocked | None:
    """What a mask puts in the place of a score on each side; None where there is no mask on a side.

    Args:
        scores: of the left and of the right, masked.
        weights: likewise.
        rows: queries whose every key is masked: they are not looked at.
    """
    known = [tensor for tensor in (*scores, *weights) if tensor is not None]
    if len(known) != 4 or len({tensor.shape for tensor in known}) != 1:
        return None
    scores, weights = ([tensor.cpu() for tensor in pair] for pair in (known[:2], known[2:]))
    places = (scores[0] < BLOCKED_BELOW) & (scores[1] < BLOCKED_BELOW)
    for batch, query in rows:
        places[batch, :, query] = False
    if not bool(places.any()):
        return None
    zero = all(not bool(tensor[places].any()) for tensor in weights)
    return Blocked(_written(scores[0][places]), _written(scores[1][places]), int(places.sum()), zero)


def _written(scores: Tensor) -> str:
    lowest = float(scores.double().min())
    return "−inf" if lowest == float("-inf") else f"about {lowest:.2g}".replace("-", "−").replace("e+", "e")
