"""How long each head count takes, and how many operations its products are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import log
from time import perf_counter

import torch

from ..naming.canonical import is_by_turn
from ..naming.stage_facts import StageFacts
from ..naming.stages import STAGES
from ..reports.compare_heads import HeadTime, StageFlops, Timing
from ..running.run import Run
from ..running.subject import Subject
from ..text import percent, plural, times

_RUNS, _SECONDS = 11, 5.0
"""Runs of each head count, and the time after which fewer have to do: three at the least."""


def flops_of(run: Run) -> tuple[StageFlops, ...]:
    """Return the floating-point operations of each stage that has products, of all attentions together."""
    total = dict.fromkeys(STAGES, 0)
    for attention, names in run.attentions:
        facts = StageFacts(run.graph, attention, {stage: names.of_stage(stage) for stage in attention.stages})
        for stage in attention.stages:
            turns = len(attention.branches) if is_by_turn(attention, names, stage) else 1
            total[stage] += facts.flops(stage) * turns
    return tuple(StageFlops(stage, flops) for stage, flops in total.items() if flops)


def compare_times(counted: Sequence[tuple[int, Subject]], flops: Sequence[tuple[StageFlops, ...]]) -> Timing:
    """Run each head count several times, in turns, so that a machine whose speed drifts slows all alike."""
    taken: list[list[float]] = [[] for _ in counted]
    start = perf_counter()
    for turn in range(_RUNS + 1):
        for (_, subject), durations in zip(counted, taken, strict=True):
            duration = _milliseconds(subject)
            if turn:  # the first warms up
                durations.append(duration)
        if turn >= 3 and perf_counter() - start > _SECONDS:
            break
    counts = []
    for (num_heads, _), durations, of_stages in zip(counted, taken, flops, strict=True):
        low, median, high = statistics.quantiles(durations, n=4)
        counts.append(HeadTime(num_heads, median, low, high, len(durations), of_stages))
    return Timing(tuple(counts), torch.get_num_threads(), _answer(counts))


def _milliseconds(subject: Subject) -> float:
    """Return how long one run takes."""
    on_gpu = any(parameter.is_cuda for parameter in subject.module.parameters())
    with torch.no_grad(), subject.apart() as fresh, fresh.settings():
        if on_gpu:
            torch.cuda.synchronize()
        before = perf_counter()
        fresh.module(*fresh.args, **fresh.kwargs)
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
    heads = plural(base.num_heads, "head")
    if not apart:
        return f"The products {given}, and no head count's time is apart from that of {heads} by more than the spread."
    furthest = max(apart, key=lambda count: abs(log(count.median_ms / base.median_ms)))
    ratio = furthest.median_ms / base.median_ms
    took = f"{times(ratio)} times as long as" if ratio > 1 else f"{percent(ratio)} of the time of"
    return f"The products {given}; {plural(furthest.num_heads, 'head')} took {took} {heads}."
