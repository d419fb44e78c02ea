"""The page of `compare-heads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from .. import text
from ..reports.compare_heads import (
    CompareHeadsReport,
    Focus,
    HeadCount,
    HeadFocus,
    HeadsFocus,
    HeadTime,
    HeadTraining,
    StageShapes,
    Timing,
    Training,
)
from .page import Cell, Column, Page, Paragraph, Section, Table, facts, section, table
from .parts import (
    MEASURED,
    answered,
    difference_columns,
    grouped,
    layer_page,
    multiple,
    number,
    shape_cell,
    verdict_column,
)
from .verdict import counted_findings

_SOFTMAX_PER_HEAD = "H heads compute H softmaxes over the same keys, each from different scores: H patterns of weights."
_HEADS = Column("num_heads", lambda count: count.num_heads, "right", "strong")
_CHANGE = "change: ‖weights after − weights before‖"
_RELATIVE_TO_CHANGE = "relative difference: ‖weights − baseline's weights‖ / the baseline's change"
_NO_RANKING = (
    "The losses do not rank head counts: with another task, seed, learning rate or number of steps, another head count "
    "may have the lowest."
)


def compare_heads_page(report: CompareHeadsReport) -> Page:
    """Return the page: one row per head count, the reasons; the answer first."""
    return layer_page(report.environment, report.layer, _sections(report))


def _sections(report: CompareHeadsReport) -> Iterator[Section]:
    yield answered(report.answer)
    yield from _wrong(report)
    yield _head_counts(report)
    yield section("", Paragraph(_difference_legend(report)), more="")
    yield _stages(report)
    compared = [count for count in report.counts if count.num_heads != report.baseline]
    yield section("why", facts(("each head", _SOFTMAX_PER_HEAD), *_reasons(compared)))
    if report.training is not None:
        yield _training(report.training, report.baseline)
    if report.focus is not None:
        yield _focus(report.focus)
    if report.timing is not None:
        yield _timing(report.timing)
    options = [*_options_left(report)]
    if options:
        yield section("", Paragraph(f"Next: {'; '.join(options)}.", "muted"), more="")


def _wrong(report: CompareHeadsReport) -> Iterator[Section]:
    """Yield what is wrong in the run of the first head count above 1: the comparison is then of a wrong module."""
    if not report.findings:
        return
    count = next(count.num_heads for count in report.counts if count.num_heads > 1)
    found = counted_findings(report.findings)
    sentence = f"With {count} heads, trace finds {found.text}. See mha-inspect trace TARGET --num-heads {count}."
    yield section("", replace(found, text=sentence))


def _head_counts(report: CompareHeadsReport) -> Section:
    """Return the table of head counts: sizes, and the difference of the output from that of the baseline."""

    def is_baseline(count: HeadCount) -> bool:
        return count.num_heads == report.baseline

    columns = [
        _HEADS,
        Column("head_dim", lambda count: count.head_dim, "right"),
        Column("parameters", lambda count: f"{count.numel:,}", "right", drop=3),
        Column("same parameters", _has_same_parameters, drop=4),
        Column("output shape", lambda count: shape_cell(count.output_shape, ""), tone="shape", drop=6),
        *difference_columns("relative difference", (0, 2), is_baseline),
        Column("first differing stage", lambda count: count.first_differing_stage or "", drop=5, optional=True),
    ]
    detail = f"same weights, same input; baseline {text.plural(report.baseline, 'head')}"
    return section("head counts", table(report.counts, columns), detail=detail)


def _has_same_parameters(count: HeadCount) -> Cell:
    return Cell("yes") if count.same_parameters else Cell("no", "warn")


def _difference_legend(report: CompareHeadsReport) -> str:
    """Return what the columns of the difference mean: `relative difference: ‖output − baseline‖ / ‖baseline‖. …`."""
    floors = {count.noise_floor for count in report.counts}
    size = f"the rounding error {text.small(floors.pop())}" if len(floors) == 1 else "its rounding error"
    return (
        "relative difference: ‖output − baseline‖ / ‖baseline‖. times rounding: the largest difference over "
        f"{size} ({MEASURED[report.measured_against]}), a power of ten. Above 10, the difference is too large to be "
        "rounding."
    )


def _options_left(report: CompareHeadsReport) -> Iterator[str]:
    """Yield the options that were not given, and what each of them shows."""
    if report.training is None:
        yield "--steps 1 compares the first gradients, --steps 100 trains every head count"
    if report.focus is None:
        yield "--focus shows what each head attends to"
    if report.timing is None:
        yield "--time measures speed"


def _stages(report: CompareHeadsReport) -> Section:
    """Return the table of stages: a row per stage, and its shape for each head count, in canonical axes."""
    columns = [
        Column("stage", lambda stage: stage.name, tone="strong"),
        Column("axes", lambda stage: stage.axes, tone="axes", drop=1),
    ]
    for place, count in enumerate(report.counts):
        columns.append(Column(text.plural(count.num_heads, "head"), partial(_shape, place=place), tone="shape"))
    columns.append(Column("all", _sameness, optional=True))
    whole = section("stages", table(report.stages, columns), detail="shapes in the same axes for every head count")
    apart = [stage for stage in report.stages if not stage.same]
    if not apart or len(apart) == len(report.stages):
        return whole
    alike = ", ".join(stage.name for stage in report.stages if stage.same)
    return replace(whole, brief=(table(apart, columns[:-1]), Paragraph(f"The same for all: {alike}.", "muted")))


def _sameness(stage: StageShapes) -> Cell:
    return Cell("same", "muted") if stage.same else Cell("")


def _shape(stage: StageShapes, place: int) -> Cell:
    """Return the shape of a stage for the head count in this column; a dash if that head count has no such stage."""
    sizes = stage.shapes[place]
    return Cell("-", "muted") if sizes is None else shape_cell(sizes, stage.axes)


def _reasons(counts: Sequence[HeadCount]) -> Iterator[tuple[str, str]]:
    """Yield a line for each reason. Head counts whose reasons differ only in their sizes share a line.

    `2, 4 heads`: `scores differ: 2 heads use 6 features each, 4 use 3; 1 head uses all 12.`
    """
    for group in grouped(counts, _reason_without_sizes):
        numbers = [count.num_heads for count in group]
        heads = f"{', '.join(map(str, numbers))} {'head' if numbers == [1] else 'heads'}"
        first, *others = group
        if first._pieces is None:
            yield heads, first.reason
            continue
        sizes = first._pieces.sizes
        for count in others:
            if count._pieces is not None and count._pieces.brief:
                sizes += f", {count._pieces.brief}"
        yield heads, first._pieces._replace(sizes=sizes).sentence


def _reason_without_sizes(count: HeadCount) -> object:
    """Return the beginning and the end of a reason, without the sizes between them; the whole reason without sizes."""
    if count._pieces is None:
        return count.reason
    return count._pieces.start, count._pieces.end


def _relative_change(count: HeadTraining, name: str) -> str:
    """Return how the change of a matrix or bias in training differs from that of the baseline, relative to it.

    A number; `from 0` if only this head count changed it; `rounding` if both changed it alike; a dash without the part.
    """
    for part in count.parts:
        if part.part != name:
            continue
        if part.verdict == "differs" and part.relative_difference == inf:
            return "from 0"
        if part.verdict == "same" and part.max_abs_difference:
            return "rounding"
        return number(part.relative_difference)
    return "-"


def _training(training: Training, baseline: int) -> Section:
    """Return the table of trained head counts: losses, and how far the weights are from those of the baseline."""
    columns = [
        _HEADS,
        Column("loss before", lambda count: text.statistic(count.first_loss), "right", drop=3),
        Column("loss after", lambda count: text.statistic(count.last_loss), "right", drop=2),
        Column("change", lambda count: text.small(count.moved), "right", drop=1, legend=_CHANGE),
        Column("largest difference", lambda count: number(count.max_abs_difference), "right", drop=4),
        Column("relative difference", lambda count: number(count.apart), "right", legend=_RELATIVE_TO_CHANGE),
        Column("times rounding", lambda count: multiple(count.times_noise), "right"),
        verdict_column(lambda count: count.num_heads == baseline),
    ]
    detail = f"{text.plural(training.steps, 'step')} of {training.optimizer}, {training.task}"
    return section(
        "training",
        table(training.counts, columns),
        _changes(training, baseline),
        Paragraph(training.answer),
        Paragraph(_NO_RANKING, "muted"),
        detail=detail,
    )


def _changes(training: Training, baseline: int) -> Table:
    """Return how the change of each part, W_q or b_q, differs from that of the baseline, by head count."""
    compared = [count for count in training.counts if count.num_heads != baseline]
    names = dict.fromkeys(part.part for count in compared for part in count.parts)
    columns = [Column("relative difference of the change", str, tone="strong")]
    for place, count in enumerate(compared):
        # On a narrow page, the columns of the last head counts are dropped first.
        columns.append(
            Column(text.plural(count.num_heads, "head"), partial(_relative_change, count), "right", drop=place)
        )
    return table(list(names), columns)


@dataclass(frozen=True)
class _Head:
    """One head of a head count, with the keys that it attends to: a row of the table."""

    count: HeadsFocus
    focus: HeadFocus

    @property
    def attention(self) -> str:
        """The number of its attention, and its module: `2 decoder.self_attn`."""
        if self.count.attention is None:
            return ""
        return f"{self.count.attention} {self.count.module}".rstrip()


def _focus(focus: Focus) -> Section:
    """Return the table of heads: the key that each attends to most, and how widely it attends."""
    columns = [
        Column("num_heads", lambda row: row.count.num_heads, "right", "strong"),
        Column("attention", lambda row: row.attention, optional=True),
        Column("head", lambda row: row.focus.head, "right"),
        Column("most attended key", lambda row: row.focus.most_attended_key, "right"),
        Column("share", lambda row: text.percent(row.focus.share), "right"),
        Column("keys attended", lambda row: text.statistic(row.focus.effective_keys), "right"),
        Column("distance", lambda row: text.statistic(row.focus.distance), "right"),
    ]
    detail = "averaged over batch and queries; keys attended: how many share the weight (exp of its entropy)"
    rows: list[_Head] = []
    for count in focus.counts:
        rows += [_Head(count, head) for head in count.by_head]
    return section("focus", table(rows, columns), Paragraph(focus.answer), detail=detail)


def _timing(timing: Timing) -> Section:
    """Return the table of times, and FLOPs by stage; a narrow page drops `runs` first, then the last stages."""
    columns = [
        _HEADS,
        Column("median", lambda count: f"{text.small(count.median_ms)} ms", "right"),
        Column("middle half of runs", _middle_half, "right"),
        Column("runs", lambda count: count.runs, "right", drop=20),
    ]
    names: dict[str, None] = {}
    for count in timing.counts:
        for stage in count.flops:
            names[stage.stage] = None
    for place, name in enumerate(names, 1):
        columns.append(Column(name, partial(_flops, name=name), "right", drop=place))
    detail = f"forward only, {text.plural(timing.threads, 'thread')}; FLOPs of each stage's matrix products"
    return section("time", table(timing.counts, columns), Paragraph(timing.answer), detail=detail)


def _middle_half(count: HeadTime) -> str:
    """Return the times between the first and the third quartile: `1.2 to 1.5 ms`."""
    return f"{text.small(count.low_ms)} to {text.small(count.high_ms)} ms"


def _flops(count: HeadTime, name: str) -> str:
    return text.flops(sum(stage.flops for stage in count.flops if stage.stage == name))
