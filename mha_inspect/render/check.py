"""The pages of `check` and of `layers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import text
from ..reports.check import CheckReport, Finding, SkippedCheck
from ..reports.common import LayersReport
from .page import Column, Page, Paragraph, Section, Tone, Verbatim, facts, section, table
from .parts import grouped, layer_page

_MORE = "Pipe the output, e.g. | less, to see who sees whom."


def check_page(report: CheckReport) -> Page:
    """Return the page: findings first, then facts, and which checks passed or were skipped."""
    return layer_page(report.environment, report.layer, _sections(report))


def findings_sections(findings: Sequence[Finding]) -> Iterator[Section]:
    """Yield a section for each finding: the problems, numbered, then the suspicions.

    The sentence of a single finding is the verdict above it, and is not repeated.
    """
    number = 0
    tone: Tone
    for finding in findings:
        if finding.sure:
            number += 1
            title, tone = f"{number}. {finding.check}", "bad"
        else:
            title, tone = f"may be: {finding.check}", "warn"
        sentence = []
        if len(findings) > 1:
            sentence.append(Paragraph(finding.sentence, tone))
        yield _finding(finding, title, sentence)


def patch_sections(patch: str | None) -> Iterator[Section]:
    """Yield the section of a patch that was run; none without a patch."""
    if patch is not None:
        yield section("fix", Verbatim(tuple(patch.splitlines())), detail="a patch that was run: no check fails with it")


def _sections(report: CheckReport) -> Iterator[Section]:
    declared = [f"{name} {value}" for name, value in report.intent.items()]
    runs = text.plural(report.runs, "run")
    yield section("check", detail=f"{runs}; declared: {', '.join(declared) or 'nothing'}")
    yield from findings_sections(report.findings)
    yield from patch_sections(report.patch)
    lines = [(fact.name, fact.sentence) for fact in report.facts]
    lines += [("note", note) for note in report.notes]
    if lines:
        yield section("", facts(*lines))
    pictures = []
    for fact in report.facts:
        if _has_two_signs(fact.picture):
            pictures.append(Verbatim(fact.picture, "query × key"))
    if pictures:
        yield section("", *pictures, more=_MORE)
    checks = []
    if report.passed:
        checks.append(("passed", ", ".join(passed.check for passed in report.passed)))
    if report.left_out:
        checks.append(("skipped", _skipped(report.left_out)))
    if checks:
        yield section("", facts(*checks))


def _has_two_signs(picture: Sequence[str]) -> bool:
    """Return whether a picture shows anything: if all of its signs are alike, the sentence says it."""
    signs = set("".join(picture))
    return len(signs) > 1


def _skipped(checks: Sequence[SkippedCheck]) -> str:
    """Return skipped checks grouped by reason: `causal, window (declare them), rotary (none here)`."""
    groups = []
    for group in grouped(checks, _reason):
        names = ", ".join(skipped.check for skipped in group)
        groups.append(f"{names} ({_reason(group[0])})")
    return ", ".join(groups)


def _reason(skipped: SkippedCheck) -> str:
    return skipped._brief or skipped.reason


def _finding(finding: Finding, title: str, sentence: Sequence[Paragraph]) -> Section:
    lines = [("evidence", finding.evidence)]
    if finding.fix:
        lines.append(("fix", finding.fix))
    if finding.confirm:
        lines.append(("to settle it", finding.confirm))
    place = ", ".join(filter(None, (finding.source, finding.module)))
    return section(title, *sentence, facts(*lines), detail=place)


def layers_page(report: LayersReport) -> Page:
    """Return the page: a block for each layer; for a single layer also its arguments."""
    letters = [f"{letter} {name}" for letter, name in report.letters.items()]
    several = len(report.layers) > 1
    columns = [
        Column("argument", lambda argument: argument.name, tone="strong"),
        Column("type", lambda argument: argument.type),
        Column("default", lambda argument: argument.default),
        Column("meaning", lambda argument: argument.meaning, wrap=30),
    ]
    blocks = []
    for layer in report.layers:
        lines = facts(("heads", layer.split), ("parameters", layer.formula), ("source", layer.source))
        arguments = []
        if not several:
            arguments.append(table(layer.arguments, columns))
        blocks.append(section(layer.name, Paragraph(layer.summary), lines, *arguments))
    if several:
        way = "mha-inspect layers NAME lists the arguments of a layer for --set."
    else:
        layer = report.layers[0]
        way = f"e.g. mha-inspect trace {layer.name} --set {layer.arguments[0].name}=VALUE"
    return Page(
        "layers",
        f"{text.plural(len(report.layers), 'way')} to write attention, for --layer and for diff",
        f"parameter counts with biases: {', '.join(letters)}",
        (*blocks, section("", Paragraph(way, "muted"))),
    )
