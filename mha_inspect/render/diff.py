"""The page of `diff`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from math import isinf

from .. import text
from ..reports.diff import (
    DiffReport,
    DiffSide,
    MaskedRowPair,
    ParameterPlace,
    RowContent,
    StageRow,
    StageSide,
)
from .page import Block, Cell, Column, Facts, Page, Paragraph, Section, Table, table
from .parts import MEASURED, difference_cells, notes, shape_cell, sizes

OPENED_MARK = "*"

STAGE_COLUMNS = (
    Column("stage", tone="strong"),
    Column("left", tone="shape"),
    Column("left axes", tone="axes", into="left"),
    Column("right", tone="shape"),
    Column("right axes", tone="axes", into="right"),
    Column("largest difference", "right", drop=2),
    Column("relative", "right", drop=3),
    Column("× noise", "right"),
    Column("verdict"),
)

PARAMETER_COLUMNS = (
    Column("part", tone="strong"),
    Column("left", wrap=16),
    Column("right", wrap=16),
    Column("how one maps onto the other", wrap=20),
)


def diff_page(report: DiffReport) -> Page:
    """Return the page: how each side is run, a row a stage, where they part, the parameters, and the answer, last."""
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
    yield Section((Facts((("left", _run(report.left)), ("right", _run(report.right)))),), "how PyTorch runs them")
    yield Section(
        (Facts((("carried", report.weights.sentence), *(("left out", reason) for reason in report.weights.left_out))),),
        "the same weights",
    )
    floor = f"rounding of {report.noise.dtype} ({' and '.join(report.noise.sides)})"
    measured = [getattr(report, side).measured_against for side in report.noise.sides]
    against = MEASURED["half a digit" if "half a digit" in measured else "float64"]
    against = "reckoned from that of float32" if report.noise.dtype == "float64" else against
    blocks: list[Block] = []
    for rows in _by_attention(report):
        blocks += (_stages(rows), *_stage_notes(rows))
    yield Section(
        tuple(blocks),
        "stages",
        f"in canonical axes; noise floor: {floor}, {against}",
    )
    yield Section((Facts(tuple(_parting(report))),), "first stage that differs")
    yield Section((_outputs(report),), "output of the plain forward")
    if report.masked_rows:
        yield Section((_masked_rows(report),), "queries whose every key is masked")
    yield Section((_parameters(report),), "parameters")
    if report.notes:
        yield Section(notes(report.notes))
    yield Section(tuple(Paragraph(sentence, "strong") for sentence in report.answer), "answer")


def _run(side: DiffSide) -> str:
    parts = [f"{side.label}: {side.path.plain}"]
    if side.path.reason:
        parts.append(f"not the fast path: {side.path.reason}")
    if side.rounding_error is not None:
        exact = side.measured_against == "float64"
        error = text.small(side.rounding_error)
        parts.append(f"off float64 by at most {error}" if exact else f"rounded by {error}, {MEASURED['half a digit']}")
    return "; ".join(parts)


def _by_attention(report: DiffReport) -> list[tuple[StageRow, ...]]:
    """Return the rows of each attention; all of them where each side has one."""
    rows = [tuple(group) for _, group in groupby(report.stages, lambda row: row.attention)]
    return rows or [()]


def _stages(rows: tuple[StageRow, ...]) -> Table:
    opened = any(side is not None and side.opened for row in rows for side in (row.left, row.right))
    number = rows[0].attention if rows else None
    first = STAGE_COLUMNS[0] if number is None else replace(STAGE_COLUMNS[0], title=f"attention {number}")
    return table(
        (first, *STAGE_COLUMNS[1:]),
        (
            (
                row.name,
                *_stage_side(row.left),
                *_stage_side(row.right),
                *difference_cells(row),
            )
            for row in rows
        ),
        legend=f"{OPENED_MARK} inside a kernel of torch, opened where it ran" if opened else "",
    )


def _stage_side(side: StageSide | None) -> tuple[Cell, Cell]:
    if side is None:
        return Cell("none", "muted"), Cell("")
    shape = shape_cell(side.shape, side.axes)
    text = f"{side.count} × {shape.text}" if side.count > 1 else shape.text
    axes = "" if side.count > 1 else side.axes
    return Cell(text, shape.tone, axes, OPENED_MARK if side.opened else ""), Cell(side.axes)


def _stage_notes(rows: tuple[StageRow, ...]) -> tuple[Facts, ...]:
    items = tuple((row.name, row.note) for row in rows if row.note)
    return (Facts(items),) if items else ()


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
    rows = [("all of it" if report.elsewhere else "output", report.output)]
    if report.elsewhere is not None:
        rows.append(("without those queries", report.elsewhere))
    columns = (
        Column("output", tone="strong"),
        Column("left", tone="shape"),
        Column("right", tone="shape"),
        Column("largest difference", "right", drop=2),
        Column("relative", "right", drop=3),
        Column("× noise", "right"),
        Column("verdict"),
    )
    return table(
        columns,
        (
            (
                label,
                shape_cell(report.left.output_shape, ""),
                shape_cell(report.right.output_shape, ""),
                *difference_cells(output),
            )
            for label, output in rows
        ),
    )


def _masked_rows(report: DiffReport) -> Table:
    columns = (
        Column("attention", "right", optional=True),
        Column("batch", "right"),
        Column("queries"),
        Column("weights left"),
        Column("weights right"),
        Column("output left"),
        Column("output right"),
    )
    kinds = {"nan": "NaN", "zero": "0", "uniform": "uniform", "finite": "finite"}
    return table(
        columns,
        (
            (
                "" if attention is None else str(attention),
                str(batch),
                text.spans(row.query for row in rows),
                *(Cell(kinds[content], "bad" if content == "nan" else "") for content in contents),
            )
            for (attention, batch, *contents), rows in groupby(report.masked_rows, _of_masked_row)
        ),
    )


def _of_masked_row(row: MaskedRowPair) -> tuple[int | None, int, RowContent, RowContent, RowContent, RowContent]:
    """Return what rows have in common that become one row of the table."""
    return row.attention, row.batch, row.left_weights, row.right_weights, row.left_output, row.right_output


def _parameters(report: DiffReport) -> Table:
    total = (
        "total",
        text.count(report.left.numel),
        text.count(report.right.numel),
        "the same count" if report.left.numel == report.right.numel else "",
    )
    return table(
        PARAMETER_COLUMNS,
        (*((pair.part, _place(pair.left), _place(pair.right), pair.mapping) for pair in report.parameters), total),
        total=True,
    )


def _place(place: ParameterPlace | None) -> str:
    if place is None:
        return "none"
    each = f"{len(place.names)} of " if len(place.names) > 1 else ""
    return f"{place.where}: {each}{text.shape(place.shape)}"
