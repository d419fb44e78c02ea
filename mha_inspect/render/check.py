"""The page of `check`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.check import CheckReport, Finding
from .page import Block, Column, Page, Paragraph, Section, Table, Tone, Verbatim, facts, section, table
from .parts import layer_page, notes


def page(report: CheckReport) -> Page:
    """Return the page: what is wrong, or may be, what is so, what hangs on each head, what held, what was left out."""
    return layer_page(report.environment, report.layer, _sections(report))


def _sections(report: CheckReport) -> Iterator[Section]:
    sure = [finding for finding in report.findings if finding.sure]
    declared = ", ".join(f"{name} {value}" for name, value in report.intent.items()) or "nothing"
    verdict = f"{text.plural(len(sure), 'finding')}" if sure else "nothing is wrong that these checks can see"
    yield section("check", facts(("declared", declared), ("runs", str(report.runs))), detail=verdict)
    for number, finding in enumerate(sure, 1):
        yield _finding(finding, f"{number}. {finding.check}", "bad")
    for finding in report.findings:
        if not finding.sure:
            yield _finding(finding, f"may be: {finding.check}", "warn")
    if report.facts:
        blocks: list[Block] = []
        for fact in report.facts:
            blocks.append(facts((fact.name, fact.sentence)))
            if len(set("".join(fact.picture))) > 1:  # where every place is alike the sentence says it
                blocks.append(Verbatim(fact.picture, "query × key"))
        yield section("facts", *blocks)
    if report.heads:
        yield section("heads", _heads(report), detail="what hangs on each")
    if report.held:
        columns = [Column("held", tone="strong"), Column("which means", wrap=30)]
        yield section("", table(columns, [(held.check, held.sentence) for held in report.held]))
    if report.left_out:
        columns = [Column("left out", tone="strong"), Column("why", wrap=30)]
        yield section("", table(columns, [(left_out.check, left_out.reason) for left_out in report.left_out]))
    yield section("", *notes(report.notes))


def _finding(finding: Finding, title: str, tone: Tone) -> Section:
    where = ", ".join(filter(None, (finding.source, finding.module)))
    fix = [facts(("fix", finding.fix))] if finding.fix else []
    evidence = facts(("evidence", finding.evidence))
    return section(title, Paragraph(finding.sentence, tone), evidence, *fix, detail=where)


def _heads(report: CheckReport) -> Table:
    columns = [
        Column("module", optional=True),
        Column("head", "right"),
        Column("output changes without it", "right"),
        Column("share of gradient", "right", optional=True),
    ]
    rows = []
    for head in report.heads:
        share = "" if head.gradient_share is None else text.percent(head.gradient_share)
        rows.append((head.module, head.head, text.percent(head.output_change), share))
    return table(columns, rows)
