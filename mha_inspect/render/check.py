"""The page of `check`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.check import CheckReport, Fact, Finding, Head
from .page import Block, Cell, Column, Facts, Page, Paragraph, Section, Table, Verbatim, table
from .parts import layer_page, notes


def check_page(report: CheckReport) -> Page:
    """Return the page: what is wrong, or may be, what is so, what hangs on each head, what held, what was left out."""
    return layer_page(report.environment, report.layer, _sections(report))


def _sections(report: CheckReport) -> Iterator[Section]:
    sure = [finding for finding in report.findings if finding.sure]
    doubtful = [finding for finding in report.findings if not finding.sure]
    declared = ", ".join(f"{name} {value}" for name, value in report.intent.items()) or "nothing"
    verdict = f"{text.plural(len(sure), 'finding')}" if sure else "nothing is wrong that these checks can see"
    yield Section((Facts((("declared", declared), ("runs", str(report.runs)))),), "check", verdict)
    for number, finding in enumerate(sure, 1):
        yield Section(_finding(finding, "bad"), f"{number}. {finding.check}", _where(finding))
    for finding in doubtful:
        yield Section(_finding(finding, "warn"), f"may be: {finding.check}", _where(finding))
    if report.facts:
        yield Section(tuple(_facts(report.facts)), "facts")
    if report.heads:
        yield Section((_heads(report.heads),), "heads", "what hangs on each")
    if report.held:
        rows = ((Cell(held.check, "strong"), held.sentence) for held in report.held)
        yield Section((table((Column("held"), Column("which means", wrap=30)), rows),))
    if report.left_out:
        left = ((Cell(out.check, "strong"), out.reason) for out in report.left_out)
        yield Section((table((Column("left out"), Column("why", wrap=30)), left),))
    if report.notes:
        yield Section(notes(report.notes))


def _where(finding: Finding) -> str:
    return ", ".join(filter(None, (finding.source, finding.module)))


def _finding(finding: Finding, tone: str) -> tuple[Block, ...]:
    blocks = [Paragraph(finding.sentence, "bad" if tone == "bad" else "warn")]
    blocks.append(Paragraph(finding.evidence, label="evidence"))
    if finding.fix:
        blocks.append(Paragraph(finding.fix, label="fix"))
    return tuple(blocks)


def _facts(facts: tuple[Fact, ...]) -> Iterator[Block]:
    for fact in facts:
        yield Paragraph(fact.sentence, label=fact.name)
        if fact.picture:
            yield Verbatim("\n".join(fact.picture), "query × key")


def _heads(heads: tuple[Head, ...]) -> Table:
    columns = (
        Column("module", optional=True),
        Column("head", "right"),
        Column("output changes without it", "right"),
        Column("share of gradient", "right", optional=True),
    )
    rows = (
        (
            head.module,
            str(head.head),
            text.percent(head.output_change),
            "" if head.gradient_share is None else text.percent(head.gradient_share),
        )
        for head in heads
    )
    return table(columns, rows)
