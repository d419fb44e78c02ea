"""The page of `compare-heads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf

from .. import text
from ..reports.compare_heads import (
    CompareHeadsReport,
    Focus,
    Gradients,
    HeadCount,
    HeadGradients,
    HeadsFocus,
    HeadTime,
    Timing,
    Training,
)
from .page import Cell, Column, Page, Paragraph, Section, Table, facts, section, table
from .parts import MEASURED, answered, difference_columns, layer_page, multiple, number, shape_cell, verdict_cell

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
    untold = [way for way, told in ways.items() if told is None]
    if untold:
        yield section("what to ask next", Paragraph(f"{'; '.join(untold)}.", "muted"))


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
    return table(
        report.counts,
        (Column("num_heads", "right", "strong"), lambda count: count.num_heads),
        (Column("head_dim", "right"), lambda count: count.head_dim),
        (Column("parameters", "right", drop=3), lambda count: text.count(count.numel)),
        (
            Column("same parameters", drop=4),
            lambda count: Cell("yes") if count.same_parameters else Cell("no", "warn"),
        ),
        (Column("output shape", tone="shape", drop=6), lambda count: shape_cell(count.output_shape, "")),
        *difference_columns(
            "relative difference", (0, 2), is_baseline=lambda count: bool(count.num_heads == report.baseline)
        ),
        (Column("first differing stage", drop=5, optional=True), lambda count: count.first_differing_stage or ""),
    )


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
    names = [part.part for part in gradients.counts[0].parts]
    across = set(names) <= _MATRICES
    # Biases go first where the page is narrow, the last of them first.
    parts = [Column(name, "right", drop=0 if name.startswith("W") else 1 + n) for n, name in enumerate(names) if across]
    counts = table(
        gradients.counts,
        (Column("num_heads", "right", "strong"), lambda count: count.num_heads),
        (Column("loss", "right", drop=20), lambda count: text.statistic(count.loss)),
        *((column, partial(_apart, column.title)) for column in parts),
        (Column("× noise", "right"), _most_noise),
        (Column("verdict"), lambda count: verdict_cell(count.verdict, baseline=count.num_heads == baseline)),
    )
    tables = [counts, *([] if across else [_by_parameter(gradients, baseline)])]
    detail = f"relative difference from the baseline's; loss {gradients.loss}"
    return section("gradients", *tables, Paragraph(gradients.answer), detail=detail)


def _most_noise(count: HeadGradients) -> str:
    return multiple(max((part.times_noise for part in count.parts if part.times_noise is not None), default=None))


def _by_parameter(gradients: Gradients, baseline: int) -> Table:
    """Return a table with a row a parameter, for names of their own take too much room beside each other."""
    others = [count for count in gradients.counts if count.num_heads != baseline]
    return table(
        dict.fromkeys(part.part for count in gradients.counts for part in count.parts),
        (Column("parameter", tone="strong"), lambda name: name),
        # Where the page is narrow, the last counts go first.
        *(
            (Column(text.plural(count.num_heads, "head"), "right", drop=n), partial(_apart, count=count))
            for n, count in enumerate(others)
        ),
    )


def _training(training: Training, baseline: int) -> Section:
    counts = table(
        training.counts,
        (Column("num_heads", "right", "strong"), lambda count: count.num_heads),
        (Column("loss before", "right", drop=3), lambda count: text.statistic(count.first_loss)),
        (Column("loss after", "right", drop=2), lambda count: text.statistic(count.last_loss)),
        (Column("moved", "right", drop=1), lambda count: text.small(count.moved)),
        (Column("largest difference", "right", drop=4), lambda count: number(count.max_abs_difference)),
        (Column("apart / moved", "right"), lambda count: number(count.apart)),
        (Column("× noise", "right"), lambda count: multiple(count.times_noise)),
        (Column("verdict"), lambda count: verdict_cell(count.verdict, baseline=count.num_heads == baseline)),
    )
    detail = f"{text.plural(training.steps, 'step')} of {training.optimizer}, {training.task}"
    return section("training", counts, Paragraph(training.answer), detail=detail)


def _focus(focus: Focus) -> Section:
    spread = []
    for count in focus.counts:
        if count.num_heads > 1:
            place = f", attention {_attention(count)}" if count.attention else ""
            said = f"Jensen-Shannon divergence {text.small(count.divergence)} "
            said += f"of at most ln {count.num_heads} = {text.small(count.largest_divergence)}"
            for how, pair in (("most", count.most_alike), ("least", count.least_alike)):
                if pair is not None and count.num_heads > 2:
                    said += f"; {how} alike heads {pair.left} and {pair.right}, {text.small(pair.divergence)}"
            spread.append((text.plural(count.num_heads, "head") + place, said))
    between = [facts(*spread)] if spread else []
    detail = f"the weights {focus.weights}; averages over the queries; entropy and divergence in nats; strongest: query"
    detail += " → key, of queries that have a choice"
    return section("focus", _heads(focus), *between, Paragraph(focus.answer), detail=detail)


def _timing(timing: Timing) -> Section:
    names = dict.fromkeys(stage.stage for count in timing.counts for stage in count.flops)
    counts = table(
        timing.counts,
        (Column("num_heads", "right", "strong"), lambda count: count.num_heads),
        (Column("median", "right"), lambda count: f"{text.small(count.median_ms)} ms"),
        (
            Column("half of the runs", "right"),
            lambda count: f"{text.small(count.low_ms)} to {text.small(count.high_ms)} ms",
        ),
        (Column("runs", "right", drop=20), lambda count: count.runs),
        *((Column(name, "right", drop=n + 1), partial(_flops, name)) for n, name in enumerate(names)),
    )
    detail = f"the forward alone, in {text.plural(timing.threads, 'thread')}; operations of each stage's products"
    return section("time", counts, Paragraph(timing.answer), detail=detail)


def _flops(stage: str, count: HeadTime) -> str:
    return text.flops(sum(own.flops for own in count.flops if own.stage == stage))


def _heads(focus: Focus) -> Table:
    return table(
        [(count, head) for count in focus.counts for head in count.by_head],
        (Column("num_heads", "right", "strong"), lambda row: row[0].num_heads),
        (Column("attention", optional=True), lambda row: _attention(row[0])),
        (Column("head", "right"), lambda row: row[1].head),
        (Column("entropy", "right"), lambda row: text.statistic(row[1].entropy)),
        (Column("effective keys", "right"), lambda row: text.statistic(row[1].effective_keys)),
        (Column("distance", "right"), lambda row: text.statistic(row[1].distance)),
        (
            Column("strongest", drop=1),
            lambda row: ", ".join(f"{one.query} → {one.key} {one.weight:.2f}" for one in row[1].strongest),
        ),
    )


def _attention(count: HeadsFocus) -> str:
    """Return `2 blocks.1.attn`, where there are several."""
    return "" if count.attention is None else f"{count.attention} {count.module}".rstrip()


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
