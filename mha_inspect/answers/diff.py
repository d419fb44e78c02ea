"""Compare two subjects stage by stage, with the same input and the same weights as far as they can be copied."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain
from math import isinf
from typing import Any

import torch

from ..measure.content import StageDifference
from ..naming.pattern import CANONICAL_AXES
from ..naming.score_formulas import unlike_dot
from ..naming.visibility import Rows
from ..reports.common import Difference, Verdict
from ..reports.diff import DiffReason, DiffReport, DiffSide, NoiseSource, SideName, StageRow, StageSide
from ..running.subject import Subject
from ..text import first_few, listed, multiple, percent, plural, small
from .comparable_run import ComparableRun, ComparedStage, Comparison, overall
from .diff_reasons import reasons
from .norm_reasons import of_norms
from .row_orders import reordered_copies
from .run_report import environment_of, fate_of, has_shape_only, is_hidden, layer_of, maker_of, masked_sentence, path_of
from .shared_weights import AS_THEY_ARE, differing_buffers, share
from .side_words import Where

_LACKING = {
    "masked_scores": "mask",
    "output": "output projection: it returns concat",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "such projection"),
}
"""Stage to the words after `has no`, for a side without it."""

_PACKED = {"qkv", "qk", "kv", "packed"}
"""Names of an axis that is several projections."""
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
        self.name, self.settings = name, settings or {}

    @property
    def label(self) -> str:
        """The side's name in sentences: `torch`, `torch with dtype bfloat16`."""
        parts = [f"{setting} {_written(value)}" for setting, value in self.settings.items()]
        return f"{super().label} with {', '.join(parts)}" if parts else super().label

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the call, as sentences that name the side."""
        named = "" if self.subject.layer else f"{self.subject.label}: "
        return tuple(f"{named}{note}" for note in self.subject.notes)

    def stage(self, place: int, stage: str) -> StageSide | None:
        """Return this side's stage; None if it has none."""
        if place >= len(self.attentions) or stage not in self.attentions[place][0].stages:
            return None
        attention, names = self.attentions[place]
        tensor = attention.stages[stage]
        return StageSide(
            shape=tensor.shape,
            axes=names.of_stage(stage),
            dtype=tensor.dtype,
            opened=is_hidden(self.run, stage, tensor),
            op=maker_of(self.run, tensor),
            count=len(attention.branches) if attention.branches and stage not in _OF_ALL_HEADS else 1,
        )

    def report(self, rows: Rows) -> DiffSide:
        """Return this side for the report; `rows`, queries with every key masked out, have no rounding error."""
        return DiffSide(
            label=self.label,
            environment=replace(environment_of(self.subject), dtype=self.dtype),
            layer=layer_of(self.subject),
            settings={name: _plain(value) for name, value in self.settings.items()},
            path=path_of(self.run),
            numel=sum(parameter.numel() for parameter in self.subject.module.parameters()),
            output_shape=tuple(self.returned.shape),
            rounding_error=None if self.dtype == "float64" or self.drops else self.output_floor(rows),
            measured_against=self.measured_against,
        )


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def diff(left: Side, right: Side, *, same_weights: bool = True) -> DiffReport:
    """Compare two sides with the same input, and with the same weights as far as they can be copied.

    Without `same_weights`, each side keeps its own weights. Attentions are paired in the order of computation. Stages
    are compared in canonical axes, and judged by the larger rounding error of both sides, measured against float64 in
    this run.
    """
    shared = share(left, right) if same_weights else AS_THEY_ARE
    given = shared.given
    sides, comparison = (left, right), Comparison(left, right)
    numbered = len(comparison.masked) > 1
    rows = comparison.rows(measured=bool(given))
    stages = [_row(sides, stage, stage.place + 1 if numbered else None) for stage in rows]
    masked = tuple(sorted(set(chain.from_iterable(comparison.masked))))
    output = comparison.output(masked) if given else None
    further = comparison.further() if given else ()
    report = DiffReport(
        left=left.report(masked),
        right=right.report(masked),
        weights=shared.weights,
        noise=_noise_source(left.dtype, right.dtype),
        stages=tuple(stages),
        first_differing_stage=next((row.name for row in stages if row.verdict == "differs"), None),
        output=Difference(**_numbers(output)),
        outcome=_outcome(output, further),
        further=further,
        notes=tuple(_notes(sides, compared=bool(given))),
        answer=(),
        buffers=differing_buffers(left.subject.module, right.subject.module),
    )
    why = _reasons(sides, report)
    answer = (
        _first_sentence(report, given),
        *(reason.sentence for reason in why),
        *(f"To convert the weights of the left: {reason.line}" for reason in why if reason.line),
        *(reordered_copies(left, right) if report.outcome != "differs" else ()),
        *_further_sentences(report, given),
        *_of_buffers(report.buffers),
        *_masked(sides, comparison.masked),
    )
    return replace(report, answer=answer, reasons=why)


def _reasons(sides: tuple[Side, Side], report: DiffReport) -> tuple[DiffReason, ...]:
    """Return why the sides differ; where their weights differ too, only what a norm shows."""
    if report.outcome != "differs":
        return ()
    left, right = sides
    if not report.weights.whole:
        return tuple(of_norms(left, right, report.first_differing_stage, Where()))
    first = next((row for row in report.stages if row.verdict == "differs"), None)
    number = 1 if first is None or first.attention is None else first.attention
    return reasons(left, right, report.first_differing_stage, place=number - 1)


def _outcome(output: StageDifference | None, further: Sequence[Difference]) -> Verdict:
    """Return the verdict on all returned tensors; `inconclusive` without a comparison."""
    if output is None:
        return "inconclusive"
    return overall([output.verdict, *(difference.verdict for difference in further)])


def _row(sides: tuple[Side, Side], stage: ComparedStage, attention: int | None) -> StageRow:
    difference = stage.difference
    return StageRow(
        **_numbers(difference),
        name=stage.name,
        left=sides[0].stage(stage.place, stage.name),
        right=sides[1].stage(stage.place, stage.name),
        compared=CANONICAL_AXES[stage.name] if difference is None else difference.compared,
        note=_why_not_compared(sides, stage) if difference is None else difference.note,
        attention=attention,
    )


def _numbers(difference: StageDifference | None) -> dict[str, Any]:
    """Return the fields of a report's difference; all None if there was no comparison."""
    return {field.name: getattr(difference, field.name, None) for field in fields(Difference)}


def _why_not_compared(sides: tuple[Side, Side], stage: ComparedStage) -> str:
    """Return why a stage was not compared."""
    name, place = stage.name, stage.place
    if stage.left is not None and stage.right is not None:
        return ""  # the answer says why the numbers of the two sides are not comparable
    for side in sides:
        if place >= len(side.attentions):
            return f"{side.label} has no attention {place + 1}"
        tensor = side.attentions[place][0].stages.get(name)
        if tensor is not None and has_shape_only(side.run, tensor):
            return f"{side.label} has too many scores in its kernel to compute this stage"
    for side in sides:
        row = side.stage(place, name)
        if row is not None and not _PACKED.isdisjoint(re.findall(r"\w+", row.axes)):
            return f"{side.label} packs this projection with others, and splits them together with the heads"
    for side in sides:
        if name not in side.attentions[place][0].stages:
            return f"{side.label} has no {_LACKING.get(name, 'such stage')}"
    return "not compared: this shape could not be interpreted on one side"


def _noise_source(left: str, right: str) -> NoiseSource:
    """Return the source of the rounding: the coarser dtype, and the sides that have it."""
    step, right_step = (torch.finfo(getattr(torch, dtype)).eps for dtype in (left, right))
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
    count, right_count = len(left.attentions), len(right.attentions)
    if count and right_count and count != right_count:
        yield (
            f"{left.label} has {plural(count, 'attention')} and {right.label} has {right_count}: "
            f"the first {min(count, right_count)} are paired, in the order of computation."
        )
    yield from _weights_around(left, right)
    yield from _weights_around(right, left)
    if left.drops or right.drops:
        yield (
            "Dropout is on, so the sides also differ in the elements that they drop. "
            "The rounding error is measured without dropout."
        )
    yield from dict.fromkeys((*left.notes, *right.notes))
    for side in sides:
        yield from (f"{side.label}: {note}" for note in unlike_dot(side.run))


def _weights_around(block: Side, alone: Side) -> Iterator[str]:
    """Yield a note about a block with weights around its attention, where the other side is an attention alone."""
    path = block.attentions[0][0].module if block.attentions else ""
    if not path or len(alone.attentions) > 1 or any(attention.module for attention, _ in alone.attentions):
        return
    if all(name.startswith(f"{path}.") for name, _ in block.subject.module.named_parameters()):
        return
    yield f"{block.label} has weights around its attention. To compare the attention: --{block.name}-module {path}."


def _first_sentence(report: DiffReport, given: str) -> str:
    """Return whether both sides compute the same; `given` is `the same weights and input` or alike, or empty."""
    if not given:
        return f"Not comparable: the weights could not be copied. {' '.join(report.weights.left_out)}"
    return _whether(report, _names(report), f"with {given}")


def _names(report: DiffReport) -> tuple[str, str]:
    """Return the names of both sides in sentences; two of one name are `the left …` and `the right …`."""
    left, right = report.left.label, report.right.label
    return (f"the left {left}", f"the right {right}") if left == right else (left, right)


def _further_sentences(report: DiffReport, given: str) -> Iterator[str]:
    """Yield where the sides differ if no stage does, and the accuracy of their kernels or dtypes."""
    if not given:
        yield "Shapes and axes are above. To compare numbers, give both sides the same parameters by name and shape."
        return
    compared = any(row.verdict for row in report.stages)
    if report.first_differing_stage is None and report.outcome == "differs" and compared:
        output = next((row for row in report.stages if row.name == "output" and row.verdict is None), None)
        after = "the difference is after or around the attention" if output is None else output.note
        yield f"Every stage that both have is the same; {after}."
    if report.left.layer.name == report.right.layer.name and report.outcome != "differs":
        yield from _accuracy(report)


def _accuracy(report: DiffReport) -> Iterator[str]:
    """Yield the accuracy of different kernels or dtypes of one layer."""
    left, right = report.left, report.right
    unlike = []
    if left.environment.dtype != right.environment.dtype:
        unlike.append(f"dtype ({left.environment.dtype}, {right.environment.dtype})")
    if left.path.plain != right.path.plain:
        unlike.append(f"kernel ({left.path._kernels[0]}, {right.path._kernels[0]})")
    costs = []
    for name, side in zip(_names(report), (left, right), strict=True):
        if side.rounding_error is not None and side.measured_against == "float64":
            costs.append(f"{name} differs from the float64 result by at most {small(side.rounding_error)}")
    if unlike and costs:
        yield f"Accuracy by {' and '.join(unlike)}: {listed(costs)}."


def _whether(report: DiffReport, names: Sequence[str], given: str) -> str:
    """Return a sentence whether both compute the same; `given` is `with the same weights and input` or alike."""
    left, right = names
    output, floor = report.output, f"the rounding of {report.noise.dtype}"
    times = f"{multiple(output.times_noise)} times {floor}"
    if report.outcome == "same":
        how = "bit for bit" if output.max_abs_difference == 0 else f"within rounding ({times})"
        return f"The same: {given}, {left} and {right} return the same, {how}."
    if report.outcome == "inconclusive":
        others = [difference.times_noise or 0.0 for difference in report.further]
        times = f"{multiple(max([output.times_noise or 0.0, *others]))} times {floor}"
        return (
            f"Undecided: the outputs of {left} and {right} differ by {times}, more than two roundings and too little "
            "to be sure."
        )
    if output.max_abs_difference is None:
        shape, right_shape = list(report.left.output_shape), list(report.right.output_shape)
        return f"Not the same: {left} returns {shape}, {right} returns {right_shape}."
    first = f" First different stage: {report.first_differing_stage}." if report.first_differing_stage else ""
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
        if difference.verdict == "differs":
            relative = difference.relative_difference
            by = "" if relative is None or isinf(relative) else f" by {percent(relative)} of its size"
            outputs.append(f"output {difference.name} differs{by}")
    return f"the first output is the same, and {listed(outputs)}"


def _of_buffers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a sentence about buffers that differ."""
    if not names:
        return ()
    subject = f"The buffer {names[0]} differs" if len(names) == 1 else f"The buffers {first_few(names, 5)} differ"
    return (f"{subject}: buffers are not weights, so each side keeps its own.",)


def _masked(sides: tuple[Side, Side], masked: Sequence[Rows]) -> tuple[str, ...]:
    """Return a sentence about queries with every key masked out, in the first attention that has any."""
    place = next((place for place, rows in enumerate(masked) if rows), None)
    if place is None:
        return ()
    left, right = sides
    ours, theirs = (fate_of(side.content(place, "weights"), masked[place]) for side in sides)
    fate = f"{ours} on both sides"
    if ours != theirs:
        fate = f"{ours} in {left.label} and {theirs} in {right.label}"
    heads = {side.masked_heads(place) for side in sides if side.masked_queries(place)}
    same_heads = heads.pop() if len(heads) == 1 else None
    return (masked_sentence(masked[place], f"their weights are {fate}", same_heads),)


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
