"""The page of `diff` of two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .. import text
from ..reports.checkpoint_diff import CheckpointDiffReport, CheckpointSide, PartPair, TensorPair, TensorVerdict
from ..reports.params import StoredName
from .page import Cell, Column, Page, Section, Table, Tone, facts, section, table
from .params import alike, times
from .parts import answered, grouped, notes, number

_TONES: dict[TensorVerdict, Tone] = {"differs": "warn", "other shape": "bad", "same, permuted": "warn"}
_MOST = 8
"""Heads of a part whose differences stand in one field."""


def page(report: CheckpointDiffReport) -> Page:
    """Return the page: the two files, a row for tensors that are alike, the heads that are not, and the answer."""
    title = f"checkpoint {report.left.name} against {report.right.name}"
    return Page(title, "", "read, and not run", tuple(_sections(report)))


def _sections(report: CheckpointDiffReport) -> Iterator[Section]:
    yield section("files", facts(("left", _side(report.left)), ("right", _side(report.right))))
    if report.tensors:
        yield section("tensors", _tensors(report.tensors))
    for where, own in (("left", report.only_left), ("right", report.only_right)):
        if own:
            yield section(f"only in the {where}", _only(own))
    if report.parts:
        yield section("heads", _parts(report.parts), detail="of attentions in which a tensor is not the same")
    yield section("", *notes(report.notes))
    yield answered(report.answer)


def _side(side: CheckpointSide) -> str:
    sizes = f"{text.plural(side.tensors, 'tensor')}, {text.count(side.numel)} numbers, {text.byte_size(side.nbytes)}"
    return f"{side.name}: {sizes}, {text.listed(side.dtypes)}"


def _tensors(pairs: Sequence[TensorPair]) -> Table:
    """Return tensors as rows: those that repeat from layer to layer, and do not differ, as one."""

    def kind(one: TensorPair) -> object:
        if one.verdict == "differs":
            return one.name
        name, other = alike(one.name), alike(one.other)
        return replace(one, name=name, other=other, max_abs_difference=None, relative_difference=None)

    return table(
        [(own[0], own) for own in grouped(pairs, kind)],
        (Column("name", tone="strong", wrap=24), lambda row: times([one.name for one in row[1]])),
        (
            Column("right name", into="name", optional=True, wrap=24),
            lambda row: "" if row[0].name == row[0].other else times([one.other for one in row[1]]),
        ),
        (Column("shape", tone="shape"), lambda row: text.shape(row[0].left_shape)),
        (
            Column("right shape", tone="shape", into="shape", optional=True),
            lambda row: "" if row[0].left_shape == row[0].right_shape else text.shape(row[0].right_shape),
        ),
        (Column("dtype", tone="muted"), lambda row: row[0].left_dtype),
        (
            Column("right dtype", tone="muted", into="dtype", optional=True),
            lambda row: "" if row[0].left_dtype == row[0].right_dtype else row[0].right_dtype,
        ),
        (
            Column("largest difference", "right", drop=2, optional=True),
            lambda row: number(max(one.max_abs_difference or 0 for one in row[1]) or None),
        ),
        (
            Column("relative", "right", drop=1, optional=True),
            lambda row: number(max(one.relative_difference or 0 for one in row[1]) or None),
        ),
        (Column("verdict"), lambda row: Cell(row[0].verdict, _TONES.get(row[0].verdict, "good"))),
        (Column("note", optional=True, wrap=16), lambda row: row[0].note),
    )


def _only(names: Iterable[StoredName]) -> Table:
    return table(
        grouped(names, lambda one: (alike(one.name), one.shape)),
        (Column("name", tone="strong"), lambda own: times([one.name for one in own])),
        (Column("shape", tone="shape"), lambda own: text.shape(own[0].shape)),
    )


def _parts(parts: Sequence[PartPair]) -> Table:
    def right(own: list[PartPair]) -> str:
        return "" if own[0].left == own[0].right else times([one.right for one in own]) or "the whole file"

    return table(
        grouped(parts, lambda one: replace(one, left=alike(one.left), right=alike(one.right))),
        (
            Column("module", tone="strong"),
            lambda own: times([one.left for one in own]) if own[0].left else "the whole file",
        ),
        (Column("right module", into="module", optional=True), right),
        (Column("part"), lambda own: own[0].part),
        (Column("verdict"), lambda own: Cell(own[0].verdict, _TONES.get(own[0].verdict, "good"))),
        (
            Column("heads that changed most", into="module", optional=True, wrap=20),
            lambda own: _changes(own[0].differences),
        ),
    )


def _changes(differences: Sequence[float]) -> str:
    order = sorted(range(len(differences)), key=lambda head: -differences[head])
    return ", ".join(f"{head}: {text.small(differences[head])}" for head in order[:_MOST] if differences[head])
