"""The page of `diff`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from math import isinf

from .. import text
from ..reports.diff import DiffReport, DiffSide, StageRow, StageSide
from .page import Block, Cell, Column, Page, Section, Table, facts, section, table
from .parts import MEASURED, answered, difference, difference_columns, notes, shape_cell, sizes


def page(report: DiffReport) -> Page:
    """Return the page: how each side is run, a row a stage, where they part, and the answer, last."""
    left, right = report.left, report.right
    environments = [side.environment for side in (left, right)]
    made_with = [" and ".join(dict.fromkeys(e.device for e in environments))]
    made_with.append(" and ".join(dict.fromkeys(e.dtype for e in environments)))
    made_with += [f"seed {left.environment.seed}", f"torch {left.environment.torch}"]
    # What is the left side's alone stands in its label: here it would read as that of both.
    shared = replace(
        left.layer, spec={name: value for name, value in left.layer.spec.items() if name not in left.settings}
    )
    return Page(
        f"layer {left.label} against {right.label}", sizes(shared), ", ".join(made_with), tuple(_sections(report))
    )


def _sections(report: DiffReport) -> Iterator[Section]:
    yield section("how PyTorch runs them", facts(("left", _run(report.left)), ("right", _run(report.right))))
    left_out = (("left out", reason) for reason in report.weights.left_out)
    yield section("the same weights", facts(("carried", report.weights.sentence), *left_out))
    floor = f"rounding of {report.noise.dtype} ({' and '.join(report.noise.sides)})"
    measured = [getattr(report, side).measured_against for side in report.noise.sides]
    against = MEASURED["half a digit" if "half a digit" in measured else "float64"]
    against = "reckoned from that of float32" if report.noise.dtype == "float64" else against
    blocks: list[Block] = []
    for rows in [tuple(group) for _, group in groupby(report.stages, lambda row: row.attention)] or [()]:
        blocks.append(_stages(rows))
        if noted := [(row.name, row.note) for row in rows if row.note]:
            blocks.append(facts(*noted))
    yield section("stages", *blocks, detail=f"in canonical axes; noise floor: {floor}, {against}")
    yield section("first stage that differs", facts(*_parting(report)))
    yield section("output of the plain forward", _outputs(report))
    yield section("", *notes(report.notes))
    yield answered(report.answer)


def _run(side: DiffSide) -> str:
    parts = [f"{side.label}: {side.path.plain}"]
    if side.path.reason:
        parts.append(f"not the fast path: {side.path.reason}")
    if side.rounding_error is not None:
        exact = side.measured_against == "float64"
        error = text.small(side.rounding_error)
        parts.append(f"off float64 by at most {error}" if exact else f"rounded by {error}, {MEASURED['half a digit']}")
    return "; ".join(parts)


def _stages(rows: tuple[StageRow, ...]) -> Table:
    opened = any(side is not None and side.opened for row in rows for side in (row.left, row.right))
    number = rows[0].attention if rows else None
    columns = [
        Column("stage" if number is None else f"attention {number}", tone="strong"),
        Column("left", tone="shape"),
        Column("left axes", tone="axes", into="left"),
        Column("right", tone="shape"),
        Column("right axes", tone="axes", into="right"),
        *difference_columns("relative", (2, 3)),
    ]
    cells = [(row.name, *_side(row.left), *_side(row.right), *difference(row)) for row in rows]
    return table(columns, cells, legend="* inside a kernel of torch, opened where it ran" if opened else "")


def _side(side: StageSide | None) -> tuple[Cell, str]:
    """Return the shape of a stage, and its axes."""
    if side is None:
        return Cell("none", "muted"), ""
    shape, mark = shape_cell(side.shape, side.axes), "*" if side.opened else ""
    if side.count > 1:
        return Cell(f"{side.count} × {shape.text}", shape.tone, mark=mark), side.axes
    return replace(shape, mark=mark), side.axes


def _parting(report: DiffReport) -> Iterator[tuple[str, str]]:
    # Of several attentions each has a stage of this name: the first that differs is meant.
    first = report.first_differing_stage
    row = next((row for row in report.stages if row.name == first and row.verdict == "differs"), None)
    if row is None:
        compared = any(row.verdict for row in report.stages)
        yield "stage", f"none: {'every stage that both have is the same' if compared else 'there is none in both'}"
        return
    yield "stage", _distance(row) + (f", in attention {row.attention}" if row.attention else "")
    for name, side in (("left", row.left), ("right", row.right)):
        if side is not None:
            yield name, "given" if side.op is None else f"{side.op.name} at {side.op.source}"


def _distance(row: StageRow) -> str:
    if row.times_noise is None:
        return f"{row.name}, of other sizes"
    if row.max_abs_difference is not None and isinf(row.max_abs_difference):
        return f"{row.name}, not finite on one side alone"
    return f"{row.name}, {text.times(row.times_noise)} times the noise floor"


def _outputs(report: DiffReport) -> Table:
    columns = [
        Column("output", tone="strong"),
        Column("left", tone="shape"),
        Column("right", tone="shape"),
        *difference_columns("relative", (2, 3)),
    ]
    shapes = [shape_cell(side.output_shape, "") for side in (report.left, report.right)]
    return table(columns, [("output", *shapes, *difference(report.output))])
