"""What a diff found, in sentences: every one of them said because of a number that was measured. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from typing import TYPE_CHECKING

from ..reports.diff import DiffReport, MaskedRowPair, ParameterPair, RowContent
from ..text import multiple, percent, small

if TYPE_CHECKING:
    from .shared_weights import Shared


@dataclass(frozen=True)
class Blocked:
    """The scores that a mask blocks on both sides, fully masked rows left out."""

    left: str
    """What stands in their place: `−inf`, `about −1e09`."""
    right: str
    count: int
    zero: bool
    """Whether both softmaxes make every one of them exactly 0."""


def stage_note(stage: str, *sides: tuple[str, Collection[str]]) -> str:
    """Say why a stage was not compared, from what to call each side and the stages that it has."""
    for name, has in sides:
        if stage == "scores" and stage not in has and "masked_scores" in has:
            return f"{name} adds the mask inside the product: the scores without it are never made"
        if stage not in has:
            return f"{name} has no {_LACKING.get(stage, 'such stage')}"
    return "an axis of it has no name on one side: not compared"


_LACKING = {
    "masked_scores": "mask",
    "output": "output projection: concat is what it returns",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "such projection"),
}
"""What a side has not that lacks a stage."""


def notes(report: DiffReport, drop: tuple[bool, bool], counts: Sequence[int], blocked: Blocked | None) -> Iterator[str]:
    """Say what a reader should not miss beside the answer: which sides drop elements, how many attentions each has."""
    labels = [report.left.label, report.right.label]
    for label, count in zip(labels, counts, strict=True):
        if not count:
            yield f"No attention was found in {label}: only the outputs are compared."
    if counts[0] != counts[1] and all(counts):
        yield (
            f"{labels[0]} has {counts[0]} attention{'s' if counts[0] > 1 else ''} and {labels[1]} has {counts[1]}: "
            f"they are paired in the order in which they are computed, the first {min(counts)}."
        )
    if any(drop):
        yield (
            "Dropout is at work: where both do not draw the same elements, the difference is theirs. The noise floor "
            "is measured without it."
        )
    if blocked is not None and blocked.left == blocked.right and blocked.zero:
        yield (
            f"The mask puts {blocked.left} in {blocked.count:,} scores on both sides, and softmax makes all of them "
            "exactly 0."
        )


def answer(report: DiffReport, shared: Shared, blocked: Blocked | None) -> tuple[str, ...]:
    """Return the answer: whether both compute the same, and what makes or does not make the difference."""
    one, other = report.left.label, report.right.label
    names = (f"the left {one}", f"the right {other}") if one == other else (one, other)
    given = "weights of its own on each side"
    if shared.are_carried:
        whole = report.weights.whole or shared.are_drawn
        given = "the same weights" if whole else "weights that are the same as far as they could be carried"
    return (whether(report, names, f"with {given} and the same input"), *_why(report, shared, names, blocked))


def whether(report: DiffReport, names: tuple[str, str], given: str) -> str:
    """Whether both compute the same, in a sentence; `given` says what both were given."""
    left, right = names
    output, floor = report.output, f"the rounding of {report.noise.dtype}"
    if report.verdict == "same":
        exactly = output.max_abs_difference == 0
        times = "bit for bit" if exactly else f"within rounding ({multiple(output.times_noise)} times {floor})"
        return f"The same: {given}, {left} and {right} return the same, {times}."
    if report.verdict == "inconclusive":
        return (
            f"Open: the outputs of {left} and {right} are {multiple(output.times_noise)} times {floor} apart, more "
            "than two roundings and too little to call a difference."
        )
    rest = report.elsewhere
    if rest is not None and rest.verdict == "same":
        masked = _masked_rows(report, names)
        return f"The same wherever there is a key to look at, and not where every key is masked: {masked}."
    if report.masked_rows and rest is None:
        return f"Not the same: every key of every query is masked, and then {_masked_rows(report, names)}."
    if output.max_abs_difference is None:
        return (
            f"Not the same: {left} returns {list(report.left.output_shape)} and {right} "
            f"{list(report.right.output_shape)}."
        )
    parts = f"; they part at {report.first_differing_stage}" if report.first_differing_stage else ""
    relative = output.relative_difference
    if relative is None or isinf(relative):
        return f"Not the same: the outputs of {left} and {right} are not finite in the same places{parts}."
    return (
        f"Not the same: {given}, the outputs of {left} and {right} are "
        f"{multiple(output.times_noise)} times {floor} apart, {percent(relative)} of their size{parts}."
    )


def _why(report: DiffReport, shared: Shared, names: tuple[str, str], blocked: Blocked | None) -> Iterator[str]:
    left, right = names
    compared = any(row.verdict for row in report.stages)
    if report.first_differing_stage is None and report.verdict == "differs" and compared:
        output = next((row for row in report.stages if row.name == "output" and row.verdict is None), None)
        after = ": what differs comes after the attention, or around it" if output is None else f"; {output.note}"
        yield f"Every stage that both have is the same{after}."
    yield from of_weights(report, shared, names)
    pair = _split(report)
    if pair is not None and report.verdict == "same":
        many, one = (right, left) if _places(pair)[1] > 1 else (left, right)
        yield (
            f"The split of {one} is a logical one, exactly one matrix a head as {many} has them: in {pair.part}, "
            f"{pair.mapping}."
        )
    yield from of_masks(report, names, blocked)
    yield from of_accuracy(report, names)
    if not shared.are_carried and report.weights.left_out:
        yield f"The weights could not be carried: {' '.join(report.weights.left_out)}"


def of_masks(report: DiffReport, names: tuple[str, str], blocked: Blocked | None) -> Iterator[str]:
    """Where two ways to mask differ, and what comes of queries that have no key left."""
    left, right = names
    if blocked is not None and blocked.left != blocked.right:
        zero = "softmax makes all of them exactly 0 on both sides" if blocked.zero else "softmax does not make all 0"
        yield (
            f"A masked score is {blocked.left} in {left} and {blocked.right} in {right}; where a query has a key left "
            f"to look at, {zero} ({blocked.count:,} weights)."
        )
    if report.elsewhere is not None and report.elsewhere.verdict != "same" and report.verdict == "differs":
        yield f"Where every key is masked they differ as well: {_masked_rows(report, names)}."


def of_weights(report: DiffReport, shared: Shared, names: tuple[str, str]) -> Iterator[str]:
    """Say what comes of the weights that one side has no place for."""
    left, right = names
    other, sliced = report.weights.other_way, shared.sliced
    if sliced is not None:
        poorer, richer = (left, right) if sliced.name == "left" else (right, left)
        pair = next((p for p in report.parameters if p.part == "W_q" and p.left and p.right), None)
        # A layer with a matrix for each head has nothing to split.
        then = " and splits the result" if pair is not None and 1 in _places(pair) else ""
        yield (
            f"Splitting the input is not what {richer} does: it projects all {sliced.features} features of the "
            f"embedding for every head{then}, and in {poorer} a head reads {sliced.width} of them."
        )
    poorer, richer = (left, right) if other is not None and other.source == "left" else (right, left)
    if other is not None and other.verdict == "same":
        where = " wherever there is a key to look at" if report.masked_rows else ""
        times = f"{multiple(other.times_noise)} times the noise floor" if other.times_noise else "bit for bit"
        yield (
            f"Only with {_stand_ins(report)} in its weights does {richer} return what {poorer} does{where} (measured: "
            f"{times})."
        )
    elif other is not None:
        yield f"Carried the other way, they are {multiple(other.times_noise)} times the noise floor apart."


def _stand_ins(report: DiffReport) -> str:
    """What stands in the fuller weights for all that the other side has no place for."""
    known = {
        "features": "zeros outside of each head's own features",
        "output projection": "the identity for W_o",
        "biases": "zeros for the biases",
    }
    said = " ".join(report.weights.left_out)
    return " and ".join(words for sign, words in known.items() if sign in said) or "nothing for what is left out"


def _split(report: DiffReport) -> ParameterPair | None:
    """W_q, where one side has a tensor of it for each head and the other has one for all."""
    pair = next((pair for pair in report.parameters if pair.part == "W_q"), None)
    if pair is None or pair.left is None or pair.right is None or pair.left.numel != pair.right.numel:
        return None
    return pair if "all of" in pair.mapping else None


def _places(pair: ParameterPair) -> tuple[int, int]:
    left, right = (0 if place is None else len(place.names) for place in (pair.left, pair.right))
    return left, right


def _masked_rows(report: DiffReport, names: tuple[str, str]) -> str:
    rows, (left, right) = report.masked_rows, names
    kinds = {
        (_fate(row, row.left_weights, row.left_output), _fate(row, row.right_weights, row.right_output)) for row in rows
    }
    where = f"batch {rows[0].batch} query {rows[0].query}"
    # Several attentions may each have the same query.
    number = len({(row.batch, row.query) for row in rows})
    count = f"{number:,} queries, the first {where}" if number > 1 else where
    if len(kinds) > 1:
        return f"{count}, in more than one way"
    (ours, theirs) = next(iter(kinds))
    if rows[0].attention is not None:
        return f"there {left} gives {ours} and {right} {theirs} ({count})"
    return f"{left} returns {ours} and {right} {theirs} ({count})"


_WEIGHTS = {"zero": "no weight at all", "uniform": "every key the same weight", "nan": "NaN", "finite": "weights"}
_OUTPUTS = {"zero": "zeros", "uniform": "numbers", "nan": "NaN", "finite": "numbers"}


def _fate(row: MaskedRowPair, weights: RowContent, output: RowContent) -> str:
    """What a side gives for a query without keys."""
    if row.attention is not None:  # what comes out of a whole model hangs on more than one attention
        return _WEIGHTS[weights]
    mean = weights == "uniform" and output != "nan"
    return "the mean of all values, each with the same weight" if mean else _OUTPUTS[output]


def of_accuracy(report: DiffReport, names: tuple[str, str]) -> Iterator[str]:
    """What a kernel or a dtype costs, where one layer has different ones on the two sides."""
    one, other = report.left, report.right
    dtypes = one.environment.dtype != other.environment.dtype
    kernels = one.path.plain != other.path.plain
    if one.layer.name != other.layer.name or not (dtypes or kernels) or report.verdict == "differs":
        return
    what = [f"dtype ({one.environment.dtype}, {other.environment.dtype})"] if dtypes else []
    what += [f"kernel ({_short(one.path.plain)}, {_short(other.path.plain)})"] if kernels else []
    told = [
        f"{name} is off the result in float64 by at most {small(side.rounding_error)}"
        for name, side in zip(names, (one, other), strict=True)
        if side.rounding_error is not None and side.measured_against == "float64"
    ]
    if told:
        yield f"What the {' and '.join(what)} costs in accuracy: {', and '.join(told)}."


def _short(kernel: str) -> str:
    return kernel.partition(" (")[0].partition(":")[0]
