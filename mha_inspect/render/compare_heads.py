"""The page of `compare-heads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf

from .. import text
from ..reports.compare_heads import (
    CompareHeadsReport,
    Focus,
    HeadCount,
    HeadsFocus,
    HeadTime,
    HeadTraining,
    StageShapes,
    Timing,
    Training,
)
from .page import Cell, Column, Page, Paragraph, Section, facts, section, table
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
    floors = {count.noise_floor for count in report.counts}
    size = f"the rounding error {text.small(floors.pop())}" if len(floors) == 1 else "its rounding error"
    floor = f"{size} ({MEASURED[report.measured_against]})"
    noise = (
        "relative difference: ‖output − baseline‖ / ‖baseline‖. × noise: the largest difference over "
        f"{floor}, a power of ten. Above 10, the difference is too large to be rounding."
    )
    detail = f"same weights, same input; baseline {text.plural(report.baseline, 'head')}"
    columns = [
        _HEADS,
        Column("head_dim", lambda count: count.head_dim, "right"),
        Column("parameters", lambda count: f"{count.numel:,}", "right", drop=3),
        Column("same parameters", lambda c: Cell("yes") if c.same_parameters else Cell("no", "warn"), drop=4),
        Column("output shape", lambda count: shape_cell(count.output_shape, ""), tone="shape", drop=6),
        *difference_columns("relative difference", (0, 2), lambda count: count.num_heads == report.baseline),
        Column("first differing stage", lambda count: count.first_differing_stage or "", drop=5, optional=True),
    ]
    yield section("head counts", table(report.counts, columns), detail=detail)
    yield section("", Paragraph(noise), more="")
    yield _stages(report)
    reasons = tuple(_reasons([count for count in report.counts if count.num_heads != report.baseline]))
    yield section("why", facts(("each head", _OWN_SOFTMAX), *reasons))
    if report.training is not None:
        yield _training(report.training, report.baseline)
    if report.focus is not None:
        yield _focus(report.focus)
    if report.timing is not None:
        yield _timing(report.timing)
    yield answered(report.answer)
    ways = {
        "--steps 1 compares a first gradient, --steps 100 trains them": report.training,
        "--focus shows what each head looks at": report.focus,
        "--time measures speed": report.timing,
    }
    ways_left = [way for way, answer in ways.items() if answer is None]
    if ways_left:
        yield section("", Paragraph(f"Next: {'; '.join(ways_left)}.", "muted"), more="")


def _stages(report: CompareHeadsReport) -> Section:
    """Return the table of stages by head counts, in canonical axes."""

    def shape(place: int, stage: StageShapes) -> Cell:
        sizes = stage.shapes[place]
        return Cell("-", "muted") if sizes is None else shape_cell(sizes, stage.axes)

    columns = [
        Column("stage", lambda stage: stage.name, tone="strong"),
        Column("axes", lambda stage: stage.axes, tone="axes", drop=1),
        *(
            Column(text.plural(count.num_heads, "head"), partial(shape, place), tone="shape")
            for place, count in enumerate(report.counts)
        ),
        Column("all", lambda stage: Cell("same", "muted") if stage.same else Cell(""), optional=True),
    ]
    more = "A pipe, e.g. | less, shows the stages by head count."
    detail = "shapes in the same axes for every head count"
    return section("stages", table(report.stages, columns), detail=detail, more=more)


def _reasons(counts: Sequence[HeadCount]) -> Iterator[tuple[str, str]]:
    """Yield a line for each reason. Head counts whose reasons differ only in their sizes share a line.

    `2, 4 heads`: `scores differ: 2 heads use 6 features each, 4 use 3; 1 head uses all 12.`
    """
    for group in grouped(counts, lambda count: count._pieces[::3] if count._pieces else count.reason):
        heads = f"{', '.join(str(count.num_heads) for count in group)} head" + "s" * (
            [count.num_heads for count in group] != [1]
        )
        start, sizes, _, end = group[0]._pieces or (group[0].reason, "", "", "")
        others = "".join(f", {count._pieces[2]}" for count in group[1:] if count._pieces and count._pieces[2])
        yield heads, f"{start}{sizes}{others}{end}"


def _apart(name: str, count: HeadTraining) -> str:
    """Return the relative difference of a part's change: a number, `from 0`, or `rounding`.

    A dash where this head count has no such part.
    """
    part = next((part for part in count.parts if part.part == name), None)
    if part is None:
        return "-"
    if part.verdict == "differs" and part.relative_difference == inf:
        return "from 0"
    return "rounding" if part.verdict == "same" and part.max_abs_difference else number(part.relative_difference)


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
    others = [count for count in training.counts if count.num_heads != baseline]
    names = dict.fromkeys(part.part for count in others for part in count.parts)
    # Where the page is narrow, the last counts go first.
    by_part = [
        Column(text.plural(count.num_heads, "head"), partial(_apart, count=count), "right", drop=place)
        for place, count in enumerate(others)
    ]
    return section(
        "training",
        table(training.counts, columns),
        table(list(names), [Column("change relative to the baseline's", str, tone="strong"), *by_part]),
        Paragraph(training.answer),
        Paragraph(_NO_RANKING, "muted"),
        detail=detail,
    )


def _focus(focus: Focus) -> Section:
    def attention(count: HeadsFocus) -> str:
        return "" if count.attention is None else f"{count.attention} {count.module}".rstrip()

    columns = [
        Column("num_heads", lambda row: row[0].num_heads, "right", "strong"),
        Column("attention", lambda row: attention(row[0]), optional=True),
        Column("head", lambda row: row[1].head, "right"),
        Column("most attended key", lambda row: row[1].most_attended_key, "right"),
        Column("share", lambda row: text.percent(row[1].share), "right"),
        Column("effective keys", lambda row: text.statistic(row[1].effective_keys), "right"),
        Column("distance", lambda row: text.statistic(row[1].distance), "right"),
    ]
    detail = "averaged over batch and queries; effective keys: how many share the weight (exp of its entropy)"
    rows = [(count, head) for count in focus.counts for head in count.by_head]
    return section("focus", table(rows, columns), Paragraph(focus.answer), detail=detail)


def _timing(timing: Timing) -> Section:
    def flops(name: str, count: HeadTime) -> str:
        return text.flops(sum(stage.flops for stage in count.flops if stage.stage == name))

    names = dict.fromkeys(stage.stage for count in timing.counts for stage in count.flops)
    columns = [
        _HEADS,
        Column("median", lambda count: f"{text.small(count.median_ms)} ms", "right"),
        Column("middle half of runs", lambda c: f"{text.small(c.low_ms)} to {text.small(c.high_ms)} ms", "right"),
        Column("runs", lambda count: count.runs, "right", drop=20),
        *(Column(name, partial(flops, name), "right", drop=place) for place, name in enumerate(names, 1)),
    ]
    detail = f"forward only, {text.plural(timing.threads, 'thread')}; FLOPs of each stage's matrix products"
    return section("time", table(timing.counts, columns), Paragraph(timing.answer), detail=detail)
