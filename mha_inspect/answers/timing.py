"""Does it get faster with more heads? The operations of each stage, and the time that each head count takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import log
from time import perf_counter

import torch

from ..naming.canonical import is_by_turn
from ..naming.stage_facts import StageFacts
from ..naming.stages import STAGES
from ..naming.subject import Subject
from ..reports.compare_heads import HeadTime, StageFlops, Timing
from ..text import percent, plural, times
from .head_runs import HeadRun

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
