"""The parts of the page of `compare-heads` that are there when asked for: gradients, training, focus."""

from __future__ import annotations

from collections.abc import Iterator

from .. import text
from ..reports.common import Verdict
from ..reports.compare_heads import (
    CompareHeadsReport,
    Focus,
    Gradients,
    HeadGradients,
    HeadsFocus,
    PartGradient,
    Training,
)
from .common import VERDICT_TONES
from .document import Cell, Column, Facts, Paragraph, Section, Table, table

_MATRICES = frozenset({"W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o", "bias_k", "bias_v"})
"""The parts of a layer that was built from flags; those of another module are its parameters, however many."""


def learning_sections(report: CompareHeadsReport) -> Iterator[Section]:
    """A section each for what was asked for."""
    if report.gradients is not None:
        yield _gradients(report.gradients, report.baseline)
    if report.training is not None:
        yield _training(report.training, report.baseline)
    if report.focus is not None:
        yield _focus(report.focus)


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
        text.times(max(known)) if known else "-",
        _verdict(count.verdict, is_baseline),
    )


def _by_parameter(gradients: Gradients, baseline: int) -> Table:
    """A row a parameter, for names of their own take too much room beside each other."""
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
            _or_dash(count.max_abs_difference),
            _or_dash(count.apart),
            "-" if count.times_noise is None else text.times(count.times_noise),
            _verdict(count.verdict, count.num_heads == baseline),
        )
        for count in training.counts
    )
    detail = f"{text.plural(training.steps, 'step')} of {training.optimizer}, {training.task}"
    return Section((table(columns, rows), Paragraph(training.answer)), "training", detail)


def _focus(focus: Focus) -> Section:
    spread = Facts(
        tuple(
            (
                text.plural(count.num_heads, "head") + (f", attention {_attention(count)}" if count.attention else ""),
                f"Jensen-Shannon divergence {text.small(count.divergence)} "
                f"of at most ln {count.num_heads} = {text.small(count.largest_divergence)}",
            )
            for count in focus.counts
            if count.num_heads > 1
        )
    )
    blocks = (_heads(focus), *((spread,) if spread.items else ()), Paragraph(focus.answer))
    return Section(blocks, "focus", "averages over the queries; entropy and divergence in nats")


def _heads(focus: Focus) -> Table:
    columns = (
        Column("num_heads", "right", "strong"),
        Column("attention", optional=True),
        Column("head", "right"),
        Column("entropy", "right"),
        Column("effective keys", "right"),
        Column("distance", "right"),
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
            )
            for count in focus.counts
            for head in count.by_head
        ),
    )


def _attention(count: HeadsFocus) -> str:
    """`2 blocks.1.attn`, where there are several."""
    return "" if count.attention is None else f"{count.attention} {count.module}".rstrip()


def _apart(part: PartGradient) -> str:
    """The relative difference; where it is rounding alone it says so, for a gradient of 0 is any number of times it."""
    if part.verdict == "same" and part.max_abs_difference:
        return "rounding"
    return _or_dash(part.relative_difference)


def _or_dash(number: float | None) -> str:
    return "-" if number is None else text.small(number)


def _verdict(verdict: Verdict | None, is_baseline: bool) -> Cell:
    if is_baseline:
        return Cell("baseline", "muted")
    return Cell(verdict or "-", VERDICT_TONES[verdict] if verdict else "muted")
