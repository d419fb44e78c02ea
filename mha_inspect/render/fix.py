"""The page of `fix`: the problems, the patch, and what remains."""

from __future__ import annotations

from collections.abc import Iterator

from ..reports.fix import FixReport
from .check import findings_sections
from .page import Page, Paragraph, Section, Verbatim, section
from .parts import layer_page


def fix_page(report: FixReport) -> Page:
    """Return the page of a patch, or of why there is none."""
    return layer_page(report.environment, report.layer, _sections(report))


def _sections(report: FixReport) -> Iterator[Section]:
    yield from findings_sections(report.problems)
    if report.patch:
        yield section("patch", Verbatim(tuple(report.patch.splitlines())))
    if report.alternative:
        yield section("or, with equal outputs", Verbatim(tuple(report.alternative.splitlines())))
    for number, rival in enumerate(report.rivals, 1):
        yield section(f"edit {number}: its outputs differ from the others'", Verbatim(tuple(rival.splitlines())))
    if report.reason:
        yield section("", Paragraph(report.reason))
