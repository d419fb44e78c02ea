"""Compare head counts: run the same weights and the same input through modules that differ in their number of heads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby
from math import log
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..call.call import explaining
from ..checks.check import judged
from ..compare.comparable_run import ComparableRun, ComparedStage, Comparison, difference_of, overall
from ..compare.head_sentences import Change, CopiedWeights, StageWalk, answer, reason
from ..compare.pair import Where
from ..compare.reasons.mask import visible_pairs
from ..compare.shared_weights import weights_by_name, write_by_name
from ..errors import SpecError
from ..graph.rerun import between
from ..measure.run_report import environment_of, fate_of, layer_of, masked_sentence
from ..measure.weights import NotCopied, copy_by_head
from ..naming.canonical import is_by_turn
from ..naming.pattern import CANONICAL_AXES, STAGES
from ..naming.score_formulas import unlike_dot
from ..naming.stage_facts import StageFacts
from ..naming.visibility import Rows
from ..reports.check import Finding
from ..reports.common import Verdict
from ..reports.compare_heads import CompareHeadsReport, HeadCount, HeadsFocus, HeadTime, StageFlops, StageShapes, Timing
from ..running.subject import Run, Subject
from ..text import listed, percent, plural, times
from .focus import compare_focus, focus_of_run
from .learning import Learner, compare_training, in_the_same_parts

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
    num_heads, first = counted[0]
    baseline = HeadRun(num_heads, first)
    masked = baseline.masked_queries(0)
    rows: list[HeadCount] = []
    copied: list[CopiedWeights] = []
    observed: list[_Observed] = []
    asked = _Asked()
    findings: tuple[Finding, ...] | None = None
    for num_heads, subject in counted:
        run = baseline
        weights = CopiedWeights(same=True)
        if rows:
            run = HeadRun(num_heads, subject)
            weights = copy_weights(baseline, run)
        _require_comparable(run, baseline)
        rows.append(_row(run, baseline, weights, rows))
        copied.append(weights)
        observed.append(_Observed.of(baseline, run, masked))
        if steps:
            asked.learners.append(Learner.of(num_heads, run))
        if focus:
            asked.focuses.extend(focus_of_run(run))
        if time:
            asked.flops.append(_flops_of(run.run))
        if see is not None:
            see(num_heads, run)
        # A single head has nothing to mix.
        if findings is None and num_heads > 1:
            findings = _findings(run)
        if run is not baseline:
            run.forget()
    report = CompareHeadsReport(
        environment=environment_of(baseline.subject),
        layer=layer_of(baseline.subject),
        baseline=baseline.num_heads,
        counts=tuple(rows),
        stages=_stages(observed),
        outcome=overall([row.verdict for row in rows[1:]]),
        answer=(
            *answer(rows, copied, own=_own_part(observed), all_nan=all(count.is_nan for count in observed)),
            *_shown_by(baseline, copied),
            *_once(count.unlike_masks for count in observed),
            *_masked(baseline, masked, _once(count.fate for count in observed)),
            *unlike_dot(baseline.run),
        ),
        training=None,
        focus=compare_focus(asked.focuses) if focus else None,
        timing=None,
        measured_against=baseline.measured_against,
        findings=findings or (),
    )
    if steps:
        training = compare_training(in_the_same_parts(asked.learners), steps, tick)
        report = replace(report, training=training)
    if time:
        report = replace(report, timing=_compare_times(counted, asked.flops))
    return report


def _findings(run: HeadRun) -> tuple[Finding, ...]:
    """Return what is wrong in a run, from the checks that need no other."""
    subject = run.subject
    with subject.settings(), torch.random.fork_rng(subject.gpus()):
        return judged(subject, run.run, subject.state()).findings


@dataclass(frozen=True)
class _Asked:
    """What the user asked for beside the outputs: an entry for each head count, and for each attention of `focuses`."""

    learners: list[Learner] = field(default_factory=list)
    focuses: list[HeadsFocus] = field(default_factory=list)
    flops: list[tuple[StageFlops, ...]] = field(default_factory=list)


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
    own: str
    """What each head has of W_q, W_k and W_v for itself: `rows` or `columns`; empty if heads share it, or see alike."""

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
            own=_own_part_of(run) if run.num_heads > 1 else "",
        )


def _own_part_of(run: HeadRun) -> str:
    """Return what each head of the first attention has of W_q, W_k and W_v for itself: `rows` or `columns`.

    Empty if heads share it, if its place is unknown, or if all heads have the same weights.
    """
    weights = run.content(0, "weights")
    if weights is None or torch.equal(weights.nan_to_num(), weights[:, :1].expand_as(weights).nan_to_num()):
        return ""
    ways = set[str]()
    projections = run.weights[0].projections
    for name in ("W_q", "W_k", "W_v"):
        projection = projections.get(name)
        if projection is None or not projection.is_whole or projection.shape[0] != run.num_heads:
            return ""
        for part in projection.parts:
            outer = part.placement.outer_dims
            ways.add({0: "rows", 1: "columns"}.get(outer[0], "") if len(outer) == 1 else "")
    return ways.pop() if len(ways) == 1 else ""


def _own_part(observed: Sequence[_Observed]) -> str:
    """Return what each head has for itself, of all counts of several heads; empty if they differ."""
    ways = {count.own for count in observed if count.shapes.get("weights", (1, 1))[1] > 1}
    return ways.pop() if len(ways) == 1 else ""


def _shown_by(baseline: HeadRun, copied: Sequence[CopiedWeights]) -> list[str]:
    """Return the command that shows the heads apart, for torch's layer."""
    if baseline.subject.layer != "torch" or not all(weights.same for weights in copied):
        return []
    return [
        "`mha-inspect diff torch per-head` shows it: a layer with a small projection of its own for each head, "
        "with the same weights, returns the same."
    ]


def _once(sentences: Iterable[str]) -> list[str]:
    """Return sentences without empty and repeated ones, in order."""
    return [sentence for sentence in dict.fromkeys(sentences) if sentence]


def _unlike_masks(baseline: HeadRun, run: HeadRun) -> str:
    """Return how the masks of a head count differ from those of the baseline: that is no effect of the split."""
    called = Where(f"with {plural(baseline.num_heads, 'head')}", f"with {plural(run.num_heads, 'head')}")
    for place, pair in enumerate(Comparison(baseline, run).pairs(called)):
        if _masks_by_scores(baseline, place) or _masks_by_scores(run, place):
            continue  # e.g. the best keys of each head: that is an effect of the split
        sentence = visible_pairs(pair)
        if sentence:
            return f"Beside the split, {sentence[0].lower()}{sentence[1:]}"
    return ""


def _masks_by_scores(run: HeadRun, place: int) -> bool:
    """Return whether a mask of an attention is made of its scores, so that several operands depend on them."""
    recording = run.run.recording
    attention, _ = run.attentions[place]
    scores = attention.score_product.op.output
    for op in attention.masks:
        of_scores = 0
        for operand in op.inputs:
            if operand.id == scores.id or between(recording, {scores.id}, operand):
                of_scores += 1
        if of_scores > 1:
            return True
    return False


def _canonical_shapes(run: HeadRun) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stage of the first attention in canonical axes, without stages that have no numbers."""
    attention, _ = run.attentions[0]
    shapes: dict[str, tuple[int, ...]] = {}
    for stage in attention.stages:
        content = run.content(0, stage)
        if content is not None:
            shapes[stage] = tuple(content.shape)
    return shapes


def _stages(observed: Sequence[_Observed]) -> tuple[StageShapes, ...]:
    """Return the shapes of each stage, from those of each head count.

    Keys and values have `kv_heads` where heads share them, and `heads` otherwise, as in `trace`.
    """
    shares_keys = any(count.shares_keys for count in observed)
    stages: list[StageShapes] = []
    for stage in STAGES:
        if not any(stage in count.shapes for count in observed):
            continue
        axes = CANONICAL_AXES[stage]
        if not shares_keys:
            axes = axes.replace("kv_heads", "heads")
        shapes = tuple(count.shapes.get(stage) for count in observed)
        stages.append(StageShapes(stage, axes, shapes))
    return tuple(stages)


def _masked(baseline: HeadRun, masked: Rows, fates: Sequence[str]) -> tuple[str, ...]:
    """Return a sentence about queries with every key masked out, in any head; none without such queries."""
    if not masked:
        return ()
    weights = f"their weights are {listed(fates)}"
    return (masked_sentence(masked, weights, baseline.masked_heads(0)),)


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
            f"{run.label} was built with num_heads {run.num_heads}, but its attention has "
            f"{plural(num_heads, 'head')}. `mha-inspect trace` shows its sizes."
        )


def copy_weights(baseline: HeadRun, run: HeadRun) -> CopiedWeights:
    """Copy the baseline's weights into a module: all by name, or else part by part of each attention.

    Buffers are no weights: each head count keeps its own masks, and what else it computed from its sizes.
    """
    given = weights_by_name(baseline)
    taken = weights_by_name(run)
    fitting: dict[str, Tensor] = {}
    for name, tensor in given.items():
        if name in taken and taken[name].shape == tensor.shape:
            fitting[name] = tensor
    write_by_name(run, fitting)
    if fitting.keys() == given.keys() == taken.keys():
        return CopiedWeights(same=True)
    parts: list[str] = []
    changes: list[Change] = []
    projected: set[str] = set()
    for source, destination in zip(baseline.weights, run.weights, strict=False):
        copied = copy_by_head(source, destination)
        parts += copied.copied
        changes += map(_lost, copied.not_copied)
        for projection in chain(source.projections.values(), destination.projections.values()):
            projected.update(projection.parameters)
    run.forget()  # it ran with other weights
    parts += [name for name in fitting if name not in projected]
    changes += _changes_by_name(given, taken, leaving_out=projected)
    before = _numel(baseline.subject.module)
    after = _numel(run.subject.module)
    if not changes and before != after:
        changes = [Change(f"{before:,} parameters become {after:,}")]
    return CopiedWeights(not changes, tuple(parts), tuple(changes))


def _changes_by_name(
    given: Mapping[str, Tensor], taken: Mapping[str, Tensor], *, leaving_out: Collection[str]
) -> Iterator[Change]:
    """Yield the weights that have another shape than the baseline's, are new or are missing."""
    for name, tensor in taken.items():
        if name in leaving_out:
            continue
        if name not in given:
            yield Change(f"{name} is new")
        elif given[name].shape != tensor.shape:
            yield Change(f"{name} {list(given[name].shape)} becomes {list(tensor.shape)}")
    for name in given:
        if name not in taken and name not in leaving_out:
            yield Change(f"{name} is missing")


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
    pieces = reason(before[0], row, walk, copied)
    return replace(row, first_differing_stage=walk.first, reason=pieces.sentence, _pieces=pieces)


def _walk(baseline: HeadRun, run: HeadRun, verdict: Verdict) -> StageWalk:
    """Compare stage by stage, by content, in the first attention in which a stage differs, otherwise in the last.

    If the outputs differ, the walk ends at that stage; otherwise it finds the stage from which both are the same again.
    """
    walk = StageWalk()
    places = min(len(baseline.attentions), len(run.attentions))
    rows = Comparison(baseline, run, (baseline,)).rows()
    for place, of_attention in groupby(rows, key=attrgetter("place")):
        if place >= places:
            break
        walk = _walk_of_attention(of_attention, run, verdict)
        if walk.first is not None:
            return walk
    return replace(walk, unnamed=_unnamed((baseline, run)))


def _walk_of_attention(rows: Iterable[ComparedStage], run: HeadRun, verdict: Verdict) -> StageWalk:
    """Compare the stages of one attention; a walk with different outputs ends at the first stage that differs."""
    same: list[str] = []
    walk: StageWalk | None = None
    for row in rows:
        if row.difference is None or row.name in ("query", "key", "value"):
            continue
        differs = row.difference.verdict == "differs"
        if walk is None and not differs:
            same.append(row.name)
        elif walk is None:
            rotated = bool(run.subject.made_with.get("rope"))
            walk = StageWalk(tuple(same), first=row.name, note=_other_sizes(row), rotated=rotated)
            if verdict == "differs":
                return walk
        elif differs:
            walk = replace(walk, rejoined=None)
        elif walk.rejoined is None:
            walk = replace(walk, rejoined=row.name)
    return walk or StageWalk(tuple(same))


def _unnamed(sides: Sequence[HeadRun]) -> tuple[str, ...]:
    """Return the stages that have no numbers in canonical axes, in some attention of some side."""
    unnamed: set[str] = set()
    for side in sides:
        for place, (attention, _) in enumerate(side.attentions):
            for stage in attention.stages:
                if side.content(place, stage) is None:
                    unnamed.add(stage)
    return tuple(stage for stage in STAGES if stage in unnamed)


def _other_sizes(row: ComparedStage) -> str:
    """Return how the shapes differ; empty if the content was compared number by number."""
    assert row.left is not None
    assert row.right is not None
    assert row.difference is not None
    left = list(row.left.shape)
    right = list(row.right.shape)
    was_subtracted = row.difference.max_abs_difference is not None
    if left == right or (was_subtracted and len(left) > 3):
        return ""
    if left[:-1] == right[:-1]:
        return f"{right[-1]} features wide instead of {left[-1]}"
    return f"{right} instead of {left}"


def _flops_of(run: Run) -> tuple[StageFlops, ...]:
    """Return the floating-point operations of each stage with matrix products, summed over all attentions."""
    total = dict.fromkeys(STAGES, 0)
    for attention, names in run.attentions:
        axes = {stage: names.of_stage(stage) for stage in attention.stages}
        facts = StageFacts(run.graph, attention, axes)
        for stage in attention.stages:
            flops = facts.flops(stage)
            if is_by_turn(attention, names, stage):
                flops *= len(attention.branches)
            total[stage] += flops
    return tuple(StageFlops(stage, flops) for stage, flops in total.items() if flops)


def _compare_times(counted: Sequence[tuple[int, Subject]], flops: Sequence[tuple[StageFlops, ...]]) -> Timing:
    counts = []
    for (num_heads, subject), of_stages in zip(counted, flops, strict=True):
        measured = _measured(subject)
        times_in_ms = 1e3 * torch.tensor(measured.times, dtype=torch.float64)
        counts.append(
            HeadTime(
                num_heads,
                median_ms=1e3 * measured.median,
                low_ms=float(times_in_ms.quantile(0.25)),
                high_ms=float(times_in_ms.quantile(0.75)),
                runs=measured.number_per_run * len(measured.times),
                flops=of_stages,
            )
        )
    return Timing(tuple(counts), torch.get_num_threads(), _time_answer(counts))


def _measured(subject: Subject) -> Measurement:
    """Return the times of a forward, each from the same state; the timer warms up, and waits for a GPU."""
    from torch.utils.benchmark import Timer  # takes a third of a second to import

    with torch.no_grad(), subject.apart() as fresh, fresh.settings():
        names = {"restore": fresh.state().restore, "module": fresh.module, "args": fresh.args, "kwargs": fresh.kwargs}
        timer = Timer("restore(); module(*args, **kwargs)", globals=names, num_threads=torch.get_num_threads())
        return timer.adaptive_autorange(max_run_time=_SECONDS)


def _time_answer(counts: Sequence[HeadTime]) -> str:
    base, *compared = counts
    totals = {sum(stage.flops for stage in count.flops) for count in counts}
    given = "The number of operations changes with the head count."
    if len(totals) == 1:
        given = "Every head count needs the same number of operations."
    apart = [count for count in compared if count.low_ms > base.high_ms or count.high_ms < base.low_ms]
    heads = plural(base.num_heads, "head")
    if not apart:
        return f"{given} No time differs from that of {heads} by more than the spread of the runs."
    furthest = max(apart, key=lambda count: abs(log(count.median_ms / base.median_ms)))
    ratio = furthest.median_ms / base.median_ms
    took = f"{percent(ratio)} of the time of"
    if ratio > 1:
        took = f"{times(ratio)} times as long as"
    return f"{given} {plural(furthest.num_heads, 'head')} took {took} {heads}."
