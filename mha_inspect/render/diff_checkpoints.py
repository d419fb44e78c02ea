"""The page of `diff` of two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .. import text
from ..reports.checkpoint_diff import CheckpointDiffReport, CheckpointSide, PartPair, TensorPair, TensorVerdict
from ..reports.params import StoredName
from .page import Cell, Column, Page, Section, Table, Tone, facts, section, table
from .parts import SHAPE, alike, answered, grouped, notes, number, times

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
    for where, names in (("left", report.only_left), ("right", report.only_right)):
        if names:
            yield section(f"only in the {where}", _only(names))
    if report.parts:
        yield section("heads", _parts(report.parts), detail="of attentions in which a tensor is not the same")
    yield section("", *notes(report.notes))
    yield answered(report.answer)


def _side(side: CheckpointSide) -> str:
    sizes = f"{text.plural(side.tensors, 'tensor')}, {text.count(side.numel)} numbers, {text.byte_size(side.nbytes)}"
    return f"{side.name}: {sizes}, {text.listed(side.dtypes)}"


def _tensors(pairs: Sequence[TensorPair]) -> Table:
    """Return tensors as rows: those that repeat from layer to layer, and do not differ, as one."""

    def kind(pair: TensorPair) -> object:
        if pair.verdict == "differs":
            return pair.name
        name, other = alike(pair.name), alike(pair.other)
        return replace(pair, name=name, other=other, max_abs_difference=None, relative_difference=None)

    columns = [
        Column("name", tone="strong", wrap=24),
        Column("right name", into="name", optional=True, wrap=24),
        Column("shape", tone="shape"),
        Column("right shape", tone="shape", into="shape", optional=True),
        Column("dtype", tone="muted"),
        Column("right dtype", tone="muted", into="dtype", optional=True),
        Column("largest difference", "right", drop=2, optional=True),
        Column("relative", "right", drop=1, optional=True),
        Column("verdict"),
        Column("note", optional=True, wrap=16),
    ]
    rows = []
    for group in grouped(pairs, kind):
        first = group[0]
        right_name = "" if first.name == first.other else times([pair.other for pair in group])
        shapes = _both(text.shape(first.left_shape), text.shape(first.right_shape))
        largest = number(max(pair.max_abs_difference or 0 for pair in group) or None)
        relative = number(max(pair.relative_difference or 0 for pair in group) or None)
        sides = right_name, *shapes, *_both(first.left_dtype, first.right_dtype)
        rows.append((times([pair.name for pair in group]), *sides, largest, relative, _verdict(first), first.note))
    return table(columns, rows)


def _both(left: str, right: str) -> tuple[str, str]:
    """Return what stands in the columns of both sides: nothing on the right where it is as the left."""
    return left, "" if left == right else right


def _verdict(pair: TensorPair | PartPair) -> Cell:
    return Cell(pair.verdict, _TONES.get(pair.verdict, "good"))


def _only(names: Iterable[StoredName]) -> Table:
    groups = grouped(names, lambda tensor: (alike(tensor.name), tensor.shape))
    rows = [(times([tensor.name for tensor in group]), text.shape(group[0].shape)) for group in groups]
    return table([Column("name", tone="strong"), SHAPE], rows)


def _parts(parts: Sequence[PartPair]) -> Table:
    columns = [
        Column("module", tone="strong"),
        Column("right module", into="module", optional=True),
        Column("part"),
        Column("verdict"),
        Column("heads that changed most", into="module", optional=True, wrap=20),
    ]
    rows = []
    for group in grouped(parts, lambda pair: replace(pair, left=alike(pair.left), right=alike(pair.right))):
        first, whole = group[0], "the whole file"
        left = times([pair.left for pair in group]) if first.left else whole
        right = "" if first.left == first.right else times([pair.right for pair in group]) or whole
        rows.append((left, right, first.part, _verdict(first), _changes(first.differences)))
    return table(columns, rows)


def _changes(differences: Sequence[float]) -> str:
    order = sorted(range(len(differences)), key=lambda head: -differences[head])
    return ", ".join(f"{head}: {text.small(differences[head])}" for head in order[:_MOST] if differences[head])
