"""The pages of `check` and of `layers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import text
from ..reports.check import CheckReport, Finding, SkippedCheck
from ..reports.common import LayersReport
from .page import Column, Page, Paragraph, Section, Verbatim, facts, section, table
from .parts import grouped, layer_page

_MORE = "A pipe, e.g. | less, shows who sees whom."


def check_page(report: CheckReport) -> Page:
    """Return the page: findings first, then facts, and which checks passed or were skipped."""
    return layer_page(report.environment, report.layer, _sections(report))


def findings_sections(findings: Sequence[Finding]) -> Iterator[Section]:
    """Yield a section for each finding: the problems, numbered, then the suspicions.

    The sentence of a single finding is the verdict above it, and is not repeated.
    """
    number = 0
    for finding in findings:
        number += finding.sure
        title = f"{number}. {finding.check}" if finding.sure else f"may be: {finding.check}"
        sentence = Paragraph(finding.sentence, "bad" if finding.sure else "warn")
        yield _finding(finding, title, [sentence] if len(findings) > 1 else [])


def _sections(report: CheckReport) -> Iterator[Section]:
    declared = ", ".join(f"{name} {value}" for name, value in report.intent.items()) or "nothing"
    yield section("check", detail=f"{text.plural(report.runs, 'run')}; declared: {declared}")
    yield from findings_sections(report.findings)
    said = [(fact.name, fact.sentence) for fact in report.facts] + [("note", note) for note in report.notes]
    if said:
        yield section("", facts(*said))
    pictures = [fact.picture for fact in report.facts if len(set("".join(fact.picture))) > 1]
    if pictures:  # if all are alike the sentence says it
        yield section("", *(Verbatim(picture, "query × key") for picture in pictures), more=_MORE)
    passed = [("passed", ", ".join(held.check for held in report.held))] if report.held else []
    skipped = [("skipped", _skipped(report.left_out))] if report.left_out else []
    if passed or skipped:
        yield section("", facts(*passed, *skipped))


def _skipped(checks: Sequence[SkippedCheck]) -> str:
    """Return skipped checks grouped by reason: `causal, window (declare them), rotary (none here)`."""
    groups = grouped(checks, lambda skipped: skipped._brief or skipped.reason)
    return ", ".join(f"{', '.join(s.check for s in group)} ({group[0]._brief or group[0].reason})" for group in groups)


def _finding(finding: Finding, title: str, sentence: Sequence[Paragraph]) -> Section:
    where = ", ".join(filter(None, (finding.source, finding.module)))
    more = [("fix", finding.fix)] if finding.fix else []
    more += [("to settle it", finding.confirm)] if finding.confirm else []
    return section(title, *sentence, facts(("evidence", finding.evidence), *more), detail=where)


def layers_page(report: LayersReport) -> Page:
    """Return the page: a block for each layer; for a single layer also its arguments."""
    letters = ", ".join(f"{letter} {name}" for letter, name in report.letters.items())
    several = len(report.layers) > 1
    columns = [
        Column("argument", lambda argument: argument.name, tone="strong"),
        Column("type", lambda argument: argument.type),
        Column("default", lambda argument: argument.default),
        Column("meaning", lambda argument: argument.meaning, wrap=30),
    ]
    blocks = []
    for layer in report.layers:
        said = [("heads", layer.split), ("parameters", layer.formula), ("source", layer.source)]
        arguments = [] if several else [table(layer.arguments, columns)]
        blocks.append(section(layer.name, Paragraph(layer.summary), facts(*said), *arguments))
    way = "mha-inspect layers NAME lists the arguments of a layer for --set."
    if not several:
        way = f"e.g. mha-inspect trace {report.layers[0].name} --set {report.layers[0].arguments[0].name}=VALUE"
    return Page(
        "layers",
        f"{text.plural(len(report.layers), 'way')} to write attention, for --layer and for diff",
        f"parameter counts with biases: {letters}",
        (*blocks, section("", Paragraph(way, "muted"))),
    )
