"""The pages of `diff`: of two layers, and of two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import isinf

from .. import text
from ..reports.diff import (
    CheckpointDiffReport,
    CheckpointSide,
    DiffReport,
    DiffSide,
    PartPair,
    StageRow,
    StageSide,
    TensorPair,
)
from .page import Block, Cell, Column, Page, Section, Table, Tone, facts, section, table
from .parts import MEASURED, answered, difference_columns, folded, notes, number, shape_cell, sizes


def diff_page(report: DiffReport) -> Page:
    """Return the page: how each side is run, one row per stage, the first difference, and the answer."""
    left, right = report.left, report.right
    environments = [side.environment for side in (left, right)]
    made_with = [" and ".join(dict.fromkeys(e.device for e in environments))]
    made_with.append(" and ".join(dict.fromkeys(e.dtype for e in environments)))
    made_with += [f"seed {left.environment.seed}", f"torch {left.environment.torch}"]
    # What is the left side's alone stands in its label: here it would read as that of both.
    spec = {name: value for name, value in left.layer.spec.items() if name not in left.settings}
    heading = f"layer {left.label} against {right.label}", sizes(replace(left.layer, spec=spec)), ", ".join(made_with)
    return Page(*heading, tuple(_sections(report)))


def _sections(report: DiffReport) -> Iterator[Section]:
    yield section("how PyTorch runs them", facts(("left", _run(report.left)), ("right", _run(report.right))))
    left_out = (("not copied", reason) for reason in report.weights.left_out)
    yield section("", facts(("weights", report.weights.sentence), *left_out))
    floor = f"rounding of {report.noise.dtype} ({' and '.join(report.noise.sides)})"
    measured = [getattr(report, side).measured_against for side in report.noise.sides]
    against = MEASURED["half a digit" if "half a digit" in measured else "float64"]
    against = "estimated from that of float32" if report.noise.dtype == "float64" else against
    blocks: list[Block] = []
    for rows in [tuple(group) for _, group in groupby(report.stages, lambda row: row.attention)] or [()]:
        blocks.append(_stages(rows))
        if noted := [(row.name, row.note) for row in rows if row.note]:
            blocks.append(facts(*noted))
    comparable = report.output.verdict is not None  # else the weights are unrelated, and the answer says so
    measured_by = f"in the same axes; rounding error: {floor}, {against}"
    yield section("stages", *blocks, detail=measured_by if comparable else "not compared: the weights are unrelated")
    if comparable:
        yield section("first stage that differs", facts(*_parting(report)))
    columns = [
        Column("output", lambda output: "output", tone="strong"),
        Column("left", lambda output: shape_cell(report.left.output_shape, ""), tone="shape"),
        Column("right", lambda output: shape_cell(report.right.output_shape, ""), tone="shape"),
        *difference_columns("relative", (2, 3)),
    ]
    yield section("output of the plain forward", table([report.output], columns))
    yield section("", *notes(report.notes))
    yield answered(report.answer)


def _run(side: DiffSide) -> str:
    parts = [f"{side.label}: {side.path.plain}"]
    if side.path.reason:
        parts.append(f"not the fast path: {side.path.reason}")
    if side.rounding_error is not None:
        exact = side.measured_against == "float64"
        error = text.small(side.rounding_error)
        parts.append(
            f"differs from float64 by at most {error}" if exact else f"rounded by {error}, {MEASURED['half a digit']}"
        )
    return "; ".join(parts)


def _stages(rows: tuple[StageRow, ...]) -> Table:
    def shape(side: StageSide | None) -> Cell:
        if side is None:
            return Cell("none", "muted")
        shape = replace(shape_cell(side.shape, side.axes), mark="*" * side.opened)
        return shape if side.count == 1 else replace(shape, text=f"{side.count} × {shape.text}", axes="")

    def axes(side: StageSide | None) -> str:
        return "" if side is None else side.axes

    opened = any(side is not None and side.opened for row in rows for side in (row.left, row.right))
    place = rows[0].attention if rows else None
    columns = [
        Column("stage" if place is None else f"attention {place}", lambda row: row.name, tone="strong"),
        Column("left", lambda row: shape(row.left), tone="shape"),
        Column("left axes", lambda row: axes(row.left), tone="axes", wide=True, drop=5),
        Column("right", lambda row: shape(row.right), tone="shape"),
        Column("right axes", lambda row: axes(row.right), tone="axes", wide=True, drop=4),
        *difference_columns("relative", (2, 3)),
    ]
    return table(rows, columns, legend="* inside a fused kernel, opened" if opened else "")


def _parting(report: DiffReport) -> Iterator[tuple[str, str]]:
    # Of several attentions each has a stage of this name: the first that differs is meant.
    first = report.first_differing_stage
    row = next((row for row in report.stages if row.name == first and row.verdict == "differs"), None)
    if row is None:
        compared = any(row.verdict for row in report.stages)
        yield "stage", f"none: {'every shared stage is the same' if compared else 'the sides share no stage'}"
        return
    if row.times_noise is None:
        distance = "different sizes"
    elif row.max_abs_difference is not None and isinf(row.max_abs_difference):
        distance = "not finite on one side"
    else:
        distance = f"{text.multiple(row.times_noise)} times the rounding error"
    yield "stage", f"{row.name}, {distance}" + (f", in attention {row.attention}" if row.attention else "")
    for name, side in (("left", row.left), ("right", row.right)):
        if side is not None:
            yield name, "given" if side.op is None else f"{side.op.name} at {side.op.source}"


# -- two checkpoints ---------------------------------------------------------------------------------------------------

_MOST = 8
"""Most heads of a part whose differences are listed in one field."""


def diff_checkpoints_page(report: CheckpointDiffReport) -> Page:
    """Return the page: the two files, one row per kind of tensor, the heads that differ, and the answer."""
    title = f"checkpoint {report.left.name} against {report.right.name}"
    return Page(title, "", "read from the file, not run", tuple(_of_checkpoints(report)))


def _of_checkpoints(report: CheckpointDiffReport) -> Iterator[Section]:
    def sizes(side: CheckpointSide) -> str:
        numbers = f"{text.plural(side.tensors, 'tensor')}, {side.numel:,} numbers, {text.byte_size(side.nbytes)}"
        return f"{side.name}: {numbers}, {text.listed(side.dtypes)}"

    shape = Column("shape", lambda tensor: text.shape(tensor.shape), tone="shape")
    yield section("files", facts(("left", sizes(report.left)), ("right", sizes(report.right))))
    if report.tensors:
        yield section("tensors", _tensors(report.tensors))
    for where, names in (("left", report.only_left), ("right", report.only_right)):
        if names:
            columns = [Column("name", lambda tensor: tensor.name, tone="strong"), shape]
            yield section(f"only in the {where}", table(folded(names, "name"), columns))
    if report.parts:
        yield section("heads", _parts(report.parts), detail="of attentions in which a tensor is not the same")
    yield section("", *notes(report.notes))
    yield answered(report.answer)


def _tensors(pairs: Sequence[TensorPair]) -> Table:
    """Return tensors as rows. Equal tensors that repeat from layer to layer share a row."""

    def both(title: str, tone: Tone, of: Callable[[TensorPair], tuple[str, str]], wrap: int = 0) -> Iterator[Column]:
        """Yield the column of the left side, and under it that of the right, filled where they differ."""
        yield Column(title, lambda pair: of(pair)[0], tone=tone, wrap=wrap)
        right = Column(f"right {title}", lambda pair: of(pair)[1] if len({*of(pair)}) > 1 else "", wrap=wrap)
        yield replace(right, tone=tone, into=title, optional=True)

    columns = [
        *both("name", "strong", lambda pair: (pair.name, pair.other), 24),
        *both("shape", "shape", lambda pair: (text.shape(pair.left_shape), text.shape(pair.right_shape))),
        *both("dtype", "muted", lambda pair: (pair.left_dtype, pair.right_dtype)),
        Column("largest difference", lambda pair: number(pair.max_abs_difference), "right", drop=2, optional=True),
        Column("relative", lambda pair: number(pair.relative_difference), "right", drop=1, optional=True),
        Column("verdict", _verdict),
        Column("note", lambda pair: pair.note, optional=True, wrap=16),
    ]

    def largest(numbers: Sequence[float | None]) -> float | None:
        return max(number or 0 for number in numbers) or None

    merged = {"max_abs_difference": largest, "relative_difference": largest}
    rows = folded(pairs, "name", "other", merged=merged, apart=lambda pair: pair.verdict == "differs")
    return table(rows, columns)


def _verdict(pair: TensorPair | PartPair) -> Cell:
    tones: dict[str, Tone] = {"differs": "warn", "other shape": "bad", "same, permuted": "warn"}
    return Cell(pair.verdict, tones.get(pair.verdict, "good"))


def _parts(parts: Sequence[PartPair]) -> Table:
    def changes(pair: PartPair) -> str:
        numbers = pair.differences
        order = sorted(range(len(numbers)), key=lambda head: -numbers[head])
        return ", ".join(f"{head}: {text.small(numbers[head])}" for head in order[:_MOST] if numbers[head])

    def right(pair: PartPair) -> str:
        return "" if pair.left == pair.right else pair.right or "the whole file"

    columns = [
        Column("module", lambda pair: pair.left or "the whole file", tone="strong"),
        Column("right module", right, into="module", optional=True),
        Column("part", lambda pair: pair.part),
        Column("verdict", _verdict),
        Column("heads that changed most", changes, into="module", optional=True, wrap=20),
    ]
    return table(folded(parts, "left", "right"), columns)
