"""diff of any two modules: the same input into both, and the attentions of both stage by stage, paired in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from ..naming.stages import STAGES
from ..reports.diff import DiffReport, OtherWay, SharedWeights, StageRow, StageSide
from .sides.compared import (
    Rows,
    blocked,
    compare_elsewhere,
    compare_outputs,
    masked_row,
    noise_source,
    other_way,
    stage_row,
)
from .sides.module_run import ModuleRun, ModuleSide
from .sides.module_weights import carried, in_the_fuller, pairs, share
from .sides.words import note_of_masks, of_accuracy, of_masks, of_weights, stage_note, whether

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
    masked = [sorted({*ours.masked_queries(n), *theirs.masked_queries(n)}) for n in range(max(counts))]
    rows = tuple(
        replace(row, attention=place + 1 if several else None)
        for place in range(max(counts))
        for row in _rows(place, ours, theirs, masked[place])
    )
    every = _of_output(ours, masked)
    barred = blocked(
        _both("masked_scores", 0, ours, theirs), _both("weights", 0, ours, theirs), masked[0] if masked else ()
    )
    output = compare_outputs(ours, theirs, every)
    report = DiffReport(
        left=ours.report(every),
        right=theirs.report(every),
        weights=replace(weights, other_way=_other_way(ours, theirs, every)) if carried(weights) else weights,
        noise=noise_source(left=left.dtype, right=right.dtype),
        stages=rows,
        first_differing_stage=next((row.name for row in rows if row.verdict == "differs"), None),
        output=output,
        verdict=output.verdict,
        parameters=pairs(left, right),
        masked_rows=tuple(
            masked_row(row, _both("weights", place, ours, theirs), (ours, theirs), place + 1 if several else None)
            for place, rows_of_it in enumerate(masked)
            for row in rows_of_it
        ),
        elsewhere=compare_elsewhere(ours, theirs, every),
        notes=(*_notes(ours, theirs), *note_of_masks(barred)),
        answer=(),
    )
    given = "the same weights" if weights.whole else "weights that are the same as far as they could be carried"
    given = given if carried(weights) else "weights of its own on each side"
    same_name = left.label == right.label
    names = (f"the left {left.label}", f"the right {right.label}") if same_name else (left.label, right.label)
    sentence = whether(report, names, f"with {given} and the same input")
    why = (*_why(report), *of_weights(report, names), *of_masks(report, names, barred), *of_accuracy(report, names))
    return replace(report, answer=(sentence, *why))


def _other_way(left: ModuleRun, right: ModuleRun, rows: Rows) -> OtherWay | None:
    """The numbers of a layer that has a place for fewer, in a copy of the target beside it."""
    for poorer, richer in ((left, right), (right, left)):
        fuller = in_the_fuller(poorer.side, richer.side)
        if fuller is not None:
            return other_way(poorer, ModuleRun(fuller), rows, poorer.side.name, poorer.side.label, richer.side.label)
    return None


def _both(stage: str, place: int, *runs: ModuleRun) -> list[Tensor | None]:
    return [run.contents[place].get(stage) if place < len(run.contents) else None for run in runs]


def _of_output(run: ModuleRun, masked: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The masked queries of all attentions that are rows of the output."""
    rows = run.rows
    if rows is None:
        return []
    return sorted({(batch, query) for every in masked for batch, query in every if batch < rows[0] and query < rows[1]})


def _rows(place: int, left: ModuleRun, right: ModuleRun, rows: Rows) -> Iterator[StageRow]:
    ours, theirs = (run.contents[place] if place < len(run.contents) else {} for run in (left, right))
    sides = {stage: (left.stage(place, stage), right.stage(place, stage)) for stage in STAGES}
    has = [frozenset(stage for stage, both in sides.items() if both[side] is not None) for side in (0, 1)]
    for stage, (one, other) in sides.items():
        if one is None and other is None:
            continue

        def floor(stage: str = stage) -> float:
            return max(left.floor(place, stage, theirs[stage], rows), right.floor(place, stage, ours[stage], rows))

        def missing(stage: str = stage) -> str:
            one, other = sides[stage]
            if not has[0] or not has[1]:
                return f"{(right if not has[1] else left).side.label} has no attention {place + 1}"
            if packed := _packed((left, one), (right, other)):
                return f"{packed} makes it in one product with others, and cuts that into heads and projections at once"
            return stage_note(stage, left.side.label, has[0], right.side.label, has[1])

        yield stage_row(stage, (one, other), (ours.get(stage), theirs.get(stage)), rows, floor, missing)


def _packed(*sides: tuple[ModuleRun, StageSide | None]) -> str:
    """The side whose stage is one product for several projections; empty where none is."""
    words = ((run, side.axes.replace("(", "").replace(")", "").split()) for run, side in sides if side is not None)
    return next((run.side.label for run, axes in words if {"qkv", "qk", "kv", "packed"} & set(axes)), "")


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
    compared = any(row.verdict for row in report.stages)
    if report.first_differing_stage is None and report.verdict == "differs" and compared:
        output = next((row for row in report.stages if row.name == "output" and row.verdict is None), None)
        after = ": what differs comes after the attention, or around it" if output is None else f"; {output.note}"
        yield f"Every stage that both have is the same{after}."
    if not carried(report.weights):
        yield f"The weights could not be carried: {' '.join(report.weights.left_out)}"
