"""Trace a forward pass: record it, find its attentions, name their axes, and prove what is shown."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..layers.spec import Show
from ..naming.kind import kinds_of, mask_notes
from ..reports.common import Environment, LayerInfo
from ..reports.trace import Failure, Trace
from ..running.run import Run, run_and_record
from ..running.state import State
from ..running.subject import Subject
from .masked_queries import blind_attention, masked_note
from .nan import nan_note, once_more
from .run_report import environment_of, layer_of, report


def trace(subject: Subject, show: Show | None = None) -> Trace:
    """Run a subject, and report every attention in it, found by its dataflow.

    Raises `ForwardError` where the forward raises: its `trace` holds what was recorded up to there, with `failure`, and
    its `__cause__` is the error. Arguments that do not fit the forward's signature raise what Python raises.
    """
    show = show or Show()
    return traced(subject, show, keep=show.stats or show.values)[0]


def traced(subject: Subject, show: Show, *, keep: bool) -> tuple[Trace, Run]:
    """Return what `trace` does, and the run that the stages were read off, its tensors kept when asked for.

    The subject is run once, as it is. Where that run hides stages in fused kernels, each is opened beside its result;
    what the run computes, buffers and generators are as one call leaves them.
    """
    with subject.settings():
        before = subject.state()
        run = _run(subject, show, keep, before)
        run = run.beside(subject.wider_run(run))
        trace = report(
            run,
            show,
            kinds=kinds_of(run),
            environment=environment_of(subject),
            layer=layer_of(subject),
        )
        notes = (*mask_notes(run, subject.leaves(run.recording)), *_of_numbers(subject, before, run, keep))
    absent = show.without_numbers(trace.environment.device)
    return replace(trace, notes=(*trace.notes, *notes, *absent, *subject.notes)), run


def of_block(run: Run, failed: tuple[Failure, int] | None) -> Trace:
    """Return the trace of what ran in a block of somebody's code, of which nothing is known but the recording.

    `failed` is how the block ended, and how many attentions were complete by then; None where it did not raise.
    """
    environment, layer = Environment(torch.__version__, "", "", None), LayerInfo("recording", {})
    kinds = kinds_of(run)
    trace = report(run, Show(), environment=environment, layer=layer, kinds=kinds)
    trace = replace(trace, notes=(*trace.notes, *mask_notes(run, {})))
    return trace if failed is None else replace(trace, attentions=trace.attentions[: failed[1]], failure=failed[0])


def _of_numbers(subject: Subject, before: State, run: Run, keep: bool) -> tuple[str, ...]:
    """Return what becomes of queries without keys, or else where NaN begins: one more run keeps every tensor."""
    blind = blind_attention(run)
    if blind is None:
        return nan_note(subject, before, run, kept=keep)
    again = run if keep else once_more(subject, before)
    return (masked_note(*blind, None if again is None else again.beside(run.wider)),)


def _run(subject: Subject, show: Show, keep: bool, before: State) -> Run:
    """Return the run. Raises `ForwardError` where the forward raises."""
    run = run_and_record(subject.module, subject.args, subject.kwargs, keep=keep)
    if run.error is None:
        return run
    from .failure.report import forward_error

    cause: Exception | None = run.error
    failure = forward_error(subject, run, show, before)
    try:
        raise failure from (None if failure is cause else cause)
    finally:
        # The error's traceback leads to this frame: what led back to the error would keep its tensors.
        del run, cause, failure
