"""The part of a trace's page that tells how the forward failed: what was completed, then the failure, then why."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.failure import Failure, ReachedOp, ReachedStage
from .page import Block, Cell, Column, Paragraph, Section, Table, facts, section, table
from .parts import changes_only, shape_cell


def failure_sections(failure: Failure, dtype: str) -> Iterator[Section]:
    """Yield what was completed, the last operations, and the failure; the cause, where there is one, comes last."""
    if failure.completed:
        yield section("completed before the failure", _completed(failure.completed, dtype))
    if failure.last_ops:
        told = len(failure.last_ops)
        detail = "" if told == failure.num_ops else f"the last {told} of {text.count(failure.num_ops)}"
        yield section("operations", _operations(failure.last_ops), detail=detail)
    yield section("failed", *_failed(failure, dtype), detail=f"{failure.error} at {failure.source}")
    if failure.cause is not None:
        explained, fix = Paragraph(failure.cause.explanation, "bad"), facts(("fix", failure.cause.fix))
        yield section("cause", explained, fix, detail=failure.cause.name.replace("_", " "))


def _completed(stages: tuple[ReachedStage, ...], dtype: str) -> Table:
    dtypes = changes_only((stage.dtype for stage in stages), dtype)
    return table(
        stages,
        (Column("stage", tone="strong", optional=True), lambda stage: stage.name),
        (Column("called", optional=True), lambda stage: stage.variable),
        (Column("shape", tone="shape"), lambda stage: shape_cell(stage.shape, stage.axes)),
        (Column("axes", tone="axes"), lambda stage: stage.axes),
        (Column("dtype", optional=True), lambda _: next(dtypes)),
        (Column("operation", tone="muted", drop=2, optional=True), lambda stage: stage.op),
        (Column("source", tone="muted", drop=1, optional=True), lambda stage: stage.source),
    )


def _operations(ops: tuple[ReachedOp, ...]) -> Table:
    return table(
        ops,
        (Column("#", "right", "muted"), lambda op: op.index),
        (Column("operation", tone="strong"), lambda op: op.name),
        (Column("inputs", wrap=18), lambda op: ", ".join(map(text.shape, op.inputs))),
        (Column("outputs", wrap=18, into="inputs"), lambda op: ", ".join(map(text.shape, op.outputs))),
        (Column("source", tone="muted", into="operation"), lambda op: op.source),
        (Column("module", tone="muted", drop=1, optional=True), lambda op: op.module),
    )


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

    device = failure.operands[0].device
    return table(
        failure.operands,
        (Column("given", tone="strong"), lambda operand: operand.name),
        (Column("as", optional=True), lambda operand: "" if operand.role == operand.name else operand.role),
        (Column("shape", tone="shape"), lambda operand: shape_cell(operand.shape, operand.axes)),
        (Column("axes", tone="axes"), lambda operand: operand.axes),
        (Column("dtype"), lambda operand: odd(operand.dtype, dtype)),
        (Column("device"), lambda operand: odd(operand.device, device)),
    )
