"""The page of `check`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.check import CheckReport, Fact, Finding, Head
from .page import Block, Cell, Column, Facts, Page, Paragraph, Section, Table, Tone, Verbatim, labelled, table
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
        held = table(
            report.held,
            (Column("held"), lambda own: Cell(own.check, "strong")),
            (Column("which means", wrap=30), lambda own: own.sentence),
        )
        yield Section((held,))
    if report.left_out:
        left_out = table(
            report.left_out,
            (Column("left out"), lambda own: Cell(own.check, "strong")),
            (Column("why", wrap=30), lambda own: own.reason),
        )
        yield Section((left_out,))
    yield Section(notes(report.notes))


def _where(finding: Finding) -> str:
    return ", ".join(filter(None, (finding.source, finding.module)))


def _finding(finding: Finding, tone: Tone) -> tuple[Block, ...]:
    fix = [labelled("fix", finding.fix)] if finding.fix else []
    return (Paragraph(finding.sentence, tone), labelled("evidence", finding.evidence), *fix)


def _facts(facts: tuple[Fact, ...]) -> Iterator[Block]:
    for fact in facts:
        yield labelled(fact.name, fact.sentence)
        if len(set("".join(fact.picture))) > 1:  # where every place is alike the sentence says it
            yield Verbatim("\n".join(fact.picture), "query × key")


def _heads(heads: tuple[Head, ...]) -> Table:
    return table(
        heads,
        (Column("module", optional=True), lambda head: head.module),
        (Column("head", "right"), lambda head: head.head),
        (Column("output changes without it", "right"), lambda head: text.percent(head.output_change)),
        (
            Column("share of gradient", "right", optional=True),
            lambda head: "" if head.gradient_share is None else text.percent(head.gradient_share),
        ),
    )
