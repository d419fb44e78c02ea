"""The pages of `diff`: of two layers, and of two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import isinf
from typing import Any

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
from ..reports.params import StoredName
from .page import Block, Cell, Column, Page, Section, Table, Tone, facts, section, table
from .parts import MEASURED, answered, difference_columns, folded, notes, number, shape_cell, sizes


def diff_page(report: DiffReport) -> Page:
    """Return the page: how each side is run, one row per stage, the first difference, and the answer."""
    left = report.left
    right = report.right
    ours = left.environment
    theirs = right.environment
    made_with = [
        _of_both(ours.device, theirs.device),
        _of_both(ours.dtype, theirs.dtype),
        f"seed {ours.seed}",
        f"torch {ours.torch}",
    ]
    # What is the left side's alone stands in its label: here it would read as that of both.
    spec: dict[str, Any] = {}
    for name, value in left.layer.spec.items():
        if name not in left.settings:
            spec[name] = value
    return Page(
        title=f"layer {left.label} against {right.label}",
        detail=sizes(replace(left.layer, spec=spec)),
        subtitle=", ".join(made_with),
        sections=tuple(_sections(report)),
    )


def _of_both(left: str, right: str) -> str:
    """Return the words for both sides: `cpu`, or `cpu and cuda:0` where they differ."""
    return left if left == right else f"{left} and {right}"


def _sections(report: DiffReport) -> Iterator[Section]:
    runs = facts(("left", _run(report.left)), ("right", _run(report.right)))
    yield section("how PyTorch runs them", runs)
    left_out = [("not copied", reason) for reason in report.weights.left_out]
    yield section("", facts(("weights", report.weights.sentence), *left_out))
    # Without a verdict on the output the weights are unrelated, and the answer says so.
    is_comparable = report.output.verdict is not None
    detail = "not compared: the weights are unrelated"
    if is_comparable:
        detail = _measured(report)
    yield section("stages", *_stages_of_attentions(report), detail=detail)
    if is_comparable and not all(row.verdict == "same" for row in report.stages):
        yield section("first stage that differs", facts(*_first_difference(report)))
    yield section("output of the plain forward", _output(report))
    yield section("", *notes(report.notes))
    yield answered(report.answer)


def _measured(report: DiffReport) -> str:
    """Return the unit of the differences, and how it was measured."""
    noise = report.noise
    measured = [getattr(report, side).measured_against for side in noise.sides]
    if noise.dtype == "float64":
        against = "estimated from that of float32"
    elif "half a digit" in measured:
        against = MEASURED["half a digit"]
    else:
        against = MEASURED["float64"]
    sides = " and ".join(noise.sides)
    return f"in the same axes; rounding error: rounding of {noise.dtype} ({sides}), {against}"


def _stages_of_attentions(report: DiffReport) -> Iterator[Block]:
    """Yield a table of the stages of each attention, and under it the notes; stages that are the same share a line."""
    if not report.stages:
        yield _stages(())
    alike: dict[str, list[int]] = {}
    for attention, group in groupby(report.stages, lambda row: row.attention):
        rows = tuple(group)
        same = [row for row in rows if row.verdict == "same"]
        if report._shows_all or len(same) < 2:
            yield from _with_notes(rows)
            continue
        names = ", ".join(row.name for row in same)
        rest = tuple(row for row in rows if row.verdict != "same")
        if not rest and attention is not None:
            alike.setdefault(names, []).append(attention)
            continue
        yield facts((_SAME, names))
        if rest:
            yield from _with_notes(rest)
    for names, numbers in alike.items():
        attentions = "attention" if len(numbers) == 1 else "attentions"
        yield facts((f"{_SAME} in {attentions} {text.spans(numbers)}", names))


_SAME = "the same"


def _with_notes(rows: tuple[StageRow, ...]) -> Iterator[Block]:
    """Yield the table of stages, and a line for each note, with the stages that it is about."""
    yield _stages(rows)
    named: dict[str, list[str]] = {}
    for row in rows:
        if row.note:
            named.setdefault(row.note, []).append(row.name)
    if named:
        lines = [(", ".join(names), note) for note, names in named.items()]
        yield facts(*lines)


def _output(report: DiffReport) -> Table:
    columns = [
        Column("output", lambda output: "output", tone="strong"),
        Column("left", lambda output: shape_cell(report.left.output_shape, ""), tone="shape"),
        Column("right", lambda output: shape_cell(report.right.output_shape, ""), tone="shape"),
        *difference_columns("relative", (2, 3)),
    ]
    return table([report.output], columns)


def _run(side: DiffSide) -> str:
    parts = [f"{side.label}: {side.path.plain}"]
    if side.path.reason:
        parts.append(f"not the fast path: {side.path.reason}")
    if side.rounding_error is not None:
        error = text.small(side.rounding_error)
        if side.measured_against == "float64":
            parts.append(f"differs from float64 by at most {error}")
        else:
            parts.append(f"rounded by {error}, {MEASURED['half a digit']}")
    return "; ".join(parts)


def _stages(rows: tuple[StageRow, ...]) -> Table:
    title = "stage"
    if rows and rows[0].attention is not None:
        title = f"attention {rows[0].attention}"
    columns = [
        Column(title, lambda row: row.name, tone="strong"),
        Column("left", lambda row: _shape(row.left), tone="shape"),
        Column("left axes", lambda row: _axes(row.left), tone="axes", wide=True, drop=5),
        Column("right", lambda row: _shape(row.right), tone="shape"),
        Column("right axes", lambda row: _axes(row.right), tone="axes", wide=True, drop=4),
        *difference_columns("relative", (2, 3)),
    ]
    sides: list[StageSide | None] = []
    for row in rows:
        sides += (row.left, row.right)
    legend = "* inside a fused kernel, opened" if any(map(_is_opened, sides)) else ""
    return table(rows, columns, legend=legend)


def _shape(side: StageSide | None) -> Cell:
    """Return the shape of a stage; where several tensors are the stage, their number before it: `8 × [1, 12, 64]`."""
    if side is None:
        return Cell("none", "muted")
    mark = "*" if side.opened else ""
    if side.count == 1:
        return replace(shape_cell(side.shape, side.axes), mark=mark)
    return Cell(f"{side.count} × {text.shape(side.shape)}", "shape", mark=mark)


def _axes(side: StageSide | None) -> str:
    return "" if side is None else side.axes


def _is_opened(side: StageSide | None) -> bool:
    return side is not None and side.opened


def _first_difference(report: DiffReport) -> Iterator[tuple[str, str]]:
    """Yield the first stage that differs, how far, and the operation of each side."""
    row = _first_differing_row(report)
    if row is None:
        yield "stage", _without_first_difference(report)
        return
    stage = f"{row.name}, {_distance(row)}"
    if row.attention:
        stage += f", in attention {row.attention}"
    yield "stage", stage
    for name, side in (("left", row.left), ("right", row.right)):
        if side is not None:
            yield name, _op_of(side)


def _without_first_difference(report: DiffReport) -> str:
    """Return why no stage is the first that differs."""
    if any(row.verdict == "differs" for row in report.stages):
        return "none: the outputs are the same, so the stages that differ do so in form alone"
    if any(row.verdict == "same" for row in report.stages):
        return "none: all stages that were compared are the same"
    if any(row.left is not None and row.right is not None for row in report.stages):
        return "unknown: no stage was compared"
    return "none: the sides share no stage"


def _op_of(side: StageSide) -> str:
    """Return the operation that computes a stage, and its line; `given` for an input."""
    return "given" if side.op is None else f"{side.op.name} at {side.op.source}"


def _first_differing_row(report: DiffReport) -> StageRow | None:
    """Return the stage, of the first attention in which it differs: several attentions have one of this name."""
    for row in report.stages:
        if row.name == report.first_differing_stage and row.verdict == "differs":
            return row
    return None


def _distance(row: StageRow) -> str:
    if row.times_noise is None:
        return "below -30,000 on one side" if row.name == "masked_scores" and row.note else "different sizes"
    if row.max_abs_difference is not None and isinf(row.max_abs_difference):
        return "not finite on one side"
    return f"{text.multiple(row.times_noise)} times the rounding error"


# -- two checkpoints ---------------------------------------------------------------------------------------------------

_MOST = 8
"""Most heads of a part whose differences are listed in one field."""


def diff_checkpoints_page(report: CheckpointDiffReport) -> Page:
    """Return the page: the two files, one row per kind of tensor, the heads that differ, and the answer."""
    title = f"checkpoint {report.left.name} against {report.right.name}"
    return Page(title, "", "read from the file, not run", tuple(_of_checkpoints(report)))


def _of_checkpoints(report: CheckpointDiffReport) -> Iterator[Section]:
    sides = facts(("left", _size_of_file(report.left)), ("right", _size_of_file(report.right)))
    yield section("files", sides)
    if report.tensors:
        yield section("tensors", _tensors(report.tensors))
    if report.only_left:
        yield section("only in the left", _unpaired(report.only_left))
    if report.only_right:
        yield section("only in the right", _unpaired(report.only_right))
    if report.parts:
        yield section("heads", _parts(report.parts), detail="of attentions in which a tensor is not the same")
    yield section("", *notes(report.notes))
    yield answered(report.answer)


def _size_of_file(side: CheckpointSide) -> str:
    sizes = [
        text.plural(side.tensors, "tensor"),
        f"{side.numel:,} numbers",
        text.byte_size(side.nbytes),
        text.listed(side.dtypes),
    ]
    return f"{side.name}: {', '.join(sizes)}"


def _unpaired(tensors: Sequence[StoredName]) -> Table:
    columns = [
        Column("name", lambda tensor: tensor.name, tone="strong"),
        Column("shape", lambda tensor: text.shape(tensor.shape), tone="shape"),
    ]
    return table(folded(tensors, "name"), columns)


def _tensors(pairs: Sequence[TensorPair]) -> Table:
    """Return tensors as rows. Equal tensors that repeat from layer to layer share a row."""
    columns = [
        *_both("name", lambda pair: (pair.name, pair.right_name), tone="strong", wrap=24),
        *_both("shape", lambda pair: (text.shape(pair.left_shape), text.shape(pair.right_shape)), tone="shape"),
        *_both("dtype", lambda pair: (pair.left_dtype, pair.right_dtype), tone="muted"),
        Column("largest difference", lambda pair: number(pair.max_abs_difference), "right", drop=2, optional=True),
        Column("relative", lambda pair: number(pair.relative_difference), "right", drop=1, optional=True),
        Column("verdict", _verdict),
        Column("note", lambda pair: pair.note, optional=True, wrap=16),
    ]
    merged = {"max_abs_difference": _largest, "relative_difference": _largest}
    rows = folded(pairs, "name", "right_name", merged=merged, apart=lambda pair: pair.verdict == "differs")
    return table(rows, columns)


def _both(title: str, sides: Callable[[TensorPair], tuple[str, str]], *, tone: Tone, wrap: int = 0) -> Iterator[Column]:
    """Yield the column of the left side, and under it that of the right, filled where they differ."""

    def left(pair: TensorPair) -> str:
        return sides(pair)[0]

    def right(pair: TensorPair) -> str:
        left, right = sides(pair)
        return "" if left == right else right

    yield Column(title, left, tone=tone, wrap=wrap)
    yield Column(f"right {title}", right, tone=tone, wrap=wrap, into=title, optional=True)


def _largest(differences: Sequence[float | None]) -> float | None:
    """Return the largest difference; None if none was measured, or all are 0."""
    measured = [difference or 0 for difference in differences]
    return max(measured) or None


_TONE_OF_PAIR: dict[str, Tone] = {"differs": "warn", "other shape": "bad", "same, permuted": "warn"}


def _verdict(pair: TensorPair | PartPair) -> Cell:
    return Cell(pair.verdict, _TONE_OF_PAIR.get(pair.verdict, "good"))


_WHOLE_FILE = "the whole file"
"""The name of the outermost module."""


def _parts(parts: Sequence[PartPair]) -> Table:
    columns = [
        Column("module", lambda pair: pair.left or _WHOLE_FILE, tone="strong"),
        Column("right module", _right_module, into="module", optional=True),
        Column("part", lambda pair: pair.part),
        Column("verdict", _verdict),
        Column("heads that changed most", _most_changed, into="module", optional=True, wrap=20),
    ]
    return table(folded(parts, "left", "right"), columns)


def _right_module(pair: PartPair) -> str:
    """Return the module on the right if it has another name; else empty."""
    if pair.left == pair.right:
        return ""
    return pair.right or _WHOLE_FILE


def _most_changed(pair: PartPair) -> str:
    """Return the heads that changed most, the first ones first: `3: 0.5, 0: 0.01`."""
    by_difference = sorted(enumerate(pair.differences), key=lambda entry: -entry[1])
    changed = []
    for head, difference in by_difference[:_MOST]:
        if difference:
            changed.append(f"{head}: {text.small(difference)}")
    return ", ".join(changed)
