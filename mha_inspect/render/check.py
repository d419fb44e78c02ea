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
    """Return the page: one row per layer, then how each splits its heads, its settings and its source."""
    letters = ", ".join(f"{letter} {name}" for letter, name in report.letters.items())
    columns = [
        Column("layer", lambda layer: layer.name, tone="strong"),
        Column("how it is written", lambda layer: layer.summary, wrap=30),
        Column("parameters", lambda layer: layer.formula),
    ]
    takes = [(layer.name, ", ".join(layer.takes) or "none") for layer in report.layers]
    more = Paragraph("mha-inspect diff LEFT RIGHT shows where two of them differ.", "muted")
    return Page(
        "layers",
        f"{text.plural(len(report.layers), 'way')} to write attention, for --layer and for diff",
        f"parameter counts with biases: {letters}",
        (
            section("", table(report.layers, columns)),
            section("how the heads are split", facts(*((layer.name, layer.split) for layer in report.layers))),
            section("extra settings of each layer", facts(*takes)),
            section("source of the style", facts(*((layer.name, layer.source) for layer in report.layers)), more),
        ),
    )
