"""The page of `compare-heads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .. import text
from ..reports.compare_heads import (
    CompareHeadsReport,
    Focus,
    Gradients,
    HeadCount,
    HeadGradients,
    HeadPair,
    HeadsFocus,
    PartGradient,
    Timing,
    Training,
)
from .page import Cell, Column, Facts, Page, Paragraph, Section, Table, table
from .parts import MEASURED, difference_cells, layer_page, multiple, number, shape_cell, verdict_cell

_MATRICES = frozenset({"W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o", "bias_k", "bias_v"})
"""The parts of a layer that was built from flags; those of another module are its parameters, however many."""


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


def compare_heads_page(report: CompareHeadsReport) -> Page:
    """Return the page: a row a head count, the reasons, and the answer, which comes last."""
    return layer_page(report.environment, report.layer, _sections(report))


def _sections(report: CompareHeadsReport) -> Iterator[Section]:
    floors = {count.noise_floor for count in report.counts}
    floor = f" of {text.small(floors.pop())}" if len(floors) == 1 else ""
    yield Section(
        (
            _counts(report),
            Paragraph(
                f"× noise is how many times the rounding error{floor} ({MEASURED[report.measured_against]}) "
                "the largest difference is: above 10 it is no rounding."
            ),
        ),
        "head counts",
        f"same weights, same input; baseline {text.plural(report.baseline, 'head')}",
    )
    reasons = _reasons([count for count in report.counts if count.num_heads != report.baseline])
    if reasons:
        yield Section((Facts(reasons),), "why")
    if report.equalities:
        yield Section(tuple(Paragraph(sentence) for sentence in report.equalities), "where outputs must be equal")
    if report.pairs is not None:
        yield Section((_pairs(report.pairs),), "every pair")
    yield from _learning(report)
    yield Section(tuple(Paragraph(sentence, "strong") for sentence in report.answer), "answer")
    untold = [
        f"{flag} {what}"
        for flag, what, told in (
            ("--gradients", "what a first step would change", report.gradients),
            ("--steps 100", "what is learned", report.training),
            ("--focus", "what each head looks at", report.focus),
            ("--time", "which is faster", report.timing),
        )
        if told is None
    ]
    if untold:
        yield Section((Paragraph(f"{'; '.join(untold)}.", "muted"),), "what to ask next")


def _reasons(counts: Sequence[HeadCount]) -> tuple[tuple[str, str], ...]:
    """Return a line for each reason; where only the sizes differ, head counts share one.

    `2, 4 heads`: `scores differ: 2 sums over 6 features each, 4 sums over 3 features each instead of 1 sum over 12`.
    """
    alike: dict[tuple[str, str], list[tuple[HeadCount, str]]] = {}
    for count in counts:
        what, colon, how = count.reason.partition(": ")
        own, instead, of = how.partition(" instead of ")
        key = (f"{what}{colon}", f"{instead}{of}") if instead else (count.reason, "")
        alike.setdefault(key, []).append((count, own if instead else ""))
    lines = []
    for (start, end), those in alike.items():
        numbers = ", ".join(str(count.num_heads) for count, _ in those)
        said = start + ", ".join(how for _, how in those) + end
        lines.append((f"{numbers} {'head' if numbers == '1' else 'heads'}", said))
    return tuple(lines)


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
                *difference_cells(c, baseline=c.num_heads == report.baseline),
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
                *difference_cells(p),
            )
            for p in pairs
        ),
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
    columns = (
        Column("num_heads", "right", "strong"),
        Column("loss", "right", drop=20),
        # Biases go first where the page is narrow, the last of them first.
        *(Column(name, "right", drop=0 if name.startswith("W") else 1 + n) for n, name in enumerate(names) if across),
        Column("× noise", "right"),
        Column("verdict"),
    )
    rows = (_gradient_row(count, across, count.num_heads == baseline) for count in gradients.counts)
    tables = [table(columns, rows), *([] if across else [_by_parameter(gradients, baseline)])]
    detail = f"relative difference from the baseline's; loss {gradients.loss}"
    return Section((*tables, Paragraph(gradients.answer)), "gradients", detail)


def _gradient_row(count: HeadGradients, across: bool, is_baseline: bool) -> tuple[str | Cell, ...]:
    known = [part.times_noise for part in count.parts if part.times_noise is not None]
    return (
        str(count.num_heads),
        text.statistic(count.loss),
        *(_apart(part) for part in count.parts if across),
        multiple(max(known, default=None)),
        verdict_cell(count.verdict, baseline=is_baseline),
    )


def _by_parameter(gradients: Gradients, baseline: int) -> Table:
    """Return a table with a row a parameter, for names of their own take too much room beside each other."""
    others = [count for count in gradients.counts if count.num_heads != baseline]
    names = dict.fromkeys(part.part for count in gradients.counts for part in count.parts)
    parts = [{part.part: part for part in count.parts} for count in others]
    return table(
        (
            Column("parameter", tone="strong"),
            # Where the page is narrow, the last counts go first.
            *(Column(text.plural(count.num_heads, "head"), "right", drop=n) for n, count in enumerate(others)),
        ),
        ((name, *(_apart(of[name]) if name in of else "-" for of in parts)) for name in names),
    )


def _training(training: Training, baseline: int) -> Section:
    columns = (
        Column("num_heads", "right", "strong"),
        Column("loss before", "right", drop=3),
        Column("loss after", "right", drop=2),
        Column("moved", "right", drop=1),
        Column("largest difference", "right", drop=4),
        Column("apart / moved", "right"),
        Column("× noise", "right"),
        Column("verdict"),
    )
    rows = (
        (
            str(count.num_heads),
            text.statistic(count.first_loss),
            text.statistic(count.last_loss),
            text.small(count.moved),
            number(count.max_abs_difference),
            number(count.apart),
            multiple(count.times_noise),
            verdict_cell(count.verdict, baseline=count.num_heads == baseline),
        )
        for count in training.counts
    )
    detail = f"{text.plural(training.steps, 'step')} of {training.optimizer}, {training.task}"
    return Section((table(columns, rows), Paragraph(training.answer)), "training", detail)


def _focus(focus: Focus) -> Section:
    spread = []
    for count in focus.counts:
        if count.num_heads > 1:
            name = text.plural(count.num_heads, "head") + (
                f", attention {_attention(count)}" if count.attention else ""
            )
            said = f"Jensen-Shannon divergence {text.small(count.divergence)} "
            said += f"of at most ln {count.num_heads} = {text.small(count.largest_divergence)}"
            pairs = [("most", count.most_alike), ("least", count.least_alike)]
            said += "".join(
                f"; {how} alike heads {pair.left} and {pair.right}, {text.small(pair.divergence)}"
                for how, pair in pairs
                if pair is not None and count.num_heads > 2
            )
            spread.append((name, said))
    blocks = (_heads(focus), *((Facts(tuple(spread)),) if spread else ()), Paragraph(focus.answer))
    detail = f"the weights {focus.weights}; averages over the queries; entropy and divergence in nats; strongest: query"
    return Section(blocks, "focus", f"{detail} → key, of queries that have a choice")


def _timing(timing: Timing) -> Section:
    names = dict.fromkeys(stage.stage for count in timing.counts for stage in count.flops)
    columns = (
        Column("num_heads", "right", "strong"),
        Column("median", "right"),
        Column("half of the runs", "right"),
        Column("runs", "right", drop=20),
        *(Column(name, "right", drop=n + 1) for n, name in enumerate(names)),
    )
    rows = []
    for count in timing.counts:
        flops = {stage.stage: stage.flops for stage in count.flops}
        between = f"{text.small(count.low_ms)} to {text.small(count.high_ms)} ms"
        times = (f"{text.small(count.median_ms)} ms", between, str(count.runs))
        rows.append((str(count.num_heads), *times, *(text.flops(flops.get(name, 0)) for name in names)))
    detail = f"the forward alone, in {text.plural(timing.threads, 'thread')}; operations of each stage's products"
    return Section((table(columns, rows), Paragraph(timing.answer)), "time", detail)


def _heads(focus: Focus) -> Table:
    columns = (
        Column("num_heads", "right", "strong"),
        Column("attention", optional=True),
        Column("head", "right"),
        Column("entropy", "right"),
        Column("effective keys", "right"),
        Column("distance", "right"),
        Column("strongest", drop=1),
    )
    return table(
        columns,
        (
            (
                str(count.num_heads),
                _attention(count),
                str(head.head),
                text.statistic(head.entropy),
                text.statistic(head.effective_keys),
                text.statistic(head.distance),
                ", ".join(f"{one.query} → {one.key} {one.weight:.2f}" for one in head.strongest),
            )
            for count in focus.counts
            for head in count.by_head
        ),
    )


def _attention(count: HeadsFocus) -> str:
    """Return `2 blocks.1.attn`, where there are several."""
    return "" if count.attention is None else f"{count.attention} {count.module}".rstrip()


def _apart(part: PartGradient) -> str:
    """Return the relative difference, or that it is rounding: of a gradient of 0 that is any number of times it."""
    if part.verdict == "same" and part.max_abs_difference:
        return "rounding"
    return number(part.relative_difference)
