"""The page of `compare-heads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

_OWN_SOFTMAX = "H heads are H softmaxes over the same keys, each of its own scores: so H patterns of weights."
_HEADS = Column("num_heads", lambda count: count.num_heads, "right", "strong")
_NO_RANKING = (
    "The losses do not rank head counts: with another task, seed, learning rate or number of steps, another head count "
    "may have the lowest."
)


def compare_heads_page(report: CompareHeadsReport) -> Page:
    """Return the page: one row per head count, the reasons, and the answer last."""
    return layer_page(report.environment, report.layer, _sections(report))


def _sections(report: CompareHeadsReport) -> Iterator[Section]:
    yield _head_counts(report)
    yield section("", Paragraph(_noise(report)), more="")
    yield _stages(report)
    compared = [count for count in report.counts if count.num_heads != report.baseline]
    yield section("why", facts(("each head", _OWN_SOFTMAX), *_reasons(compared)))
    if report.training is not None:
        yield _training(report.training, report.baseline)
    if report.focus is not None:
        yield _focus(report.focus)
    if report.timing is not None:
        yield _timing(report.timing)
    yield answered(report.answer)
    options = [*_options_left(report)]
    if options:
        yield section("", Paragraph(f"Next: {'; '.join(options)}.", "muted"), more="")


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


def _noise(report: CompareHeadsReport) -> str:
    """Return the meaning of the columns of the difference."""
    floors = {count.noise_floor for count in report.counts}
    size = f"the rounding error {text.small(floors.pop())}" if len(floors) == 1 else "its rounding error"
    return (
        "relative difference: ‖output − baseline‖ / ‖baseline‖. × noise: the largest difference over "
        f"{size} ({MEASURED[report.measured_against]}), a power of ten. Above 10, the difference is too large to be "
        "rounding."
    )


def _options_left(report: CompareHeadsReport) -> Iterator[str]:
    """Yield the options that were not given, and what each of them shows."""
    if report.training is None:
        yield "--steps 1 compares a first gradient, --steps 100 trains them"
    if report.focus is None:
        yield "--focus shows what each head looks at"
    if report.timing is None:
        yield "--time measures speed"


def _stages(report: CompareHeadsReport) -> Section:
    """Return the table of stages by head counts, in canonical axes."""
    columns = [
        Column("stage", lambda stage: stage.name, tone="strong"),
        Column("axes", lambda stage: stage.axes, tone="axes", drop=1),
    ]
    for place, count in enumerate(report.counts):
        columns.append(Column(text.plural(count.num_heads, "head"), partial(_shape, place=place), tone="shape"))
    columns.append(Column("all", _sameness, optional=True))
    more = "A pipe, e.g. | less, shows the stages by head count."
    detail = "shapes in the same axes for every head count"
    return section("stages", table(report.stages, columns), detail=detail, more=more)


def _sameness(stage: StageShapes) -> Cell:
    return Cell("same", "muted") if stage.same else Cell("")


def _shape(stage: StageShapes, place: int) -> Cell:
    """Return the shape of a stage for the head count in that place; a dash where it has no such stage."""
    sizes = stage.shapes[place]
    return Cell("-", "muted") if sizes is None else shape_cell(sizes, stage.axes)


def _reasons(counts: Sequence[HeadCount]) -> Iterator[tuple[str, str]]:
    """Yield a line for each reason. Head counts whose reasons differ only in their sizes share a line.

    `2, 4 heads`: `scores differ: 2 heads use 6 features each, 4 use 3; 1 head uses all 12.`
    """
    for group in grouped(counts, _reason_without_sizes):
        numbers = [count.num_heads for count in group]
        heads = f"{', '.join(map(str, numbers))} {'head' if numbers == [1] else 'heads'}"
        first = group[0]
        if not first._pieces:
            yield heads, first.reason
            continue
        start, sizes, _, end = first._pieces
        for count in group[1:]:
            sizes_of_next = count._pieces[2] if count._pieces else ""
            sizes += f", {sizes_of_next}" if sizes_of_next else ""
        yield heads, f"{start}{sizes}{end}"


def _reason_without_sizes(count: HeadCount) -> object:
    """Return the beginning and the end of the reason, between which its sizes stand; the whole without sizes."""
    if not count._pieces:
        return count.reason
    start, _, _, end = count._pieces
    return start, end


def _apart(count: HeadTraining, name: str) -> str:
    """Return the relative difference of a part's change: a number, `from 0`, or `rounding`.

    A dash where this head count has no such part.
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
    columns = [
        _HEADS,
        Column("loss before", lambda count: text.statistic(count.first_loss), "right", drop=3),
        Column("loss after", lambda count: text.statistic(count.last_loss), "right", drop=2),
        Column("moved", lambda count: text.small(count.moved), "right", drop=1),
        Column("largest difference", lambda count: number(count.max_abs_difference), "right", drop=4),
        Column("apart / moved", lambda count: number(count.apart), "right"),
        Column("× noise", lambda count: multiple(count.times_noise), "right"),
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
    names: dict[str, None] = {}
    for count in compared:
        names.update(dict.fromkeys(part.part for part in count.parts))
    columns = [Column("change relative to the baseline's", str, tone="strong")]
    for place, count in enumerate(compared):
        # Where the page is narrow, the last counts go first.
        columns.append(Column(text.plural(count.num_heads, "head"), partial(_apart, count), "right", drop=place))
    return table(list(names), columns)


@dataclass(frozen=True)
class _Head:
    """One head of a head count, and what it looks at."""

    count: HeadsFocus
    focus: HeadFocus

    @property
    def attention(self) -> str:
        """The number of its attention, and its module: `2 decoder.self_attn`."""
        count = self.count
        if count.attention is None:
            return ""
        return f"{count.attention} {count.module}".rstrip()


def _focus(focus: Focus) -> Section:
    columns = [
        Column("num_heads", lambda row: row.count.num_heads, "right", "strong"),
        Column("attention", lambda row: row.attention, optional=True),
        Column("head", lambda row: row.focus.head, "right"),
        Column("most attended key", lambda row: row.focus.most_attended_key, "right"),
        Column("share", lambda row: text.percent(row.focus.share), "right"),
        Column("effective keys", lambda row: text.statistic(row.focus.effective_keys), "right"),
        Column("distance", lambda row: text.statistic(row.focus.distance), "right"),
    ]
    detail = "averaged over batch and queries; effective keys: how many share the weight (exp of its entropy)"
    rows: list[_Head] = []
    for count in focus.counts:
        rows += [_Head(count, head) for head in count.by_head]
    return section("focus", table(rows, columns), Paragraph(focus.answer), detail=detail)


def _timing(timing: Timing) -> Section:
    columns = [
        _HEADS,
        Column("median", lambda count: f"{text.small(count.median_ms)} ms", "right"),
        Column("middle half of runs", _middle_half, "right"),
        Column("runs", lambda count: count.runs, "right", drop=20),
    ]
    names = dict.fromkeys(stage.stage for count in timing.counts for stage in count.flops)
    for place, name in enumerate(names, 1):
        columns.append(Column(name, partial(_flops, name=name), "right", drop=place))
    detail = f"forward only, {text.plural(timing.threads, 'thread')}; FLOPs of each stage's matrix products"
    return section("time", table(timing.counts, columns), Paragraph(timing.answer), detail=detail)


def _middle_half(count: HeadTime) -> str:
    return f"{text.small(count.low_ms)} to {text.small(count.high_ms)} ms"


def _flops(count: HeadTime, name: str) -> str:
    """Return the FLOPs of all stages of a name."""
    flops = 0
    for stage in count.flops:
        if stage.stage == name:
            flops += stage.flops
    return text.flops(flops)
