"""The page of `compare-heads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from .. import text
from ..reports.compare_heads import CompareHeadsReport, Focus, Gradients, HeadCount, HeadGradients, Timing, Training
from .page import Cell, Column, Page, Paragraph, Section, Table, facts, section, table
from .parts import (
    MEASURED,
    answered,
    difference,
    difference_columns,
    layer_page,
    multiple,
    number,
    shape_cell,
    verdict_cell,
)

_HEADS = Column("num_heads", "right", "strong")
_MATRICES = frozenset({"W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o", "bias_k", "bias_v"})
"""The parts of a layer that was built from flags; those of another module are its parameters, however many."""


def page(report: CompareHeadsReport) -> Page:
    """Return the page: a row a head count, the reasons, and the answer, which comes last."""
    return layer_page(report.environment, report.layer, _sections(report))


def _sections(report: CompareHeadsReport) -> Iterator[Section]:
    floors = {count.noise_floor for count in report.counts}
    floor = f" of {text.small(floors.pop())}" if len(floors) == 1 else ""
    noise = (
        f"× noise is how many times the rounding error{floor} ({MEASURED[report.measured_against]}) the largest "
        "difference is: above 10 it is no rounding."
    )
    detail = f"same weights, same input; baseline {text.plural(report.baseline, 'head')}"
    yield section("head counts", _counts(report), Paragraph(noise), detail=detail)
    reasons = _reasons([count for count in report.counts if count.num_heads != report.baseline])
    if reasons:
        yield section("why", facts(*reasons))
    yield from _learning(report)
    yield answered(report.answer)
    ways = {
        "--gradients what a first step would change": report.gradients,
        "--steps 100 what is learned": report.training,
        "--focus what each head looks at": report.focus,
        "--time which is faster": report.timing,
    }
    ways_left = [way for way, answer in ways.items() if answer is None]
    if ways_left:
        yield section("what to ask next", Paragraph(f"{'; '.join(ways_left)}.", "muted"))


def _reasons(counts: Sequence[HeadCount]) -> tuple[tuple[str, str], ...]:
    """Return a line for each reason; where only the sizes differ, head counts share one.

    `2, 4 heads`: `scores differ: 2 sums over 6 features each, 4 sums over 3 features each instead of 1 sum over 12`.
    """
    alike: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for count in counts:
        start, sizes, end = count._pieces or (count.reason, "", "")
        alike.setdefault((start, end), []).append((count.num_heads, sizes))
    return tuple(
        (
            f"{', '.join(str(number) for number, _ in those)} {'head' if [n for n, _ in those] == [1] else 'heads'}",
            f"{start}{', '.join(sizes for _, sizes in those) if those[0][1] else ''}{end}",
        )
        for (start, end), those in alike.items()
    )


def _counts(report: CompareHeadsReport) -> Table:
    columns = [
        _HEADS,
        Column("head_dim", "right"),
        Column("parameters", "right", drop=3),
        Column("same parameters", drop=4),
        Column("output shape", tone="shape", drop=6),
        *difference_columns("relative difference", (0, 2)),
        Column("first differing stage", drop=5, optional=True),
    ]
    rows = []
    for count in report.counts:
        same = Cell("yes") if count.same_parameters else Cell("no", "warn")
        shape, is_baseline = shape_cell(count.output_shape, ""), count.num_heads == report.baseline
        sizes = count.num_heads, count.head_dim, text.count(count.numel), same, shape
        rows.append((*sizes, *difference(count, baseline=is_baseline), count.first_differing_stage or ""))
    return table(columns, rows)


def _learning(report: CompareHeadsReport) -> Iterator[Section]:
    """Yield a section for each thing that was asked for."""
    if report.gradients is not None:
        yield _gradients(report.gradients, report.baseline)
    if report.training is not None:
        yield _training(report.training, report.baseline)
    for focus in (report.focus, report.focus_after):
        if focus is not None:
            yield _focus(focus)
    if report.timing is not None:
        yield _timing(report.timing)


def _gradients(gradients: Gradients, baseline: int) -> Section:
    """Return the parts as columns; parameters, whose names take too much room beside each other, as rows."""
    names = list(dict.fromkeys(part.part for count in gradients.counts for part in count.parts))
    first = [part.part for part in gradients.counts[0].parts]
    across = first if set(first) <= _MATRICES else []
    # Biases go first where the page is narrow, the last of them first.
    parts = [Column(name, "right", drop=0 if name.startswith("W") else 1 + n) for n, name in enumerate(across)]
    rows = []
    for count in gradients.counts:
        noise = max((part.times_noise for part in count.parts if part.times_noise is not None), default=None)
        apart = (_apart(name, count) for name in across)
        verdict = verdict_cell(count.verdict, baseline=count.num_heads == baseline)
        rows.append((count.num_heads, text.statistic(count.loss), *apart, multiple(noise), verdict))
    columns = [_HEADS, Column("loss", "right", drop=20), *parts, Column("× noise", "right"), Column("verdict")]
    tables = [table(columns, rows)]
    if not across:
        others = [count for count in gradients.counts if count.num_heads != baseline]
        # Where the page is narrow, the last counts go first.
        counts = [Column(text.plural(count.num_heads, "head"), "right", drop=n) for n, count in enumerate(others)]
        by_name = [(name, *(_apart(name, count) for count in others)) for name in names]
        tables.append(table([Column("parameter", tone="strong"), *counts], by_name))
    detail = f"relative difference from the baseline's; loss {gradients.loss}"
    return section("gradients", *tables, Paragraph(gradients.answer), detail=detail)


def _apart(name: str, count: HeadGradients) -> str:
    """Return the relative difference of a part; where either is 0 or rounding, that it is so: no number tells more.

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
        Column("loss before", "right", drop=3),
        Column("loss after", "right", drop=2),
        Column("moved", "right", drop=1),
        Column("largest difference", "right", drop=4),
        Column("apart / moved", "right"),
        Column("× noise", "right"),
        Column("verdict"),
    ]
    rows = []
    for count in training.counts:
        losses = text.statistic(count.first_loss), text.statistic(count.last_loss)
        distances = text.small(count.moved), number(count.max_abs_difference), number(count.apart)
        verdict = verdict_cell(count.verdict, baseline=count.num_heads == baseline)
        rows.append((count.num_heads, *losses, *distances, multiple(count.times_noise), verdict))
    detail = f"{text.plural(training.steps, 'step')} of {training.optimizer}, {training.task}"
    return section("training", table(columns, rows), Paragraph(training.answer), detail=detail)


def _focus(focus: Focus) -> Section:
    columns = [
        _HEADS,
        Column("attention", optional=True),
        Column("head", "right"),
        Column("entropy", "right"),
        Column("effective keys", "right"),
        Column("distance", "right"),
        Column("strongest", drop=1),
    ]
    rows, spread = [], []
    for count in focus.counts:
        attention = "" if count.attention is None else f"{count.attention} {count.module}".rstrip()
        for head in count.by_head:
            numbers = map(text.statistic, (head.entropy, head.effective_keys, head.distance))
            strongest = ", ".join(f"{pair.query} → {pair.key} {pair.weight:.2f}" for pair in head.strongest)
            rows.append((count.num_heads, attention, head.head, *numbers, strongest))
        if count.num_heads > 1:
            said = f"Jensen-Shannon divergence {text.small(count.divergence)} "
            said += f"of at most ln {count.num_heads} = {text.small(count.largest_divergence)}"
            for how, pair in (("most", count.most_alike), ("least", count.least_alike)):
                if pair is not None and count.num_heads > 2:
                    said += f"; {how} alike heads {pair.left} and {pair.right}, {text.small(pair.divergence)}"
            place = f", attention {attention}" if attention else ""
            spread.append((text.plural(count.num_heads, "head") + place, said))
    between = [facts(*spread)] if spread else []
    detail = f"the weights {focus.weights}; averages over the queries; entropy and divergence in nats; strongest: query"
    detail += " → key, of queries that have a choice"
    return section("focus", table(columns, rows), *between, Paragraph(focus.answer), detail=detail)


def _timing(timing: Timing) -> Section:
    names = dict.fromkeys(stage.stage for count in timing.counts for stage in count.flops)
    columns = [
        _HEADS,
        Column("median", "right"),
        Column("half of the runs", "right"),
        Column("runs", "right", drop=20),
        *(Column(name, "right", drop=place) for place, name in enumerate(names, 1)),
    ]
    rows = []
    for count in timing.counts:
        flops = [sum(stage.flops for stage in count.flops if stage.stage == name) for name in names]
        half = f"{text.small(count.low_ms)} to {text.small(count.high_ms)} ms"
        rows.append((count.num_heads, f"{text.small(count.median_ms)} ms", half, count.runs, *map(text.flops, flops)))
    detail = f"the forward alone, in {text.plural(timing.threads, 'thread')}; operations of each stage's products"
    return section("time", table(columns, rows), Paragraph(timing.answer), detail=detail)
