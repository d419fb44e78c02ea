"""The page of `check`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.check import CheckReport, Fact, Finding, Head
from .page import Block, Column, Page, Paragraph, Section, Table, Tone, Verbatim, facts, section, table
from .parts import layer_page, notes


def page(report: CheckReport) -> Page:
    """Return the page: what is wrong, or may be, what is so, what hangs on each head, what held, what was left out."""
    return layer_page(report.environment, report.layer, _sections(report))


def _sections(report: CheckReport) -> Iterator[Section]:
    sure, doubtful = ([one for one in report.findings if one.sure is kind] for kind in (True, False))
    declared = ", ".join(f"{name} {value}" for name, value in report.intent.items()) or "nothing"
    verdict = f"{text.plural(len(sure), 'finding')}" if sure else "nothing is wrong that these checks can see"
    yield section("check", facts(("declared", declared), ("runs", str(report.runs))), detail=verdict)
    for number, finding in enumerate(sure, 1):
        yield _finding(finding, f"{number}. {finding.check}", "bad")
    for finding in doubtful:
        yield _finding(finding, f"may be: {finding.check}", "warn")
    if report.facts:
        yield section("facts", *_facts(report.facts))
    if report.heads:
        yield section("heads", _heads(report.heads), detail="what hangs on each")
    if report.held:
        held = [(own.check, own.sentence) for own in report.held]
        yield section("", _each(held, Column("held", tone="strong"), Column("which means", wrap=30)))
    if report.left_out:
        left_out = [(own.check, own.reason) for own in report.left_out]
        yield section("", _each(left_out, Column("left out", tone="strong"), Column("why", wrap=30)))
    yield section("", *notes(report.notes))


def _each(rows: list[tuple[str, str]], check: Column, said: Column) -> Table:
    return table(rows, (check, lambda row: row[0]), (said, lambda row: row[1]))


def _finding(finding: Finding, title: str, tone: Tone) -> Section:
    where = ", ".join(filter(None, (finding.source, finding.module)))
    fix = [facts(("fix", finding.fix))] if finding.fix else []
    evidence = facts(("evidence", finding.evidence))
    return section(title, Paragraph(finding.sentence, tone), evidence, *fix, detail=where)


def _facts(found: tuple[Fact, ...]) -> Iterator[Block]:
    for fact in found:
        yield facts((fact.name, fact.sentence))
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
