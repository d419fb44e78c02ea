"""Does the number of heads change the output? The same weights and the same input through several head counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import log
from time import perf_counter

import torch
from torch import nn

from ..errors import SpecError
from ..measure.stage_difference import compare_stage
from ..measure.weights import carry as carry_by_head
from ..measure.weights import weights_of
from ..naming.canonical import is_by_turn
from ..naming.stage_facts import StageFacts, unlike_dot
from ..naming.stages import STAGES
from ..naming.subject import Subject
from ..record.rounding import distances, judge, size_of
from ..reports.common import Verdict
from ..reports.compare_heads import CompareHeadsReport, HeadCount, HeadsFocus, HeadTime, StageFlops, Timing
from ..text import percent, plural, times
from .equalities import Equalities, masked_note
from .focus import compare_focus, focus_of_look
from .head_runs import HeadRun, overall
from .head_sentences import Carried, Walk, answer, reason
from .learning import Learner, compare_gradients, compare_training, in_the_same_parts
from .look import Look
from .run_report import environment_of, layer_of

_GIVEN = ("query", "key", "value")


def compare_heads(
    counted: Sequence[tuple[int, Subject]],
    *,
    gradients: bool = False,
    steps: int = 0,
    focus: bool = False,
    time: bool = False,
    see: Callable[[int, Look], None] | None = None,
    tick: Callable[[str], None] = lambda words: None,
) -> CompareHeadsReport:
    """Compare modules that differ in their number of heads, the first being the baseline.

    Each is given what it can hold of the baseline's weights, and run once.

    Args:
        counted: head counts, and a module for each, with the same input.
        gradients: whether the gradient of every parameter is compared.
        steps: how many steps each head count is trained for, to compare what it has learned; 0 for none.
        focus: whether to measure what each head looks at, before training and after it.
        time: whether to measure how long each head count takes.
        see: is called with each head count and a look at all of it, while its stages are there.
        tick: is told before each step of training how far it is.

    Raises:
        SpecError: no attention was found, the outputs have other shapes, or weights are dropped at random.
        InputError: the baseline cannot be run in float64, which rounding is measured against; or there is no gradient.
        RecordingError: the weights cannot be told by head, and what heads look at was asked for.
    """
    whole = focus or see is not None
    baseline = HeadRun(*counted[0], whole=whole)
    _require_comparable(baseline, baseline)
    runs = [baseline, *(HeadRun(*one, baseline, whole=whole) for one in counted[1:])]
    carried = [Carried(True), *(carry(baseline, run) for run in runs[1:])]
    if baseline.layout is not None:
        for run in runs:  # before any look: what is small and often used stays in the processor's caches after that
            _ = run.output
    equalities = Equalities(baseline)
    size = size_of(baseline.output)
    rows: list[HeadCount] = []
    walks: list[Walk] = []
    learners: list[Learner] = []
    seen: list[HeadsFocus] = []
    learned: list[HeadsFocus] = []
    for run, own in zip(runs, carried, strict=True):
        _require_comparable(run, baseline)
        rows.append(_row(run, baseline, own, size))
        walks.append(_walk(baseline, run, rows[-1].verdict) if run is not baseline else Walk())
        if gradients or steps:
            learners.append(Learner.of(run))
        if focus:
            seen += focus_of_look(run.look(), run.label)
        if see is not None:
            see(run.num_heads, run.look())
        _ = run.by_query
        if run is not baseline:
            equalities.see(run)
            run.forget()
    same_weights = all(one.same for one in carried)
    learners = in_the_same_parts(learners)
    cause = equalities.cause if same_weights else ""
    for place, walk in enumerate(walks[1:], start=1):
        why = reason(rows[0], rows[place], walk, carried[place], cause)
        rows[place] = replace(rows[place], first_differing_stage=walk.first, reason="".join(why), _pieces=why)
    said = equalities.measured(runs, "" if baseline.is_known else baseline.label) if same_weights else ()
    masked = masked_note(runs)
    outputs = [(run.num_heads, run.output) for run in runs]

    def look_after(learner: Learner) -> None:
        if focus:
            learned.extend(focus_of_look(Look(learner.own), baseline.label))

    training = compare_training(learners, steps, cause, look_after, tick) if steps else None
    return CompareHeadsReport(
        environment=environment_of(baseline.own),
        layer=layer_of(baseline.own),
        baseline=baseline.num_heads,
        counts=tuple(rows),
        verdict=overall([row.verdict for row in rows[1:]]),
        equalities=(*said, masked) if masked else said,
        answer=(
            *answer(rows, carried, all_nan=all(bool(output.isnan().all()) for _, output in outputs)),
            *unlike_dot(baseline.nearest.run),
        ),
        gradients=compare_gradients(learners, cause) if gradients else None,
        training=training,
        focus=compare_focus(seen) if focus else None,
        focus_after=compare_focus(learned, f"after {plural(steps, 'step')}") if learned else None,
        timing=compare_times(runs) if time else None,
        measured_against=baseline.nearest.measured_against,
    )


def _require_comparable(run: HeadRun, base: HeadRun) -> None:
    if run.nearest.drops:
        raise SpecError(
            f"{run.label} drops elements at random in training mode, others for every head count: the outputs would "
            "differ whatever the heads do. Take eval mode (--eval, .eval()), or no dropout."
            if run.module.training
            else f"{run.label} draws random numbers in its forward: outputs would differ whatever the heads do. Leave "
            "them out, or draw them outside of it and give them as an argument."
        )
    if not run.nearest.attentions:
        raise SpecError(f"No attention was found in {run.label}: there are no heads to compare.")
    if run.output.shape != base.output.shape:
        raise SpecError(
            f"{run.label} returns {list(run.output.shape)} with num_heads {run.num_heads} and "
            f"{list(base.output.shape)} with the baseline: outputs of one shape can be compared. Give it the sizes "
            "that do not follow from the number of heads: --set NAME=VALUE."
        )
    found = run.nearest.attentions[0][1].num_heads
    if found != run.num_heads:
        raise SpecError(
            f"{run.label} was built with num_heads {run.num_heads}, and its attention has {found}: something else "
            "sets it. `mha-inspect trace` shows what it takes."
        )


def carry(baseline: HeadRun, run: HeadRun) -> Carried:
    """Give a module what it can hold of the baseline's weights: all by name, or else part by part of each attention."""
    given, own = baseline.module.state_dict(), run.module.state_dict()
    fitting = {name: tensor for name, tensor in given.items() if name in own and own[name].shape == tensor.shape}
    run.module.load_state_dict(fitting, strict=False)
    if fitting.keys() == given.keys() == own.keys():
        return Carried(True)
    pairs = list(zip(*(weights_of(one.nearest.run, one.module) for one in (baseline, run)), strict=False))
    run.forget()  # what it was before the weights went into it
    carried = [carry_by_head(source, destination) for source, destination in pairs]
    held = [projection for pair in pairs for one in pair for projection in one.projections.values()]
    covered = {name for projection in held for name in projection.parameters}
    went = [part for one in carried for part in one.went] + [name for name in fitting if name not in covered]
    changes = [f"{out.part} {out.reason}" for one in carried for out in one.left_out]
    changes += [
        f"{name} {list(given[name].shape)} becomes {list(tensor.shape)}" if name in given else f"{name} is new"
        for name, tensor in own.items()
        if name not in fitting and name not in covered
    ]
    changes += [f"{name} is gone" for name in given if name not in own and name not in covered]
    before, after = _numel(baseline.module), _numel(run.module)
    if not changes and before != after:
        changes = [f"{before:,} parameters become {after:,}"]
    return Carried(not changes, tuple(went), tuple(changes))


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _row(run: HeadRun, baseline: HeadRun, carried: Carried, size: float) -> HeadCount:
    """The row of one head count, without the reason."""
    largest, relative = distances(baseline.output, run.output, size)
    times, verdict = judge(largest, baseline.output_floor)
    return HeadCount(
        num_heads=run.num_heads,
        head_dim=run.nearest.attentions[0][1].head_dim,
        numel=_numel(run.module),
        same_parameters=carried.same,
        output_shape=tuple(run.output.shape),
        max_abs_difference=largest,
        relative_difference=relative,
        noise_floor=baseline.output_floor,
        times_noise=times,
        verdict=verdict,
        first_differing_stage=None,
        reason="The baseline.",
    )


def _walk(baseline: HeadRun, run: HeadRun, verdict: Verdict) -> Walk:
    """Compare stage by stage, by content, to see where two head counts part and where they meet again.

    Up to the scores, which are a number for each pair of a query and a key, a few positions show what all of them do.
    Where nothing differs there, everything is looked at.
    """
    if baseline.layout is not None and verdict == "differs":
        found = _walk_attention(0, baseline.nearest, run.nearest, STAGES[: STAGES.index("weights")])
        if found.first is not None:
            return found
    mine, theirs = baseline.look(), run.look()
    found = Walk()
    for place in range(min(len(mine.attentions), len(theirs.attentions))):
        found = _walk_attention(place, mine, theirs, STAGES)
        if found.first is not None:
            return found
    unnamed = mine.unnamed | theirs.unnamed
    return replace(found, unnamed=tuple(stage for stage in STAGES if stage in unnamed))


def _walk_attention(place: int, mine: Look, theirs: Look, stages: Sequence[str]) -> Walk:
    same: list[str] = []
    first, note, rejoined = None, "", None
    for stage in stages:
        left, right = mine.get(place, stage), theirs.get(place, stage)
        if stage in _GIVEN or left is None or right is None:
            continue
        row = compare_stage(stage, left, right, partial(mine.floor, place, stage, right))
        if first is not None:
            rejoined = None if row.verdict == "differs" else rejoined or stage
        elif row.verdict != "differs":
            same.append(stage)
        else:
            first = stage
            if row.max_abs_difference is None:
                wider = left.shape[:-1] == right.shape[:-1]  # where few were looked at, the width alone is the whole's
                note = f"{right.shape[-1]} features wide instead of {left.shape[-1]}" if wider else ""
                note = note or f"{list(right.shape)} instead of {list(left.shape)}"
    return Walk(tuple(same), first, note, rejoined, turned=bool(theirs.own.made_with.get("rope")))


_RUNS, _SECONDS = 11, 5.0
"""Runs of each head count, and the time after which fewer have to do: three at the least."""


def flops_of(own: Subject) -> tuple[StageFlops, ...]:
    """Return the floating-point operations of each stage that has products, of all attentions together."""
    with torch.no_grad(), own.apart() as one:
        run = one.recorded()
    total = dict.fromkeys(STAGES, 0)
    for found, names in run.attentions:
        facts = StageFacts(run.graph, found, {stage: names.of_stage(stage) for stage in found.stages})
        for stage in found.stages:
            turns = len(found.branches) if is_by_turn(found, names, stage) else 1
            total[stage] += facts.flops(stage) * turns
    return tuple(StageFlops(stage, flops) for stage, flops in total.items() if flops)


def compare_times(runs: Sequence[HeadRun]) -> Timing:
    """Run each head count several times, in turns, so that a machine whose speed drifts slows all alike."""
    taken: list[list[float]] = [[] for _ in runs]
    start = perf_counter()
    for turn in range(_RUNS + 1):
        for run, own in zip(runs, taken, strict=True):
            taking = _milliseconds(run.own)
            if turn:  # the first warms up
                own.append(taking)
        if turn >= 3 and perf_counter() - start > _SECONDS:
            break
    counts = []
    for run, own in zip(runs, taken, strict=True):
        low, median, high = statistics.quantiles(own, n=4)
        counts.append(HeadTime(run.num_heads, median, low, high, len(own), flops_of(run.own)))
    return Timing(tuple(counts), torch.get_num_threads(), _answer(counts))


def _milliseconds(own: Subject) -> float:
    """How long one run takes."""
    on_gpu = any(parameter.is_cuda for parameter in own.module.parameters())
    with torch.no_grad(), own.apart() as one, one.settings():
        if on_gpu:
            torch.cuda.synchronize()
        before = perf_counter()
        one.module(*one.args, **one.kwargs)
        if on_gpu:
            torch.cuda.synchronize()
        return 1e3 * (perf_counter() - before)


def _answer(counts: Sequence[HeadTime]) -> str:
    base, others = counts[0], counts[1:]
    if not others:
        return "There is one head count, and nothing to compare its time with."
    totals = {sum(stage.flops for stage in count.flops) for count in counts}
    given = "are as many operations for every head count" if len(totals) == 1 else "change with the head count"
    apart = [count for count in others if count.low_ms > base.high_ms or count.high_ms < base.low_ms]
    one = plural(base.num_heads, "head")
    if not apart:
        return f"The products {given}, and no head count's time is apart from that of {one} by more than the spread."
    furthest = max(apart, key=lambda count: abs(log(count.median_ms / base.median_ms)))
    ratio = furthest.median_ms / base.median_ms
    took = f"{times(ratio)} times as long as" if ratio > 1 else f"{percent(ratio)} of the time of"
    return f"The products {given}; {plural(furthest.num_heads, 'head')} took {took} {one}."
