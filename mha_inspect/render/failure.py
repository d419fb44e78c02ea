"""The part of a trace's page that tells how the forward failed: what was completed, then the failure, then why."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.failure import Failure
from .page import Block, Cell, Column, Paragraph, Section, Table, facts, section, table
from .parts import AXES, DTYPE, SHAPE, changes_only, shape_cell


def failure_sections(failure: Failure, dtype: str) -> Iterator[Section]:
    """Yield what was completed, the last operations, and the failure; the cause, where there is one, comes last."""
    if failure.completed:
        yield section("completed before the failure", _completed(failure, dtype))
    if failure.last_ops:
        shown = len(failure.last_ops)
        detail = "" if shown == failure.num_ops else f"the last {shown} of {text.count(failure.num_ops)}"
        yield section("operations", _operations(failure), detail=detail)
    yield section("failed", *_failed(failure, dtype), detail=f"{failure.error} at {failure.source}")
    if failure.cause is not None:
        explained, fix = Paragraph(failure.cause.explanation, "bad"), facts(("fix", failure.cause.fix))
        yield section("cause", explained, fix, detail=failure.cause.name.replace("_", " "))


def _completed(failure: Failure, dtype: str) -> Table:
    columns = [
        Column("stage", tone="strong", optional=True),
        Column("called", optional=True),
        SHAPE,
        AXES,
        DTYPE,
        Column("operation", tone="muted", drop=2, optional=True),
        Column("source", tone="muted", drop=1, optional=True),
    ]
    dtypes = changes_only((stage.dtype for stage in failure.completed), dtype)
    rows = [
        (s.name, s.variable, shape_cell(s.shape, s.axes), s.axes, changed, s.op, s.source)
        for s, changed in zip(failure.completed, dtypes, strict=True)
    ]
    return table(columns, rows)


def _operations(failure: Failure) -> Table:
    columns = [
        Column("#", "right", "muted"),
        Column("operation", tone="strong"),
        Column("inputs", wrap=18),
        Column("outputs", wrap=18, into="inputs"),
        Column("source", tone="muted", into="operation"),
        Column("module", tone="muted", drop=1, optional=True),
    ]
    rows = []
    for op in failure.last_ops:
        inputs, outputs = (", ".join(map(text.shape, shapes)) for shapes in (op.inputs, op.outputs))
        rows.append((op.index, op.name, inputs, outputs, op.source, op.module))
    return table(columns, rows)


def _failed(failure: Failure, dtype: str) -> Iterator[Block]:
    items = [("line", failure.line), ("call", failure.call), ("operation", failure.op), ("module", failure.module)]
    items += [("message", line) for line in failure.message.splitlines()]
    yield facts(*((label, text) for label, text in items if text))
    if failure.operands:
        yield _operands(failure, dtype)
    if failure.clash:
        yield Paragraph(failure.clash, "warn")
    if failure.cause is None:
        yield Paragraph("No mistake is told by the evidence: these are the facts.", "muted")
    if failure.note:
        yield facts(("note", failure.note))


def _operands(failure: Failure, dtype: str) -> Table:
    def odd(value: str, usual: str) -> Cell:
        return Cell(value, "" if value == usual else "warn")

    columns = [Column("given", tone="strong"), Column("as", optional=True), SHAPE, AXES, Column("dtype")]
    rows = []
    for o in failure.operands:
        role = "" if o.role == o.name else o.role
        device = odd(o.device, failure.operands[0].device)
        rows.append((o.name, role, shape_cell(o.shape, o.axes), o.axes, odd(o.dtype, dtype), device))
    return table([*columns, Column("device")], rows)
