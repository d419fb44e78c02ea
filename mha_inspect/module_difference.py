"""diff of any two modules: the same input into both, and the attentions of both stage by stage, paired in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from .reports.common import Verdict
from .reports.diff import (
    DiffReport,
    NoiseSource,
    OutputDifference,
    SharedWeights,
    SideName,
    StageRow,
    StageSide,
)
from .sides.module_run import ModuleRun, ModuleSide
from .sides.module_weights import carried, pairs, share
from .sides.words import stage_note, whether
from .stage_difference import compare_stage
from .stages import CANONICAL_AXES, STAGES

_AS_THEY_ARE = SharedWeights(False, "not carried: each side has the weights that it came with.", (), None)


def diff_modules(left: ModuleSide, right: ModuleSide, *, carry: bool = True) -> DiffReport:
    """Compare two modules that get the same input, with the same weights as far as those can be carried.

    Without `carry` each keeps the weights that it has.

    The attentions of both are paired in the order in which they are computed. Stages are compared in canonical axes,
    and judged by the larger rounding error of the two, measured against float64 in this run.

    Raises `InputError` where a side cannot be run in float64.
    """
    weights = share(left, right) if carry else _AS_THEY_ARE
    ours, theirs = ModuleRun(left), ModuleRun(right)
    counts = [len(run.opened.attentions) for run in (ours, theirs)]
    several = max(counts) > 1
    rows = tuple(
        replace(row, attention=place + 1 if several else None)
        for place in range(max(counts))
        for row in _rows(place, ours, theirs)
    )
    output = _outputs(ours, theirs)
    report = DiffReport(
        left=ours.report(),
        right=theirs.report(),
        weights=weights,
        noise=_noise(left, right),
        stages=rows,
        first_differing_stage=next((row.name for row in rows if row.verdict == "differs"), None),
        output=output,
        verdict=output.verdict,
        parameters=pairs(left, right),
        masked_rows=(),
        elsewhere=None,
        notes=tuple(_notes(ours, theirs)),
        answer=(),
    )
    given = "the same weights" if weights.whole else "weights that are the same as far as they could be carried"
    given = given if carried(weights) else "weights of its own on each side"
    names = (f"the left {left.label}", f"the right {right.label}") if left.label == right.label else None
    sentence = whether(report, names or (left.label, right.label), f"with {given} and the same input")
    return replace(report, answer=(sentence, *_why(report)))


def _rows(place: int, left: ModuleRun, right: ModuleRun) -> Iterator[StageRow]:
    ours, theirs = (run.contents[place] if place < len(run.contents) else {} for run in (left, right))
    sides = {stage: (left.stage(place, stage), right.stage(place, stage)) for stage in STAGES}
    has = [frozenset(stage for stage, both in sides.items() if both[side] is not None) for side in (0, 1)]
    for stage, (one, other) in sides.items():
        if one is None and other is None:
            continue
        mine, its = ours.get(stage), theirs.get(stage)

        def floor(stage: str = stage) -> float:
            return max(left.floor(place, stage, theirs[stage]), right.floor(place, stage, ours[stage]))

        found = compare_stage(stage, mine, its, floor)
        note = found.note
        if found.verdict is None:
            note = stage_note(stage, left.side.label, has[0], right.side.label, has[1])
            if not has[0] or not has[1]:
                note = f"{(right if not has[1] else left).side.label} has no attention {place + 1}"
            elif packed := _packed((left, one), (right, other)):
                note = f"{packed} makes it in one product with others, and cuts that into heads and projections at once"
        elif found.compared != CANONICAL_AXES[stage]:
            note = f"compared by {found.compared}"
        yield StageRow(
            name=stage,
            left=one,
            right=other,
            compared=found.compared,
            max_abs_difference=found.max_abs_difference,
            relative_difference=found.relative_difference,
            noise_floor=found.noise_floor,
            times_noise=found.times_noise,
            verdict=found.verdict,
            note=note,
        )


def _packed(*sides: tuple[ModuleRun, StageSide | None]) -> str:
    """The side whose stage is one product for several projections; empty where none is."""
    words = ((run, side.axes.replace("(", "").replace(")", "").split()) for run, side in sides if side is not None)
    return next((run.side.label for run, axes in words if {"qkv", "qk", "kv", "packed"} & set(axes)), "")


def _outputs(left: ModuleRun, right: ModuleRun) -> OutputDifference:
    if left.output.shape != right.output.shape:
        return OutputDifference(None, None, None, None, "differs")
    found = compare_stage("output", left.output, right.output, lambda: max(left.output_floor, right.output_floor))
    verdict: Verdict = found.verdict or "differs"
    return OutputDifference(
        found.max_abs_difference, found.relative_difference, found.noise_floor, found.times_noise, verdict
    )


def _noise(left: ModuleSide, right: ModuleSide) -> NoiseSource:
    eps = {side.name: torch.finfo(getattr(torch, side.dtype)).eps for side in (left, right)}
    names: tuple[SideName, ...] = tuple(name for name, step in eps.items() if step == max(eps.values()))
    return NoiseSource((left if "left" in names else right).dtype, names)


def _notes(left: ModuleRun, right: ModuleRun) -> Iterator[str]:
    counts = [len(run.opened.attentions) for run in (left, right)]
    labels = [run.side.label for run in (left, right)]
    for label, count in zip(labels, counts, strict=True):
        if not count:
            yield f"No attention was found in {label}: only the outputs are compared."
    if counts[0] != counts[1] and all(counts):
        yield (
            f"{labels[0]} has {counts[0]} attention{'s' if counts[0] > 1 else ''} and {labels[1]} has {counts[1]}: "
            f"they are paired in the order in which they are computed, the first {min(counts)}."
        )
    if any(run.side.own.module.training for run in (left, right)):
        yield "In training mode dropout may draw other elements on each side; the noise floor is measured without it."


def _why(report: DiffReport) -> Iterator[str]:
    if report.first_differing_stage is None and report.verdict == "differs" and report.stages:
        yield "Every stage that both have is the same: what differs comes after the attention, or around it."
    if not carried(report.weights):
        yield f"The weights could not be carried: {' '.join(report.weights.left_out)}"
