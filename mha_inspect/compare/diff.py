"""Compare two subjects stage by stage, with the same input and the same weights as far as they can be copied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from math import isinf
from typing import Any

import torch

from ..measure.content import StageDifference
from ..measure.run_report import (
    environment_of,
    fate_of,
    has_shape_only,
    is_hidden,
    layer_of,
    maker_of,
    masked_sentence,
    path_of,
)
from ..naming.pattern import CANONICAL_AXES
from ..naming.score_formulas import unlike_dot
from ..naming.visibility import Rows
from ..reports.common import Difference, Verdict
from ..reports.diff import DiffReason, DiffReport, DiffSide, NoiseSource, SideName, StageRow, StageSide
from ..running.subject import Subject
from ..text import first_few, listed, multiple, percent, plural, small
from .comparable_run import ComparableRun, ComparedStage, Comparison, overall
from .heads_apart import heads_apart
from .pair import Where, Why
from .reasons.rows import reordered_copies
from .shared_weights import AS_THEY_ARE, differing_buffers, share
from .why import OF_WEIGHTS, first_difference, why, why_merged, why_norms

_LACKING = {
    "masked_scores": "mask",
    "output": "output projection: it returns concat",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "such projection"),
}
"""Stage to the words after `has no`, for a side without it."""

_PACKED = {"qkv", "qk", "kv", "packed"}
"""Names of an axis that is several projections."""
_INPUTS = ("query", "key", "value")
_OF_ALL_HEADS = ("query", "key", "value", "concat", "output")
"""Stages that a loop over heads makes once, instead of in each turn."""


class Side(ComparableRun):
    """A subject as one side of a diff."""

    def __init__(
        self,
        name: SideName,
        subject: Subject,
        settings: dict[str, Any] | None = None,
        finer: Subject | None = None,
    ) -> None:
        """Prepare a side; `settings` are for this side only, `finer` is as in `ComparableRun`."""
        super().__init__(subject, finer=finer)
        self.name = name
        self.settings = settings or {}
        self.is_named_by_place = False
        """Whether sentences call it the left or the right one: both sides have one name."""

    @property
    def own_label(self) -> str:
        """The side's own name: `torch`, `torch with dtype bfloat16`."""
        if not self.settings:
            return super().label
        parts = [f"{setting} {_written(value)}" for setting, value in self.settings.items()]
        return f"{super().label} with {', '.join(parts)}"

    @property
    def label(self) -> str:
        """The side's name in sentences: its own, or `the left torch`."""
        return f"the {self.name} {self.own_label}" if self.is_named_by_place else self.own_label

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the call, as sentences that name the side."""
        named = "" if self.subject.layer else f"{_first(self.label)}: "
        return tuple(f"{named}{note}" for note in self.subject.notes)

    def stage(self, places: range, stage: str) -> StageSide | None:
        """Return this side's stage, of one attention or of several alike; None if it has none."""
        place = places[0]
        if not self.has_stage(place, stage):
            return None
        attention, names = self.attentions[place]
        tensor = attention.stages[stage]
        count = 1 if stage in _INPUTS else len(places)
        if attention.branches and stage not in _OF_ALL_HEADS:
            count = len(attention.branches)
        return StageSide(
            shape=tensor.shape,
            axes=names.of_stage(stage),
            dtype=tensor.dtype,
            opened=is_hidden(self.run, stage, tensor),
            op=maker_of(self.run, tensor),
            count=count,
        )

    def report(self, rows: Rows) -> DiffSide:
        """Return this side for the report; `rows`, queries with every key masked out, have no rounding error."""
        rounding_error = None
        if self.dtype != "float64" and not self.drops:
            rounding_error = self.output_floor(rows)
        return DiffSide(
            label=self.own_label,
            environment=replace(environment_of(self.subject), dtype=self.dtype),
            layer=layer_of(self.subject),
            settings={name: _plain(value) for name, value in self.settings.items()},
            path=path_of(self.run),
            numel=sum(parameter.numel() for parameter in self.subject.module.parameters()),
            output_shape=tuple(self.returned.shape),
            rounding_error=rounding_error,
            measured_against=self.measured_against,
        )


def _first(label: str) -> str:
    """Return the name of a side at the beginning of a sentence: `The left torch`."""
    return f"The{label[3:]}" if label.startswith(("the left ", "the right ")) else label


def _written(value: object) -> str:
    """Return a setting as it is written on the command line: `true`, `2,5`, `none`."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _plain(value: object) -> object:
    """Return a setting as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def diff(left: Side, right: Side, *, same_weights: bool = True) -> DiffReport:
    """Compare two sides with the same input, and with the same weights as far as they can be copied.

    Without `same_weights`, each side keeps its own weights. Attentions are paired in the order of computation. Stages
    are compared in canonical axes, and judged by the larger rounding error of both sides, measured against float64 in
    this run.
    """
    has_one_name = left.own_label == right.own_label
    left.is_named_by_place = right.is_named_by_place = has_one_name
    shared = share(left, right) if same_weights else AS_THEY_ARE
    given = shared.given
    sides = (left, right)
    comparison = Comparison(left, right)
    compared = _stages(comparison, measured=bool(given))
    numbered = any(stage.place for stage in compared)
    stages: list[StageRow] = []
    for stage in compared:
        attention = stage.place + 1 if numbered else None
        stages.append(_row(sides, stage, attention))
    masked = tuple(sorted(set(chain.from_iterable(comparison.masked))))
    output = comparison.output(masked) if given else None
    further = comparison.further() if given else ()
    outcome = _outcome(output, further)
    # Where the outputs are the same, a stage differs in form alone.
    first = None
    if outcome != "same":
        first = first_difference(compared, OF_WEIGHTS if shared.is_merged else frozenset())
    report = DiffReport(
        left=left.report(masked),
        right=right.report(masked),
        weights=shared.weights,
        noise=_noise_source(left.dtype, right.dtype),
        stages=tuple(stages),
        first_differing_stage=None if first is None else first.name,
        output=Difference(**_numbers(output)),
        outcome=outcome,
        further=further,
        notes=tuple(_notes(sides, compared=bool(given))),
        answer=(),
        buffers=differing_buffers(left.subject.module, right.subject.module),
    )
    reasons = _reasons(sides, report, is_merged=shared.is_merged)
    answer = [_first_sentence(report, given)]
    answer += [reason.sentence for reason in reasons]
    answer += [f"To convert the weights of the left: {reason.line}" for reason in reasons if reason.line]
    if report.outcome != "differs":
        answer += reordered_copies(left, right)
    answer += _further_sentences(report, given)
    answer += _of_buffers(report.buffers)
    answer += _masked(sides, comparison.masked)
    return replace(report, answer=tuple(answer), reasons=reasons)


def _stages(comparison: Comparison, *, measured: bool) -> list[ComparedStage]:
    """Return the stages of both sides, those of heads that are attentions of their own beside the whole ones."""
    apart = None
    if measured and not comparison.are_paired:
        apart = heads_apart(comparison.left, comparison.right)
    return list(comparison.rows(measured=measured) if apart is None else apart.rows())


def _reasons(sides: tuple[Side, Side], report: DiffReport, *, is_merged: bool) -> tuple[DiffReason, ...]:
    """Return why the sides differ; where their weights differ too, only what a norm shows."""
    if report.outcome != "differs":
        return ()
    if is_merged:
        return as_reasons(why_merged(*sides, Where()))
    if not report.weights.whole:
        return as_reasons(why_norms(*sides, report.first_differing_stage, Where()))
    return as_reasons(why(*sides, Where()))


def as_reasons(whys: Iterable[Why]) -> tuple[DiffReason, ...]:
    """Return reasons as a report has them."""
    return tuple(DiffReason(why.kind, why.sentence, why.line) for why in whys if why.kind != "call")


def _outcome(output: StageDifference | None, further: Sequence[Difference]) -> Verdict:
    """Return the verdict on all returned tensors; `inconclusive` without a comparison."""
    if output is None:
        return "inconclusive"
    return overall([output.verdict, *(difference.verdict for difference in further)])


def _row(sides: tuple[Side, Side], stage: ComparedStage, attention: int | None) -> StageRow:
    difference = stage.difference
    if difference is None:
        compared = CANONICAL_AXES[stage.name]
        note = _why_not_compared(sides, stage)
    else:
        compared = difference.compared
        note = difference.note
    return StageRow(
        **_numbers(difference),
        name=stage.name,
        left=sides[0].stage(stage.left_places, stage.name),
        right=sides[1].stage(stage.right_places, stage.name),
        compared=compared,
        note=note,
        attention=attention,
    )


def _numbers(difference: StageDifference | None) -> dict[str, Any]:
    """Return the fields of a report's difference; all None if there was no comparison."""
    return {field.name: getattr(difference, field.name, None) for field in fields(Difference)}


def _why_not_compared(sides: tuple[Side, Side], stage: ComparedStage) -> str:
    """Return why a stage was not compared."""
    name = stage.name
    place = stage.place
    if stage.left is not None and stage.right is not None:
        return ""  # the answer says why the numbers of the two sides are not comparable
    if not Comparison(*sides).are_paired and len(stage.left_places) == len(stage.right_places):
        return ""  # a note says so once
    for side in sides:
        if place >= len(side.attentions):
            return f"{side.label} has no attention {place + 1}"
        attention, _ = side.attentions[place]
        if name in attention.stages and has_shape_only(side.run, attention.stages[name]):
            return f"{side.label} has too many scores in its kernel to compute this stage"
    for side in sides:
        words = re.findall(r"\w+", side.axes(place, name))
        if not _PACKED.isdisjoint(words):
            return f"{side.label} packs this projection with others, and splits them together with the heads"
    for side, places in zip(sides, (stage.left_places, stage.right_places), strict=True):
        if name == "output" and len(places) > 1:
            return f"each attention of {side.label} has an output of its own"
    for side in sides:
        if not side.has_stage(place, name):
            return f"{side.label} has no {_LACKING.get(name, 'such stage')}"
    return "its axes have no names on one side"


def _noise_source(left: str, right: str) -> NoiseSource:
    """Return the source of the rounding: the coarser dtype, and the sides that have it."""
    step = torch.finfo(getattr(torch, left)).eps
    right_step = torch.finfo(getattr(torch, right)).eps
    if step > right_step:
        return NoiseSource(left, ("left",))
    if step < right_step:
        return NoiseSource(right, ("right",))
    return NoiseSource(left, ("left", "right"))


def _notes(sides: tuple[Side, Side], *, compared: bool) -> Iterator[str]:
    """Yield notes beside the answer: different numbers of attentions, dropout, notes of each side."""
    left, right = sides
    for side in sides:
        if not side.attentions:
            only = ": only the outputs are compared." if compared else "."
            yield f"No attention was found in {side.label}{only}"
    count = len(left.attentions)
    right_count = len(right.attentions)
    if count and right_count and count != right_count:
        apart = heads_apart(left, right)
        if Comparison(left, right).are_paired:
            how = f"the first {min(count, right_count)} are paired, in the order of computation."
        elif apart is not None:
            how = apart.sentence
        else:
            how = "their numbers of heads differ too, so their stages are not compared."
        yield f"{_first(left.label)} has {plural(count, 'attention')} and {right.label} has {right_count}: {how}"
    yield from _weights_around(left, right)
    yield from _weights_around(right, left)
    if left.drops or right.drops:
        yield (
            "Dropout is on, so the sides also differ in the elements that they drop. "
            "The rounding error is measured without dropout."
        )
    yield from dict.fromkeys((*left.notes, *right.notes))
    for side in sides:
        for note in unlike_dot(side.run):
            yield f"{_first(side.label)}: {note}"


def _weights_around(block: Side, alone: Side) -> Iterator[str]:
    """Yield a note about a block with weights around its attention, where the other side is an attention alone."""
    if not block.attentions or len(alone.attentions) > 1:
        return
    attention, _ = block.attentions[0]
    path = attention.module
    if not path or any(attention.module for attention, _ in alone.attentions):
        return
    if all(name.startswith(f"{path}.") for name, _ in block.subject.module.named_parameters()):
        return
    way = f"--{block.name}-module {path}"
    yield f"{_first(block.label)} has weights around its attention. To compare the attention: {way}."


def _first_sentence(report: DiffReport, given: str) -> str:
    """Return whether both sides compute the same; `given` is `the same weights and input` or alike, or empty."""
    if not given:
        return f"Not comparable: the weights could not be copied. {' '.join(report.weights.left_out)}"
    return _whether(report, _names(report), f"with {given}")


def _names(report: DiffReport) -> tuple[str, str]:
    """Return the names of both sides in sentences; two of one name are `the left …` and `the right …`."""
    left = report.left.label
    right = report.right.label
    if left == right:
        return f"the left {left}", f"the right {right}"
    return left, right


def _further_sentences(report: DiffReport, given: str) -> Iterator[str]:
    """Yield where the sides differ if no stage does, and the accuracy of their kernels or dtypes."""
    if not given:
        yield "Shapes and axes are above. To compare numbers, give both sides the same parameters by name and shape."
        return
    is_compared = any(row.verdict for row in report.stages)
    if report.outcome == "differs" and report.first_differing_stage is None and is_compared:
        alike = "is the same"
        if any(row.verdict == "differs" for row in report.stages):
            alike = "is the same, or differs in form alone"
        yield f"Every stage that both have {alike}; {_after_the_stages(report)}."
    if report.left.layer.name == report.right.layer.name and report.outcome != "differs":
        yield from _accuracy(report)


def _after_the_stages(report: DiffReport) -> str:
    """Return where the difference is if no stage differs: why the output was not compared, or after it."""
    for row in report.stages:
        if row.name != "output" or row.verdict is not None:
            continue
        if row.left is not None and row.right is not None and row.left.count != row.right.count:
            return "the difference is in the output projection or after it"
        return f"the stage output was not compared: {row.note}"
    return "the difference is after or around the attention"


def _accuracy(report: DiffReport) -> Iterator[str]:
    """Yield the accuracy of different kernels or dtypes of one layer."""
    left = report.left
    right = report.right
    unlike = []
    dtype = left.environment.dtype
    right_dtype = right.environment.dtype
    if dtype != right_dtype:
        unlike.append(f"dtype ({dtype}, {right_dtype})")
    if left.path.plain != right.path.plain:
        kernel = left.path._kernels[0]
        right_kernel = right.path._kernels[0]
        unlike.append(f"kernel ({kernel}, {right_kernel})")
    costs = []
    for name, side in zip(_names(report), (left, right), strict=True):
        if side.rounding_error is not None and side.measured_against == "float64":
            costs.append(f"{name} differs from the float64 result by at most {small(side.rounding_error)}")
    if unlike and costs:
        yield f"Accuracy by {' and '.join(unlike)}: {listed(costs)}."


def _whether(report: DiffReport, names: Sequence[str], given: str) -> str:
    """Return a sentence whether both compute the same; `given` is `with the same weights and input` or alike."""
    left, right = names
    output = report.output
    floor = f"the rounding of {report.noise.dtype}"
    times = f"{multiple(output.times_noise)} times {floor}"
    if report.outcome == "same":
        how = f"within rounding ({times})"
        if output.max_abs_difference == 0:
            how = "bit for bit"
        return f"The same: {given}, {left} and {right} return the same, {how}."
    if report.outcome == "inconclusive":
        largest = output.times_noise or 0.0
        for difference in report.further:
            largest = max(largest, difference.times_noise or 0.0)
        return (
            f"Undecided: the outputs of {left} and {right} differ by {multiple(largest)} times {floor}, more than two "
            "roundings and too little to be sure."
        )
    if output.max_abs_difference is None:
        shape = list(report.left.output_shape)
        right_shape = list(report.right.output_shape)
        return f"Not the same: {left} returns {shape}, {right} returns {right_shape}."
    first = ""
    if report.first_differing_stage:
        first = f" First different stage: {report.first_differing_stage}."
    if output.verdict == "same":
        return f"Not the same: {given}, {_differing_further(report)}.{first}"
    relative = output.relative_difference
    if relative is None or isinf(relative):
        return f"Not the same: the outputs of {left} and {right} have NaN or inf in different places.{first}"
    return (
        f"Not the same: {given}, the outputs of {left} and {right} differ. "
        f"The difference is {percent(relative)} of their size, {times}.{first}"
    )


def _differing_further(report: DiffReport) -> str:
    """Return which of the other returned tensors differ: `the first output is the same, and output 1 differs`."""
    outputs = []
    for difference in report.further:
        if difference.verdict != "differs":
            continue
        relative = difference.relative_difference
        differs = f"output {difference.name} differs"
        if relative is not None and not isinf(relative):
            differs += f" by {percent(relative)} of its size"
        outputs.append(differs)
    return f"the first output is the same, and {listed(outputs)}"


def _of_buffers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a sentence about buffers that differ."""
    if not names:
        return ()
    subject = f"The buffer {names[0]} differs" if len(names) == 1 else f"The buffers {first_few(names, 5)} differ"
    return (f"{subject}: buffers are not weights, so each side keeps its own.",)


def _masked(sides: tuple[Side, Side], masked: Sequence[Rows]) -> tuple[str, ...]:
    """Return a sentence about queries with every key masked out, in the first attention that has any."""
    left, right = sides
    for place, rows in enumerate(masked):
        if not rows:
            continue
        ours = fate_of(left.content(place, "weights"), rows)
        theirs = fate_of(right.content(place, "weights"), rows)
        fate = f"{ours} on both sides"
        if ours != theirs:
            fate = f"{ours} in {left.label} and {theirs} in {right.label}"
        heads = {side.masked_heads(place) for side in sides if side.masked_queries(place)}
        same_heads = heads.pop() if len(heads) == 1 else None
        return (masked_sentence(rows, f"their weights are {fate}", same_heads),)
    return ()


def sizes_of(side: Side) -> dict[str, Any]:
    """Return the sizes of a side's first attention that its run shows, by the names of `AttentionSpec`."""
    if not side.attentions:
        return {}
    attention, names = side.attentions[0]
    sizes: dict[str, Any] = {
        "num_heads": names.num_heads,
        "num_kv_heads": names.num_kv_heads,
        "head_dim": names.head_dim,
    }
    if "query" in attention.stages:
        sizes["embed_dim"] = attention.stages["query"].shape[-1]
    if attention.projections:
        sizes["bias"] = any(map(side.run.graph.has_bias, attention.projections.values()))
    return sizes
