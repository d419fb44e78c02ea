"""The pages of `check` and of `layers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .. import text
from ..reports.check import CheckReport, Finding, SkippedCheck
from ..reports.common import LayersReport
from .page import Column, Page, Paragraph, Section, Tone, Verbatim, facts, section, table
from .parts import grouped, layer_page

_MORE = "A pipe, e.g. | less, shows who sees whom."


def check_page(report: CheckReport) -> Page:
    """Return the page: findings first, then facts, and which checks passed or were skipped."""
    sure = [finding for finding in report.findings if finding.sure]
    counted = f"{len(report.held)} passed, {len(report.left_out)} skipped"
    found = ", ".join(f"{f.check} ({f.source})" if f.source else f.check for f in sure)
    said = f"{text.plural(len(sure), 'finding')}: {found}." if sure else f"No findings: {counted}."
    closing = Paragraph(said, "bad" if sure else "good")
    return replace(layer_page(report.environment, report.layer, _sections(report, sure)), closing=closing)


def _sections(report: CheckReport, sure: Sequence[Finding]) -> Iterator[Section]:
    declared = ", ".join(f"{name} {value}" for name, value in report.intent.items()) or "nothing"
    verdict = text.plural(len(sure), "finding") if sure else "no findings"
    detail = f"{verdict} in {text.plural(report.runs, 'run')}; declared: {declared}"
    yield section("check", detail=detail)
    for number, finding in enumerate(sure, 1):
        yield _finding(finding, f"{number}. {finding.check}", "bad")
    for finding in report.findings:
        if not finding.sure:
            yield _finding(finding, f"may be: {finding.check}", "warn")
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


def _finding(finding: Finding, title: str, tone: Tone) -> Section:
    where = ", ".join(filter(None, (finding.source, finding.module)))
    fix = [("fix", finding.fix)] if finding.fix else []
    return section(title, Paragraph(finding.sentence, tone), facts(("evidence", finding.evidence), *fix), detail=where)


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
