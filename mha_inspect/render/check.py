"""The pages of `check` and of `layers`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.check import CheckReport, Finding
from ..reports.common import LayersReport
from .page import Block, Column, Page, Paragraph, Section, Tone, Verbatim, facts, section, table
from .parts import layer_page, notes


def check_page(report: CheckReport) -> Page:
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
        columns = [
            Column("module", lambda head: head.module, optional=True),
            Column("head", lambda head: head.head, "right"),
            Column("output changes without it", lambda head: _percent(head.output_change), "right"),
            Column("share of gradient", lambda head: _percent(head.gradient_share), "right", optional=True),
        ]
        yield section("heads", table(report.heads, columns), detail="what hangs on each")
    if report.held:
        means = Column("which means", lambda held: held.sentence, wrap=30)
        yield section("", table(report.held, [Column("held", lambda held: held.check, tone="strong"), means]))
    if report.left_out:
        why = Column("why", lambda left_out: left_out.reason, wrap=30)
        yield section("", table(report.left_out, [Column("left out", lambda out: out.check, tone="strong"), why]))
    yield section("", *notes(report.notes))


def _finding(finding: Finding, title: str, tone: Tone) -> Section:
    where = ", ".join(filter(None, (finding.source, finding.module)))
    fix = [facts(("fix", finding.fix))] if finding.fix else []
    return section(title, Paragraph(finding.sentence, tone), facts(("evidence", finding.evidence)), *fix, detail=where)


def _percent(share: float | None) -> str:
    return "" if share is None else text.percent(share)


def layers_page(report: LayersReport) -> Page:
    """Return the page: a row a layer, then how each splits its heads, what it takes and where it comes from."""
    letters = ", ".join(f"{letter} {name}" for letter, name in report.letters.items())
    columns = [
        Column("layer", lambda layer: layer.name, tone="strong"),
        Column("how it is written", lambda layer: layer.summary, wrap=30),
        Column("parameters", lambda layer: layer.formula),
    ]
    takes = [(layer.name, ", ".join(layer.takes) or "none") for layer in report.layers]
    more = Paragraph("mha-inspect diff LEFT RIGHT shows where two of them part ways.", "muted")
    return Page(
        "layers",
        f"{text.plural(len(report.layers), 'way')} to write attention, each for --layer and diff",
        f"parameter counts with biases: {letters}",
        (
            section("", table(report.layers, columns)),
            section("how the heads are split", facts(*((layer.name, layer.split) for layer in report.layers))),
            section("settings beyond those that every layer takes", facts(*takes)),
            section("source of the style", facts(*((layer.name, layer.source) for layer in report.layers)), more),
        ),
    )
