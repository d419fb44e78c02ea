"""What a diff found, in sentences: every one of them said because of a number that was measured. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import isinf
from typing import TYPE_CHECKING

from ..reports.diff import DiffReport
from ..text import multiple, percent, small

if TYPE_CHECKING:
    from .shared_weights import Shared


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


def notes(report: DiffReport, drop: tuple[bool, bool], counts: Sequence[int]) -> Iterator[str]:
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


def answer(report: DiffReport, shared: Shared) -> tuple[str, ...]:
    """Return the answer: whether both compute the same, and what makes or does not make the difference."""
    left, right = report.left.label, report.right.label
    names = (f"the left {left}", f"the right {right}") if left == right else (left, right)
    given = "weights of its own on each side"
    if shared.are_carried:
        whole = report.weights.whole or shared.are_drawn
        given = "the same weights" if whole else "weights that are the same as far as they could be carried"
    return (_whether(report, names, f"with {given} and the same input"), *_why(report, shared, names))


def _whether(report: DiffReport, names: tuple[str, str], given: str) -> str:
    """Return whether both compute the same, in a sentence; `given` says what both were given."""
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


def _why(report: DiffReport, shared: Shared, names: tuple[str, str]) -> Iterator[str]:
    compared = any(row.verdict for row in report.stages)
    if report.first_differing_stage is None and report.verdict == "differs" and compared:
        output = next((row for row in report.stages if row.name == "output" and row.verdict is None), None)
        after = ": what differs comes after the attention, or around it" if output is None else f"; {output.note}"
        yield f"Every stage that both have is the same{after}."
    yield from _accuracy(report, names)
    if not shared.are_carried and report.weights.left_out:
        yield f"The weights could not be carried: {' '.join(report.weights.left_out)}"


def _accuracy(report: DiffReport, names: tuple[str, str]) -> Iterator[str]:
    """Yield what a kernel or a dtype costs, where one layer has different ones on the two sides."""
    sides = (report.left, report.right)
    dtypes, kernels, layers = (
        list(dict.fromkeys(values))
        for values in zip(*((s.environment.dtype, s.path.plain, s.layer.name) for s in sides), strict=True)
    )
    what = [f"dtype ({', '.join(dtypes)})"] if len(dtypes) > 1 else []
    what += [f"kernel ({', '.join(map(_short, kernels))})"] if len(kernels) > 1 else []
    costs = [
        f"{name} is off the result in float64 by at most {small(side.rounding_error)}"
        for name, side in zip(names, sides, strict=True)
        if side.rounding_error is not None and side.measured_against == "float64"
    ]
    if what and costs and len(layers) == 1 and report.verdict != "differs":
        yield f"What the {' and '.join(what)} costs in accuracy: {', and '.join(costs)}."


def _short(kernel: str) -> str:
    return kernel.partition(" (")[0].partition(":")[0]
