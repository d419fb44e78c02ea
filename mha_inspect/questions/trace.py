"""Trace a forward pass: record it, find its attentions, name their axes, and check the stages that are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..checks.lookalikes import found_instead
from ..files.memory import free_memory
from ..layers.spec import Show
from ..measure.ranks import with_whole_shapes
from ..measure.run_report import environment_of, fate_of, layer_of, masked_sentence, report
from ..naming.canonical import content_of
from ..naming.visibility import Visibility, kinds_of, mask_notes, visibility
from ..record.arguments import tensors_in
from ..record.ranks import local, needs_ranks
from ..record.tensors import uncollected
from ..reports.common import Environment, LayerInfo
from ..reports.trace import Failure, Trace
from ..running.subject import Run, State, Subject, run_and_record
from ..text import byte_size
from .averaged_weights import how_by_head, with_means

ROOM = 128 * 2**20
"""Bytes that the tensors of a run may take to be kept until it is judged, whatever the module's size."""
_SHARE_OF_FREE = 0.25
"""Share of the free memory that they may take at most."""


def traced(subject: Subject, show: Show, *, keep: bool, judge: bool = False) -> tuple[Trace, Run]:
    """Run a subject, and return a report of every attention in its dataflow, and the run, with tensors kept if `keep`.

    With `judge`, the report says what is wrong in this run; its tensors are kept until then, if they fit in `ROOM`.

    The subject is run once. Fused kernels of that run are opened by recomputing their stages. Results, buffers and
    random generators are as after one plain call.

    Raises `ForwardError` if the forward raises: its `trace` is the recording up to the error, with `failure`, and its
    `__cause__` is the error. Arguments that do not fit the forward's signature raise Python's own error.
    """
    with subject.settings():
        before = subject.state()
        room = _room_of(subject)
        run = run_of(subject, show, keep=keep or judge, room=None if keep else room, before=before)
        # The generators stay as the run left them, whatever is measured from here on.
        with torch.random.fork_rng(subject.gpus()):
            run = run.beside(subject.wider_run(run))
            leaves = subject.leaves(run.recording)
            with uncollected():
                trace = report(
                    run,
                    show,
                    kinds=kinds_of(run),
                    environment=environment_of(subject),
                    layer=layer_of(subject),
                    leaves=leaves,
                )
            trace = with_whole_shapes(trace, run, subject.module)
            is_kept = bool(run.recording.values)
            notes = [*mask_notes(run, leaves)]
            for sentence in (_of_numbers(subject, before, run, is_kept), found_instead(run)):
                if sentence:
                    notes.append(sentence)
            if is_kept:
                trace = with_means(trace, run)
                notes += how_by_head(trace, subject)
            trace = replace(trace, unjudged="judging was not requested")
            if judge:
                trace = _judged(trace, subject, run, before, room)
    if not keep:
        run.recording.values.clear()
    absent = show.without_numbers(trace.environment.device)
    return replace(trace, notes=(*trace.notes, *notes, *absent, *subject.notes)), run


def _room_of(subject: Subject) -> int:
    """Return the bytes that the tensors of a run may take: as many as its parameters, and at least `ROOM`."""
    of_parameters = sum(parameter.nbytes for parameter in subject.module.parameters() if not is_lazy(parameter))
    free = free_memory()
    most = of_parameters if free is None else min(of_parameters, int(_SHARE_OF_FREE * free))
    return max(ROOM, most)


def _judged(trace: Trace, subject: Subject, run: Run, before: State, room: int) -> Trace:
    """Return the trace with what is wrong in its run, or why that is unknown."""
    if trace.environment.device == "meta":
        return replace(trace, unjudged="device meta has no numbers")
    from ..checks.check import judged

    if needs_ranks(subject.module, run.recording):
        return replace(trace, unjudged="the module is spread over ranks")
    if not all(tensor.numel() for _, tensor in tensors_in((subject.args, subject.kwargs))):
        return replace(trace, unjudged="an input has no elements")
    if not run.recording.values:
        reason = f"its tensors take more than {byte_size(room)}. mha-inspect check judges it"
        return replace(trace, unjudged=reason)
    notes = (*trace.notes, *_of_weights_without_numbers(run))
    judgement = judged(subject, run, before)
    return replace(trace, findings=judgement.findings, unjudged=None, notes=(*notes, *judgement.notes))


def _of_weights_without_numbers(run: Run) -> list[str]:
    """Return a sentence on attentions whose scores are too large to be kept until they are judged; none otherwise."""
    values = run.recording.values
    count = 0
    for attention, _ in run.attentions:
        weights = attention.stages.get("weights")
        count += weights is not None and weights.id not in values
    if not count:
        return []
    attentions = "1 attention" if count == 1 else f"{count} attentions"
    return [f"The weights of {attentions} are too large to be judged here. mha-inspect check judges them."]


def of_block(run: Run, failed: tuple[Failure, int] | None, called: Iterable[nn.Module]) -> Trace:
    """Return the trace of a recorded block of code, in which modules were `called`.

    `failed` is the failure that ended the block, and the number of complete attentions; None if it did not raise.
    """
    trace = report(
        run,
        Show(),
        environment=Environment(torch.__version__, "", "", None),
        layer=LayerInfo("recording", {}),
        kinds=kinds_of(run),
    )
    notes = (*trace.notes, *mask_notes(run, {}))
    trace = replace(trace, notes=notes, unjudged="a recorded block has no inputs to judge")
    trace = with_whole_shapes(trace, run, *called)
    if failed is None:
        return trace
    failure, complete = failed
    return replace(trace, attentions=trace.attentions[:complete], failure=failure)


def _of_numbers(subject: Subject, before: State, run: Run, keep: bool) -> str:
    """Return a sentence about queries with every key masked out, otherwise where NaN begins; it may run once more."""
    blind = _blind(run)
    if blind is None:
        return _nan_note(subject, before, run, keep)
    place, visible = blind
    again = _kept(subject, before, run, keep)
    if again is None:
        unknown = f"their weights are unknown, because {_no_second_run(subject, run)}"
        return masked_sentence(visible.blind, unknown, visible.blind_heads)
    again = again.beside(run.wider)
    attention, names = again.attentions[place]
    weights = content_of(again, attention, names, "weights")
    fate = fate_of(weights, visible.blind)
    return masked_sentence(visible.blind, f"their weights are {fate}", visible.blind_heads)


def _blind(run: Run) -> tuple[int, Visibility] | None:
    """Return the place and the visible keys of the first attention with queries that have every key masked out."""
    if all(sight.blind is None for sight in run.recording.sights.values()):
        return None
    for place, (attention, names) in enumerate(run.attentions):
        visible = visibility(run.graph, attention, names)
        if visible is not None and visible.blind:
            return place, visible
    return None


def _kept(subject: Subject, before: State, run: Run, keep: bool) -> Run | None:
    """Return the run with its tensors kept, run again if necessary; None if a second run is not possible."""
    if keep:
        return run
    if needs_ranks(subject.module, run.recording):
        return None
    try:
        with subject.replaying(before):
            return subject.recorded(keep=True)
    except Exception:  # a forward with state may raise anything in a second call
        return None


def _no_second_run(subject: Subject, run: Run) -> str:
    """Return why a module cannot run again."""
    if needs_ranks(subject.module, run.recording):
        return "a second run needs every rank"
    return "the module fails in a second run"


def _nan_note(subject: Subject, before: State, run: Run, keep: bool) -> str:
    """Return a sentence where the NaN of the output begins; empty without NaN."""
    if not _any_has_nan(tensor for _, tensor in tensors_in(run.returned)):
        return ""
    if _any_has_nan(tensor for _, tensor in tensors_in((subject.args, subject.kwargs))):
        return "The output has NaN, and so has the input."
    if _any_has_nan((*subject.module.parameters(), *subject.module.buffers())):
        return "The output has NaN, and so have parameters or buffers."
    again = _kept(subject, before, run, keep)
    if again is None:
        return f"The output has NaN. Its origin could not be determined, because {_no_second_run(subject, run)}."
    first = _first_with_nan(again)
    if first is None:
        return "The output has NaN. Its origin could not be determined."
    return f"The output has NaN: it first appears in {first}."


def _first_with_nan(run: Run) -> str | None:
    """Return the first result with NaN, and its line: `the stage scores (model.py:12)`; None if no kept one has NaN."""
    stages = _stages_by_tensor(run)
    values = run.recording.values
    for op in run.recording.ops:
        for tensor in op.outputs:
            if tensor.id not in values or not _has_nan(values[tensor.id]):
                continue
            result = stages.get(tensor.id, f"the result of {run.recording.name_of(op)}")
            return f"{result} ({op.source})" if op.source else result
    return None


def _stages_by_tensor(run: Run) -> dict[int, str]:
    """Return the words for each tensor that is a stage: `the stage scores of attention 2`, of the first such stage."""
    words: dict[int, str] = {}
    for number, (attention, _) in enumerate(run.attentions, 1):
        of_attention = f" of attention {number}" if len(run.attentions) > 1 else ""
        of_this: dict[int, str] = {}
        for stage, tensor in attention.stages.items():
            of_this[tensor.id] = f"the stage {stage}{of_attention}"
        words = {**of_this, **words}
    return words


def _any_has_nan(tensors: Iterable[torch.Tensor]) -> bool:
    return any(map(_has_nan, tensors))


def _has_nan(tensor: torch.Tensor) -> bool:
    tensor = local(tensor, filled=True)
    if not tensor.is_floating_point() or tensor.is_meta:
        return False
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return bool(torch.isnan(tensor).any())


def run_of(subject: Subject, show: Show, *, keep: bool, before: State, room: int | None = None) -> Run:
    """Run a subject from the state `before`, and return the run. Raises `ForwardError` where the forward raises."""
    run = run_and_record(subject.module, subject.args, subject.kwargs, keep=keep, room=room)
    if run.error is None:
        return run
    from ..failures.report import forward_error

    cause: Exception | None = run.error
    failure = forward_error(subject, run, show, before)
    try:
        raise failure from (None if failure is cause else cause)
    finally:
        # The error's traceback refers to this frame: a reference back to the error would keep its tensors.
        del run, cause, failure
