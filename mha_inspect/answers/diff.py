"""diff: two subjects with the same input, and the same weights as far as those can be carried, stage by stage."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import torch

from ..measure.stage_difference import StageDifference
from ..naming.stage_facts import unlike_dot
from ..naming.stages import CANONICAL_AXES
from ..reports.common import Difference
from ..reports.diff import DiffReport, NoiseSource, SideName, StageRow, StageSide
from .comparison import ComparedStage, Comparison
from .diff_answer import answer, notes, stage_note
from .masked_queries import fate_of, masked_sentence
from .run_report import has_shape_only
from .shared_weights import AS_THEY_ARE, share
from .side import Side


def diff(left: Side, right: Side, *, carry: bool = True) -> DiffReport:
    """Compare two sides that get the same input, with the same weights as far as those can be carried.

    Without `carry` each keeps the weights that it has. The attentions of both are paired in the order in which they are
    computed. Stages are compared in canonical axes, and judged by the larger rounding error of the two, measured
    against float64 in this run.

    Raises:
        InputError: a side cannot be run in float64.
        WeightsError: both are layers, and the weights of the one cannot be those of the other.
    """
    shared = share(left, right) if carry else AS_THEY_ARE
    comparison, counts = Comparison(left, right), [len(side.attentions) for side in (left, right)]
    stages = [row for place in range(max(counts)) for row in _stages(comparison, place, several=max(counts) > 1)]
    masked = tuple(sorted({row for rows in comparison.masked for row in rows}))
    output = comparison.output(masked)
    report = DiffReport(
        left=left.report(masked),
        right=right.report(masked),
        weights=shared.report,
        noise=_noise_source(left.dtype, right.dtype),
        stages=tuple(stages),
        first_differing_stage=next((row.name for row in stages if row.verdict == "differs"), None),
        output=Difference(**_numbers(output)),
        verdict=output.verdict,
        notes=(),
        answer=(),
    )
    of_sides = dict.fromkeys(note for side in (left, right) for note in side.notes)
    noted = (*notes(report, (left.drops, right.drops), counts), *of_sides)
    noted += tuple(f"{side.label}: {note}" for side in (left, right) for note in unlike_dot(side.run))
    return replace(report, notes=noted, answer=(*answer(report, shared), *_masked(comparison)))


def _stages(comparison: Comparison[Side], place: int, *, several: bool) -> list[StageRow]:
    """Return the rows of the attentions in one place."""
    left, right = comparison.left, comparison.right
    rows = []
    for stage in comparison.rows(place):
        ours, theirs = left.stage(place, stage.name), right.stage(place, stage.name)
        measured = stage.difference
        rows.append(
            StageRow(
                **_numbers(measured),
                name=stage.name,
                left=ours,
                right=theirs,
                compared=CANONICAL_AXES[stage.name] if measured is None else measured.compared,
                note=_why_not_compared((left, right), stage, ours, theirs) if measured is None else measured.note,
                attention=place + 1 if several else None,
            )
        )
    return rows


def _numbers(difference: StageDifference | None) -> dict[str, Any]:
    """Return what was measured, by the names that reports have for it; None throughout where nothing was."""
    return {field.name: getattr(difference, field.name, None) for field in fields(Difference)}


def _why_not_compared(
    sides: tuple[Side, Side], stage: ComparedStage, left: StageSide | None, right: StageSide | None
) -> str:
    """Return why a stage that a side has was not compared."""
    for side in sides:
        if stage.place >= len(side.attentions):
            return f"{side.label} has no attention {stage.place + 1}"
        tensor = side.attentions[stage.place][0].stages.get(stage.name)
        if tensor is not None and has_shape_only(side.run, tensor):
            return f"{side.label} never makes it: its kernel has more scores than are made beside it"
    for side, of_side in zip(sides, (left, right), strict=True):
        if of_side is not None and {"qkv", "qk", "kv", "packed"} & set(re.findall(r"\w+", of_side.axes)):
            how = "makes it in one product with others, and cuts that into heads and projections at once"
            return f"{side.label} {how}"
    return stage_note(stage.name, *((side.label, set(side.attentions[stage.place][0].stages)) for side in sides))


def _masked(comparison: Comparison[Side]) -> tuple[str, ...]:
    """Return a sentence of the queries that see no key, in the first attention that has any."""
    place = next((place for place, rows in enumerate(comparison.masked) if rows), None)
    if place is None:
        return ()
    rows, sides = comparison.masked[place], (comparison.left, comparison.right)
    ours, theirs = (fate_of(side.content(place, "weights"), rows) for side in sides)
    left, right = (side.label for side in sides)
    different = f"{ours} in {left} and {theirs} in {right}"
    return (masked_sentence(rows, f"their weights are {f'{ours} on both sides' if ours == theirs else different}"),)


def _noise_source(left: str, right: str) -> NoiseSource:
    """Return what the rounding is of: the coarser dtype, and the sides that have it."""
    sides: dict[SideName, str] = {"left": left, "right": right}
    steps = {name: torch.finfo(getattr(torch, dtype)).eps for name, dtype in sides.items()}
    names = tuple(name for name in sides if steps[name] == max(steps.values()))
    return NoiseSource(sides[names[0]], names)
