"""diff: two layers, or one under two settings, with the same weights and the same input, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .device import resolve
from .difference_words import Blocked, Measured, answer, notes, stage_note
from .errors import DeviceError, WeightsError
from .fit import require_fit
from .layers.weights import read_weights
from .parameter_pairs import parameter_pairs
from .reports.common import Verdict
from .reports.diff import (
    DiffReport,
    MaskedRowPair,
    NoiseSource,
    OtherWay,
    OutputDifference,
    RowContent,
    SharedWeights,
    SideName,
    StageRow,
)
from .shared_weights import draw, finer_dtype
from .side_run import SideRun
from .side_settings import Side, make_sides
from .spec import AttentionSpec, InputSpec, RunSpec
from .stage_difference import BLOCKED_BELOW, StageDifference, compare_stage
from .stages import STAGES

_BY_HEAD = ("q_heads", "scores", "masked_scores", "weights", "context")
"""Stages whose queries are the third axis; of the others that have queries it is the second."""
_OF_KEYS = ("key", "value", "k_proj", "v_proj", "k_heads", "v_heads")


def diff_spec(
    left: str,
    right: str,
    spec: AttentionSpec,
    inputs: InputSpec,
    run: RunSpec,
    *,
    left_set: Mapping[str, Any] | None = None,
    right_set: Mapping[str, Any] | None = None,
) -> DiffReport:
    """Compare two layers built from the same spec, each with settings of its own where there are any.

    Both get the same weights as far as each has a place for them, and the same input. Stages are compared in canonical
    axes; the outputs are those of the plain forwards, as PyTorch runs them. What a difference means is judged by the
    rounding error of the coarser of the two, measured against float64 in this run.

    Args:
        left: name in the registry of layers.
        right: likewise; the same name for one layer under two settings.
        spec: what both have, but for the settings below and those that a layer has no use for.
        inputs: likewise.
        run: likewise.
        left_set: fields of the three specs, by name, that the left side has for itself.
        right_set: likewise.

    Raises:
        SpecError: a layer or a setting is unknown, or the sizes of the two cannot agree.
        InputError: a file or a mask does not fit.
        WeightsError: the weights of the one cannot be carried into the other.
        DeviceError: the device is not there, cannot run the dtype, or has no numbers (meta).
        DoesNotFitError: the runs would need more memory than is free.
    """
    sides = make_sides(left, right, spec, inputs, run, left_set or {}, right_set or {})
    for side in sides:
        if resolve(side.run.device, side.spec.dtype).type == "meta":
            raise DeviceError(
                "device meta has shapes and no numbers, and diff compares numbers. Try --device cpu, or "
                "`mha-inspect trace --device meta` for the shapes."
            )
        require_fit(side.spec, side.inputs, side.run, side.kind.name, keep=True)
    weights = draw(*sides)
    ours, theirs = (SideRun(side, part, finer_dtype(*sides)) for side, part in zip(sides, weights, strict=True))
    rows = _fully_masked(ours, theirs)
    stages = tuple(_stage_row(stage, ours, theirs, rows) for stage in STAGES if _either_has(stage, ours, theirs))
    differing = [row.name for row in stages if row.verdict == "differs"]
    output = _outputs(ours, theirs)
    elsewhere = _outputs(ours, theirs, without=rows) if rows and ours.rows_of_output() else None
    pairs = parameter_pairs(*sides, (ours.forward.module, theirs.forward.module))
    report = DiffReport(
        left=ours.report(),
        right=theirs.report(),
        weights=_shared_weights(ours, theirs, rows),
        noise=_noise_source(*sides),
        stages=stages,
        first_differing_stage=differing[0] if differing else None,
        output=output,
        verdict=output.verdict,
        parameters=pairs,
        masked_rows=tuple(_masked_row(ours, theirs, *row) for row in rows),
        elsewhere=elsewhere,
        notes=(),
        answer=(),
    )
    measured = Measured(report, *sides, blocked=_blocked(ours, theirs, rows))
    return replace(report, notes=notes(measured), answer=answer(measured))


def _either_has(stage: str, left: SideRun, right: SideRun) -> bool:
    return stage in left.opened.stages or stage in right.opened.stages


def _stage_row(stage: str, left: SideRun, right: SideRun, rows: Sequence[tuple[int, int]]) -> StageRow:
    ours, theirs = left.opened.get(stage), right.opened.get(stage)
    found = compare_stage(stage, ours, theirs, _floor(stage, left, right, ours, theirs))
    note = found.note if found.verdict is not None else stage_note(stage, *_having(stage, left), *_having(stage, right))
    if rows and stage not in _OF_KEYS and found.times_noise == float("inf") and ours is not None and theirs is not None:
        rest = compare_stage(
            stage,
            _without(stage, ours, rows),
            _without(stage, theirs, rows),
            _floor(stage, left, right, ours, theirs),
        )
        note = f"without the fully masked queries: {rest.verdict}"
    return StageRow(
        name=stage,
        left=left.stage(stage),
        right=right.stage(stage),
        compared=found.compared,
        max_abs_difference=found.max_abs_difference,
        relative_difference=found.relative_difference,
        noise_floor=found.noise_floor,
        times_noise=found.times_noise,
        verdict=found.verdict,
        note=note,
    )


def _having(stage: str, side: SideRun) -> tuple[str, frozenset[str]]:
    return side.side.label, frozenset(side.opened.stages)


def _floor(
    stage: str, left: SideRun, right: SideRun, ours: Tensor | None, theirs: Tensor | None
) -> Callable[[], float]:
    def measure() -> float:
        assert ours is not None
        assert theirs is not None
        return max(left.stage_floor(stage, theirs), right.stage_floor(stage, ours))

    return measure


def _without(stage: str, content: Tensor, rows: Sequence[tuple[int, int]]) -> Tensor:
    """The stage with zeros for these queries."""
    cleared = content.clone()
    for batch, query in rows:
        if stage in _BY_HEAD:
            cleared[batch, :, query] = 0
        else:
            cleared[batch, query] = 0
    return cleared


def _outputs(left: SideRun, right: SideRun, without: Sequence[tuple[int, int]] = ()) -> OutputDifference:
    """The outputs of the plain forwards, judged by the rounding of the step by step computation."""
    ours, theirs = left.output, right.output
    if ours.shape != theirs.shape:
        return OutputDifference(None, None, None, None, "differs")
    if without:
        ours, theirs = (_without("output", side, without) for side in (ours, theirs))
    found: StageDifference = compare_stage("output", ours, theirs, lambda: max(left.output_floor, right.output_floor))
    verdict: Verdict = found.verdict or "differs"
    return OutputDifference(
        found.max_abs_difference, found.relative_difference, found.noise_floor, found.times_noise, verdict
    )


def _noise_source(left: Side, right: Side) -> NoiseSource:
    eps = {side.name: torch.finfo(getattr(torch, side.spec.dtype)).eps for side in (left, right)}
    names: tuple[SideName, ...] = tuple(side.name for side in (left, right) if eps[side.name] == max(eps.values()))
    return NoiseSource((left if "left" in names else right).spec.dtype, names)


def _shared_weights(left: SideRun, right: SideRun, rows: Sequence[tuple[int, int]]) -> SharedWeights:
    reasons = (*left.left_out, *right.left_out)
    if not reasons:
        return SharedWeights(True, "every number of the one is in the other.", (), None)
    sentence = "as far as both have a place for them: each has all that it can hold of the same numbers."
    return SharedWeights(False, sentence, tuple(dict.fromkeys(reasons)), _other_way(left, right, rows))


def _other_way(left: SideRun, right: SideRun, rows: Sequence[tuple[int, int]]) -> OtherWay | None:
    """The weights of the side that left something out, in the one that has a place for all."""
    if bool(left.left_out) == bool(right.left_out):
        return None
    poorer, richer = (left, right) if left.left_out else (right, left)
    try:
        weights = read_weights(poorer.forward.module)
        if weights.num_heads != richer.side.spec.num_heads:
            weights = weights.with_heads(richer.side.spec.num_heads)
        again = SideRun(richer.side, weights, finer_dtype(left.side, right.side))
    except WeightsError:
        return None
    if again.left_out:
        return None
    found = _outputs(poorer, again, without=rows if poorer.rows_of_output() else ())
    if found.max_abs_difference is None or found.times_noise is None:
        return None
    return OtherWay(
        source=poorer.side.name,
        max_abs_difference=found.max_abs_difference,
        times_noise=found.times_noise,
        verdict=found.verdict,
        sentence=f"with the numbers of {poorer.side.label} in {richer.side.label}, both outputs are {found.verdict}",
    )


def _fully_masked(left: SideRun, right: SideRun) -> list[tuple[int, int]]:
    """(batch, query) of every row that has no key to look at, on either side."""
    rows = [row for side in (left, right) for row in side.forward.inputs.fully_masked_rows(side.side.spec.num_heads)]
    return sorted(set(rows))


def _masked_row(left: SideRun, right: SideRun, batch: int, query: int) -> MaskedRowPair:
    def weights(side: SideRun) -> RowContent:
        content = side.opened.get("weights")
        return "finite" if content is None else _content(content[batch, :, query])

    def output(side: SideRun) -> RowContent:
        kind = _content(side.output[batch, query]) if side.rows_of_output() else "finite"
        return "finite" if kind == "uniform" else kind

    return MaskedRowPair(batch, query, weights(left), weights(right), output(left), output(right))


def _content(row: Tensor) -> RowContent:
    if bool(row.isnan().any()):
        return "nan"
    if not bool(row.any()):
        return "zero"
    low, high = row.double().aminmax()
    return "uniform" if float(high - low) <= 1e-2 * float(high) else "finite"


def _blocked(left: SideRun, right: SideRun, rows: Sequence[tuple[int, int]]) -> Blocked | None:
    """What a mask puts in the place of a score on each side; None where there is no mask on a side."""
    scores = [side.opened.get("masked_scores") for side in (left, right)]
    weights = [side.opened.get("weights") for side in (left, right)]
    if scores[0] is None or scores[1] is None or weights[0] is None or weights[1] is None:
        return None
    if len({tensor.shape for tensor in (*scores, *weights) if tensor is not None}) != 1:
        return None
    places = (scores[0] < BLOCKED_BELOW).cpu() & (scores[1] < BLOCKED_BELOW).cpu()
    for batch, query in rows:
        places[batch, :, query] = False
    if not bool(places.any()):
        return None
    words = [_written(tensor.cpu()[places]) for tensor in scores if tensor is not None]
    zero = all(not bool(tensor.cpu()[places].any()) for tensor in weights if tensor is not None)
    return Blocked(words[0], words[1], int(places.sum()), zero)


def _written(blocked: Tensor) -> str:
    lowest = float(blocked.double().min())
    return "−inf" if lowest == float("-inf") else f"about {lowest:.2g}".replace("-", "−").replace("e+", "e")
