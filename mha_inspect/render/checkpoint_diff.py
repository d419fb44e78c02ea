"""The page of `diff` of two checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .. import text
from ..reports.checkpoint_diff import CheckpointDiffReport, CheckpointSide, PartPair, TensorPair, TensorVerdict
from ..reports.params import StoredName
from .page import Cell, Column, Facts, Page, Paragraph, Section, Table, Tone, table
from .params import alike, times
from .parts import notes, number

_TONES: dict[TensorVerdict, Tone] = {"differs": "warn", "other shape": "bad", "same, permuted": "warn"}
_MOST = 8
"""Heads of a part whose differences stand in one field."""


def checkpoint_diff_page(report: CheckpointDiffReport) -> Page:
    """Return the page: the two files, a row for tensors that are alike, the heads that are not, and the answer."""
    return Page(
        f"checkpoint {report.left.name} against {report.right.name}", "", "read, and not run", tuple(_sections(report))
    )


def _sections(report: CheckpointDiffReport) -> Iterator[Section]:
    yield Section((Facts((("left", _side(report.left)), ("right", _side(report.right)))),), "files")
    if report.tensors:
        yield Section((_tensors(report.tensors),), "tensors")
    for where, own in (("left", report.only_left), ("right", report.only_right)):
        if own:
            yield Section((_only(own),), f"only in the {where}")
    if report.parts:
        yield Section((_parts(report.parts),), "heads", "of attentions in which a tensor is not the same")
    if report.notes:
        yield Section(notes(report.notes))
    yield Section(tuple(Paragraph(sentence, "strong") for sentence in report.answer), "answer")


def _side(side: CheckpointSide) -> str:
    sizes = f"{text.plural(side.tensors, 'tensor')}, {text.count(side.numel)} numbers, {text.byte_size(side.nbytes)}"
    return f"{side.name}: {sizes}, {text.listed(side.dtypes)}"


def _tensors(pairs: Sequence[TensorPair]) -> Table:
    """Return tensors as rows: those that repeat from layer to layer, and do not differ, as one."""
    columns = (
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
    )
    groups: dict[tuple[object, ...], list[TensorPair]] = {}
    for one in pairs:
        apart = one.name if one.verdict == "differs" else ""
        kind = (one.left_shape, one.right_shape, one.left_dtype, one.right_dtype, one.verdict, one.note)
        groups.setdefault((alike(one.name), alike(one.other), apart, *kind), []).append(one)
    return table(
        columns,
        (
            (
                times([one.name for one in own]),
                "" if own[0].name == own[0].other else times([one.other for one in own]),
                text.shape(own[0].left_shape),
                "" if own[0].left_shape == own[0].right_shape else text.shape(own[0].right_shape),
                own[0].left_dtype,
                "" if own[0].left_dtype == own[0].right_dtype else own[0].right_dtype,
                number(max(one.max_abs_difference or 0 for one in own) or None),
                number(max(one.relative_difference or 0 for one in own) or None),
                Cell(own[0].verdict, _TONES.get(own[0].verdict, "good")),
                own[0].note,
            )
            for own in groups.values()
        ),
    )


def _only(names: Iterable[StoredName]) -> Table:
    groups: dict[tuple[object, ...], list[str]] = {}
    for one in names:
        groups.setdefault((alike(one.name), one.shape), []).append(one.name)
    rows = ((times(own), text.shape(shape)) for (_, shape), own in groups.items() if isinstance(shape, tuple))
    return table((Column("name", tone="strong"), Column("shape", tone="shape")), rows)


def _parts(parts: Sequence[PartPair]) -> Table:
    columns = (
        Column("module", tone="strong"),
        Column("right module", into="module", optional=True),
        Column("part"),
        Column("verdict"),
        Column("of the left", into="module", optional=True, wrap=20),
        Column("heads that changed most", into="module", optional=True, wrap=20),
    )
    groups: dict[tuple[object, ...], list[PartPair]] = {}
    for one in parts:
        kind = (one.part, one.verdict, one.source, one.order, one.rotary, one.differences)
        groups.setdefault((alike(one.left), alike(one.right), *kind), []).append(one)
    rows = (
        (
            times([one.left for one in own]) if own[0].left else "the whole file",
            "" if own[0].left == own[0].right else times([one.right for one in own]) or "the whole file",
            own[0].part,
            Cell(own[0].verdict, _TONES.get(own[0].verdict, "good")),
            _source(own[0]),
            _changes(own[0].differences),
        )
        for own in groups.values()
    )
    return table(columns, rows)


def _source(one: PartPair) -> str:
    if one.verdict != "same, permuted":
        return ""
    in_order = one.order == tuple(range(len(one.order)))
    heads = ", ".join(map(str, one.order[: 2 * _MOST])) + (", …" if len(one.order) > 2 * _MOST else "")
    return "; ".join(filter(None, (one.source, "" if in_order else f"heads {heads}", one.rotary)))


def _changes(differences: Sequence[float]) -> str:
    order = sorted(range(len(differences)), key=lambda head: -differences[head])
    return ", ".join(f"{head}: {text.small(differences[head])}" for head in order[:_MOST] if differences[head])
