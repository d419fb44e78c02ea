"""Compare head counts: run the same weights and the same input through modules that differ in their number of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from math import log
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..call.call import explaining
from ..errors import SpecError
from ..graph.rerun import between
from ..measure.weights import NotCopied, copy_by_head
from ..naming.canonical import is_by_turn
from ..naming.pattern import CANONICAL_AXES, STAGES
from ..naming.score_formulas import unlike_dot
from ..naming.stage_facts import StageFacts
from ..naming.visibility import Rows
from ..reports.common import Verdict
from ..reports.compare_heads import CompareHeadsReport, HeadCount, HeadsFocus, HeadTime, StageFlops, StageShapes, Timing
from ..running.subject import Run, Subject
from ..text import listed, percent, plural, times
from .comparable_run import ComparableRun, ComparedStage, Comparison, difference_of, overall
from .focus import compare_focus, focus_of_run
from .head_sentences import Change, CopiedWeights, StageWalk, answer, reason
from .learning import Learner, compare_training, in_the_same_parts
from .mask_reasons import visible_pairs
from .run_report import environment_of, fate_of, layer_of, masked_sentence
from .shared_weights import weights_by_name, write_by_name
from .side_words import Where

if TYPE_CHECKING:
    from torch.utils.benchmark import Measurement

_SECONDS = 2.0
"""Most seconds to time a head count."""


class HeadRun(ComparableRun):
    """The run of one head count."""

    def __init__(self, num_heads: int, subject: Subject) -> None:
        super().__init__(subject)
        self.num_heads = num_heads

    @cached_property
    def run(self) -> Run:
        """The run. Raises what `ComparableRun.run` does; an error of a target names the head count."""
        with explaining(self.subject, f" with num_heads {self.num_heads}"):
            return super().run


def compare_heads(
    counted: Sequence[tuple[int, Subject]],
    *,
    steps: int = 0,
    focus: bool = False,
    time: bool = False,
    see: Callable[[int, ComparableRun], None] | None = None,
    tick: Callable[[str], None] = lambda words: None,
) -> CompareHeadsReport:
    """Compare modules that differ in their number of heads; the first is the baseline.

    Each gets the baseline's weights as far as their shapes allow, and is run once. `see` is called with each head count
    and its run, while the stages are in memory; `tick` is called with the progress before each step of training.
    """
    baseline = HeadRun(*counted[0])
    masked = baseline.masked_queries(0)
    rows: list[HeadCount] = []
    copied: list[CopiedWeights] = []
    learners: list[Learner] = []
    focuses: list[HeadsFocus] = []
    flops: list[tuple[StageFlops, ...]] = []
    observed: list[_Observed] = []
    for num_heads, subject in counted:
        run = HeadRun(num_heads, subject) if rows else baseline
        copied.append(copy_weights(baseline, run) if rows else CopiedWeights(True))
        _require_comparable(run, baseline)
        rows.append(_row(run, baseline, copied[-1], rows))
        observed.append(_Observed.of(baseline, run, masked))
        if steps:
            learners.append(Learner.of(num_heads, run))
        if focus:
            focuses += focus_of_run(run)
        if time:
            flops.append(_flops_of(run.run))
        if see is not None:
            see(num_heads, run)
        if run is not baseline:
            run.forget()
    training = compare_training(in_the_same_parts(learners), steps, tick) if steps else None
    return CompareHeadsReport(
        environment=environment_of(baseline.subject),
        layer=layer_of(baseline.subject),
        baseline=baseline.num_heads,
        counts=tuple(rows),
        stages=_stages(observed),
        outcome=overall([row.verdict for row in rows[1:]]),
        answer=(
            *answer(rows, copied, all_nan=all(count.is_nan for count in observed)),
            *_once(count.unlike_masks for count in observed),
            *_masked(baseline, masked, _once(count.fate for count in observed)),
            *unlike_dot(baseline.run),
        ),
        training=training,
        focus=compare_focus(focuses) if focus else None,
        timing=_compare_times(counted, flops) if time else None,
        measured_against=baseline.measured_against,
    )


@dataclass(frozen=True)
class _Observed:
    """What the run of one head count shows, which is compared after its tensors are gone."""

    shapes: dict[str, tuple[int, ...]]
    """The shape of each stage of the first attention in canonical axes."""
    shares_keys: bool
    """Whether several heads of the first attention share a key and value head."""
    unlike_masks: str
    """A sentence about masks that differ from the baseline's; empty if they do not."""
    fate: str
    """What the weights of queries with every key masked out are; empty without such queries."""
    is_nan: bool
    """Whether the whole output is NaN."""

    @classmethod
    def of(cls, baseline: HeadRun, run: HeadRun, masked: Rows) -> _Observed:
        """Return what a run shows beside the baseline, which may be the same run."""
        names = run.attentions[0][1]
        return cls(
            shapes=_canonical_shapes(run),
            shares_keys=names.num_kv_heads != names.num_heads,
            unlike_masks="" if run is baseline else _unlike_masks(baseline, run),
            fate=fate_of(run.content(0, "weights"), masked) if masked else "",
            is_nan=bool(run.returned.isnan().all()),
        )


def _once(sentences: Iterable[str]) -> list[str]:
    """Return sentences without empty and repeated ones, in order."""
    return [sentence for sentence in dict.fromkeys(sentences) if sentence]


def _unlike_masks(baseline: HeadRun, run: HeadRun) -> str:
    """Return how the masks of a head count differ from those of the baseline: that is no effect of the split."""
    called = Where(f"with {plural(baseline.num_heads, 'head')}", f"with {plural(run.num_heads, 'head')}")
    for place in range(min(len(baseline.attentions), len(run.attentions))):
        if _masks_by_scores(baseline, place) or _masks_by_scores(run, place):
            continue  # e.g. the best keys of each head: that is an effect of the split
        sentence = visible_pairs(baseline, run, place, called)
        if sentence:
            return f"Beside the split, {sentence[0].lower()}{sentence[1:]}"
    return ""


def _masks_by_scores(run: HeadRun, place: int) -> bool:
    """Return whether a mask of an attention is made of its scores, so that several operands depend on them."""
    recording, (attention, _) = run.run.recording, run.attentions[place]
    scores = attention.score_product.op.output
    for op in attention.masks:
        of_scores = [read for read in op.inputs if read.id == scores.id or between(recording, {scores.id}, read)]
        if len(of_scores) > 1:
            return True
    return False


def _canonical_shapes(run: HeadRun) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stage of the first attention in canonical axes, without stages that have no numbers."""
    contents = {stage: run.content(0, stage) for stage in run.attentions[0][0].stages}
    return {stage: tuple(content.shape) for stage, content in contents.items() if content is not None}


def _stages(observed: Sequence[_Observed]) -> tuple[StageShapes, ...]:
    """Return the shapes of each stage, from those of each head count.

    Keys and values have `kv_heads` where heads share them, and `heads` otherwise, as in `trace`.
    """
    shares_keys = any(count.shares_keys for count in observed)
    stages: list[StageShapes] = []
    for stage in STAGES:
        shapes = tuple(count.shapes.get(stage) for count in observed)
        if any(shape is not None for shape in shapes):
            axes = CANONICAL_AXES[stage] if shares_keys else CANONICAL_AXES[stage].replace("kv_heads", "heads")
            stages.append(StageShapes(stage, axes, shapes))
    return tuple(stages)


def _masked(baseline: HeadRun, masked: Rows, fates: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence about queries with every key masked out, in any head; none without such queries."""
    weights = f"their weights are {listed(fates)}"
    return (masked_sentence(masked, weights, baseline.masked_heads(0)),) if masked else ()


def _require_comparable(run: HeadRun, base: HeadRun) -> None:
    if run.drops and run.subject.module.training:
        raise SpecError(
            f"{run.label} is in training mode, and dropout alone makes the outputs of all head counts differ. "
            "Use eval mode (--eval, .eval()), or no dropout."
        )
    if run.drops:
        raise SpecError(
            f"{run.label} draws random numbers in its forward, which alone make the outputs differ. "
            "Remove them, or draw them outside the forward and pass them as an argument."
        )
    if not run.attentions:
        raise SpecError(f"No attention was found in {run.label}: there are no heads to compare.")
    if run.returned.shape != base.returned.shape:
        raise SpecError(
            f"{run.label} returns {list(run.returned.shape)} with num_heads {run.num_heads}, but "
            f"{list(base.returned.shape)} with the baseline. Only outputs of one shape can be compared. "
            "Set the sizes that do not follow from the number of heads: --set NAME=VALUE."
        )
    num_heads = run.attentions[0][1].num_heads
    if num_heads != run.num_heads:
        raise SpecError(
            f"{run.label} was built with num_heads {run.num_heads}, but its attention has {num_heads} heads: another "
            "argument decides it. `mha-inspect trace` shows its sizes."
        )


def copy_weights(baseline: HeadRun, run: HeadRun) -> CopiedWeights:
    """Copy the baseline's weights into a module: all by name, or else part by part of each attention.

    Buffers are no weights: each head count keeps its own masks, and what else it computed from its sizes.
    """
    given, taken = weights_by_name(baseline), weights_by_name(run)
    fitting = {name: tensor for name, tensor in given.items() if name in taken and taken[name].shape == tensor.shape}
    write_by_name(run, fitting)
    if fitting.keys() == given.keys() == taken.keys():
        return CopiedWeights(True)
    pairs = list(zip(baseline.weights, run.weights, strict=False))
    run.forget()  # the run had other weights
    parts: list[str] = []
    changes: list[Change] = []
    projected: set[str] = set()
    for source, destination in pairs:
        copied = copy_by_head(source, destination)
        parts += copied.copied
        changes += map(_lost, copied.not_copied)
        for projection in chain(source.projections.values(), destination.projections.values()):
            projected.update(projection.parameters)
    parts += [name for name in fitting if name not in projected]
    for name, tensor in taken.items():
        if name in fitting or name in projected:
            continue
        if name in given:
            changes.append(Change(f"{name} {list(given[name].shape)} becomes {list(tensor.shape)}"))
        else:
            changes.append(Change(f"{name} is new"))
    changes += [Change(f"{name} is missing") for name in given if name not in taken and name not in projected]
    before, after = _numel(baseline.subject.module), _numel(run.subject.module)
    if not changes and before != after:
        changes = [Change(f"{before:,} parameters become {after:,}")]
    return CopiedWeights(not changes, tuple(parts), tuple(changes))


def _lost(part: NotCopied) -> Change:
    """Return the change of a part that was not copied: `W_q [8, 8] becomes [4, 8]`, or its reason after a colon."""
    return Change(f"{part.part} {part.reason}" if part.sizes else f"{part.part}: {part.reason}", part.part)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _row(run: HeadRun, baseline: HeadRun, copied: CopiedWeights, before: Sequence[HeadCount]) -> HeadCount:
    """Return the row of one head count; the reason is computed when `before` has the baseline's row."""
    floor = before[0].noise_floor if before else baseline.output_floor(baseline.masked_queries(0))
    row = HeadCount(
        **vars(difference_of(baseline.returned, run.returned, floor)),
        num_heads=run.num_heads,
        head_dim=run.attentions[0][1].head_dim,
        numel=_numel(run.subject.module),
        same_parameters=copied.same,
        output_shape=tuple(run.returned.shape),
        first_differing_stage=None,
        reason="The baseline.",
    )
    if not before:
        return row
    walk = _walk(baseline, run, row.verdict)
    why = reason(before[0], row, walk, copied)
    sentence = f"{why.start}{why.sizes}{why.end}"
    return replace(row, first_differing_stage=walk.first, reason=sentence, _pieces=why)


def _walk(baseline: HeadRun, run: HeadRun, verdict: Verdict) -> StageWalk:
    """Compare stage by stage, by content, in the first attention in which a stage differs, otherwise in the last.

    If the outputs differ, the walk ends at that stage; otherwise it finds the stage from which both are the same again.
    """
    walk, places = StageWalk(), min(len(baseline.attentions), len(run.attentions))
    for place, rows in groupby(Comparison(baseline, run, (baseline,)).rows(), key=lambda row: row.place):
        if place >= places:
            break
        walk = _walk_of_attention(rows, run, verdict)
        if walk.first is not None:
            return walk
    return walk._replace(unnamed=_unnamed((baseline, run)))


def _walk_of_attention(rows: Iterable[ComparedStage], run: HeadRun, verdict: Verdict) -> StageWalk:
    """Compare the stages of one attention; a walk with different outputs ends at the first stage that differs."""
    walk = StageWalk()
    for row in rows:
        if row.difference is None or row.name in ("query", "key", "value"):
            continue
        differs = row.difference.verdict == "differs"
        if walk.first is not None and differs:
            walk = walk._replace(rejoined=None)
        elif walk.first is not None:
            walk = walk._replace(rejoined=walk.rejoined or row.name)
        elif not differs:
            walk = walk._replace(same=(*walk.same, row.name))
        else:
            rotated = bool(run.subject.made_with.get("rope"))
            walk = walk._replace(first=row.name, note=_other_sizes(row), rotated=rotated)
            if verdict == "differs":
                return walk
    return walk


def _unnamed(sides: Sequence[HeadRun]) -> tuple[str, ...]:
    """Return the stages that have no numbers in canonical axes, in some attention of some side."""
    unnamed: set[str] = set()
    for side in sides:
        for place, (attention, _) in enumerate(side.attentions):
            unnamed.update(stage for stage in attention.stages if side.content(place, stage) is None)
    return tuple(stage for stage in STAGES if stage in unnamed)


def _other_sizes(row: ComparedStage) -> str:
    """Return how the shapes differ; empty if the content was compared number by number."""
    assert row.left is not None
    assert row.right is not None
    assert row.difference is not None
    left, right = list(row.left.shape), list(row.right.shape)
    if left == right or (row.difference.max_abs_difference is not None and len(left) > 3):
        return ""
    wider = left[:-1] == right[:-1]
    return f"{right[-1]} features wide instead of {left[-1]}" if wider else f"{right} instead of {left}"


def _flops_of(run: Run) -> tuple[StageFlops, ...]:
    """Return the floating-point operations of each stage with matrix products, summed over all attentions."""
    total = dict.fromkeys(STAGES, 0)
    for attention, names in run.attentions:
        facts = StageFacts(run.graph, attention, {stage: names.of_stage(stage) for stage in attention.stages})
        for stage in attention.stages:
            turns = len(attention.branches) if is_by_turn(attention, names, stage) else 1
            total[stage] += facts.flops(stage) * turns
    return tuple(StageFlops(stage, flops) for stage, flops in total.items() if flops)


def _compare_times(counted: Sequence[tuple[int, Subject]], flops: Sequence[tuple[StageFlops, ...]]) -> Timing:
    counts = []
    for (num_heads, subject), of_stages in zip(counted, flops, strict=True):
        measured = _measured(subject)
        quartiles = torch.tensor(measured.times, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75]).double())
        low, high = (1e3 * quartiles).tolist()
        runs = measured.number_per_run * len(measured.times)
        counts.append(HeadTime(num_heads, 1e3 * measured.median, low, high, runs, of_stages))
    return Timing(tuple(counts), torch.get_num_threads(), _time_answer(counts))


def _measured(subject: Subject) -> Measurement:
    """Return the times of a forward, each from the same state; the timer warms up, and waits for a GPU."""
    from torch.utils.benchmark import Timer  # takes a third of a second to import

    with torch.no_grad(), subject.apart() as fresh, fresh.settings():
        names = {"restore": fresh.state().restore, "module": fresh.module, "args": fresh.args, "kwargs": fresh.kwargs}
        timer = Timer("restore(); module(*args, **kwargs)", globals=names, num_threads=torch.get_num_threads())
        return timer.adaptive_autorange(max_run_time=_SECONDS)


def _time_answer(counts: Sequence[HeadTime]) -> str:
    base, others = counts[0], counts[1:]
    totals = {sum(stage.flops for stage in count.flops) for count in counts}
    given = "The number of operations changes with the head count."
    if len(totals) == 1:
        given = "Every head count needs the same number of operations."
    apart = [count for count in others if count.low_ms > base.high_ms or count.high_ms < base.low_ms]
    heads = plural(base.num_heads, "head")
    if not apart:
        return f"{given} No time differs from that of {heads} by more than the spread of the runs."
    furthest = max(apart, key=lambda count: abs(log(count.median_ms / base.median_ms)))
    ratio = furthest.median_ms / base.median_ms
    took = f"{times(ratio)} times as long as" if ratio > 1 else f"{percent(ratio)} of the time of"
    return f"{given} {plural(furthest.num_heads, 'head')} took {took} {heads}."
