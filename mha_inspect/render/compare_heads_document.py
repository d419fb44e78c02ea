"""The page of `compare-heads`."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.compare_heads import CompareHeadsReport, HeadCount, HeadPair
from .common import VERDICT_TONES, page, shape_cell
from .compare_heads_learning import learning_sections
from .document import Cell, Column, Document, Facts, Paragraph, Section, Table, table

COUNT_COLUMNS = (
    Column("num_heads", "right", "strong"),
    Column("head_dim", "right"),
    Column("parameters", "right", drop=3),
    Column("same parameters", drop=4),
    Column("output shape", tone="shape", drop=6),
    Column("largest difference", "right"),
    Column("relative difference", "right", drop=2),
    Column("× noise", "right"),
    Column("verdict"),
    Column("first differing stage", drop=5, optional=True),
)


def compare_heads_document(report: CompareHeadsReport) -> Document:
    """A row a head count, the reasons, and the answer, which comes last."""
    return page(report.environment, report.layer, _sections(report))


def _sections(report: CompareHeadsReport) -> Iterator[Section]:
    floors = {count.noise_floor for count in report.counts}
    floor = f", noise floor {text.small(floors.pop())} (measured against float64)" if len(floors) == 1 else ""
    yield Section(
        (_counts(report),),
        "head counts",
        f"same weights, same input; baseline {text.plural(report.baseline, 'head')}{floor}",
    )
    reasons = tuple((text.plural(c.num_heads, "head"), c.reason) for c in report.counts if c.reason)
    if reasons:
        yield Section((Facts(reasons),), "why")
    if report.equalities:
        yield Section(tuple(Paragraph(sentence) for sentence in report.equalities), "where outputs must be equal")
    if report.pairs is not None:
        yield Section((_pairs(report.pairs),), "every pair")
    yield from learning_sections(report)
    yield Section(tuple(Paragraph(sentence, "strong") for sentence in report.answer), "answer")


def _verdict(item: HeadCount | HeadPair) -> Cell:
    return Cell(item.verdict, VERDICT_TONES[item.verdict])


def _counts(report: CompareHeadsReport) -> Table:
    return table(
        COUNT_COLUMNS,
        (
            (
                str(c.num_heads),
                str(c.head_dim),
                text.count(c.numel),
                Cell("yes" if c.same_parameters else "no", "" if c.same_parameters else "warn"),
                shape_cell(c.output_shape, ""),
                text.small(c.max_abs_difference),
                text.small(c.relative_difference),
                text.times(c.times_noise),
                Cell("baseline", "muted") if c.num_heads == report.baseline else _verdict(c),
                c.first_differing_stage or "",
            )
            for c in report.counts
        ),
    )


def _pairs(pairs: tuple[HeadPair, ...]) -> Table:
    columns = (
        Column("num_heads", "right", "strong"),
        Column("against", "right", "strong"),
        Column("largest difference", "right"),
        Column("relative difference", "right", drop=1),
        Column("× noise", "right"),
        Column("verdict"),
    )
    return table(
        columns,
        (
            (
                str(p.left),
                str(p.right),
                text.small(p.max_abs_difference),
                text.small(p.relative_difference),
                text.times(p.times_noise),
                _verdict(p),
            )
            for p in pairs
        ),
    )
