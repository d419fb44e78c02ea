"""Report a forward or a block of code that raises: how far it came, what clashed, and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import ForwardError, MhaInspectError, is_out_of_memory
from ..layers.spec import Show
from ..measure.run_report import environment_of, layer_of, report
from ..record.arguments import with_copies
from ..record.ops import Op, Recording, TensorRef
from ..record.ranks import needs_ranks
from ..record.recorder import Recorder
from ..reports.trace import FailedOperand, Failure, Proof, ReachedOp, ReachedStage
from ..running.subject import Run, State, Subject, run_and_record
from ..text import MESSAGE, message_of, shortened
from .call import CallWatch, call_of_layer, dispatched, method_of, site_of
from .causes import NO_GUESSES, Guesses, find_cause
from .clash import clash
from .facts import Facts, facts_of

_NO_RERUN = "Some arguments of the call are unknown: finding them needs another run of your code."
LAST_OPS = 6
"""The number of completed operations to list."""


def forward_error(subject: Subject, failed: Run, show: Show, before: State) -> Exception:
    """Return the error to raise for a run that raised: a `ForwardError` with the trace up to that point.

    The original error is returned if the forward is not to blame: the arguments did not fit its signature, memory ran
    out, or this package raised it.

    `show` is what else the trace includes; tensors are never kept here. `before` is the state before that run; the
    module runs once more from it, to see which call raised.
    """
    error, recorder = failed.error, failed.recorder
    assert error is not None
    assert recorder is not None
    try:
        if is_out_of_memory(error) or isinstance(error, MhaInspectError) or site_of(error) is None:
            return error
        alone = not needs_ranks(subject.module, failed.recording)
        watched = _watched(subject, error, before) if alone else None
        guesses = Guesses(subject.guessed, subject.drawn_width)
        failure, completed = watched or describe_failure(error, failed.recording, recorder, guesses=guesses)
        ops = failed.recording.ops  # under a function mode torch skips its fast path, so the first recording is kept
        failure = replace(failure, op=_operation(error), last_ops=_last_of(ops), num_ops=len(ops))
    finally:
        del error  # its traceback leads to this frame
    trace = report(
        failed,
        replace(show, stats=False, values=False),
        environment=environment_of(subject),
        layer=layer_of(subject),
        proof=Proof(None, None, None, "the forward did not return"),
    )
    first = next(iter(failure.message.splitlines()), "")
    what = f"the forward of {trace.layer.name} failed at {failure.source}: {failure.error}: {first}"
    return ForwardError(
        what if failure.cause is None else f"{what.rstrip('.')}. {failure.cause.explanation}",
        replace(trace, attentions=trace.attentions[:completed], failure=failure),
    )


def _watched(subject: Subject, error: Exception, before: State) -> tuple[Failure, int] | None:
    """Run the subject again, watch every torch call, and describe the failure; None if it ends differently."""
    watch = CallWatch()
    with subject.replaying(before), watch:
        attempt = run_and_record(subject.module, *with_copies((subject.args, subject.kwargs)))
    if type(attempt.error) is not type(error) or attempt.recorder is None:
        return None
    assert attempt.error is not None
    try:
        guesses = Guesses(subject.guessed, subject.drawn_width)
        return describe_failure(attempt.error, attempt.recording, attempt.recorder, watch=watch, guesses=guesses)
    finally:
        del attempt, error  # they reference tensors, and the error's traceback leads to this frame


def describe_failure(
    error: Exception,
    recording: Recording,
    recorder: Recorder,
    *,
    watch: CallWatch | None = None,
    in_block: bool = False,
    guesses: Guesses = NO_GUESSES,
) -> tuple[Failure, int]:
    """Return the failure of a recorded run, and the number of attentions completed before it.

    Without a `watch` on the run, the call is found from the frames of the traceback.
    """
    site = site_of(error, in_block=in_block)
    assert site is not None
    facts: Facts | None = None
    try:
        call = call_of_layer(error, in_block=in_block) or (watch and watch.take(error))
        call = call or dispatched(error) or method_of(error)
        facts = facts_of(type(error).__name__, _message(error), Run(recording, as_recorded=True), site, recorder, call)
        failure = Failure(
            error=facts.error,
            message=facts.message,
            call=facts.call.name,
            op=_operation(error),
            module=recorder.path_of(site.module),
            source=site.source,
            line=site.line,
            operands=tuple(FailedOperand(o.name, o.role, o.shape, o.dtype, o.device, o.axes) for o in facts.operands),
            clash=site.asserted if call is None else clash(facts),
            cause=find_cause(facts, guesses),
            completed=tuple(_completed(facts)),
            last_ops=_last_of(recording.ops),
            num_ops=len(recording.ops),
            note=_NO_RERUN if call is None and watch is None and not site.raises else "",
        )
        return failure, facts.reached.completed
    finally:
        facts = call = None  # these reference tensors, and the error's traceback leads to this frame
        del site, error, watch


def _operation(error: BaseException) -> str:
    call = dispatched(error)
    return "" if call is None else call.name


def _last_of(ops: Sequence[Op]) -> tuple[ReachedOp, ...]:
    return tuple(
        ReachedOp(
            op.index,
            op.name,
            op.module,
            op.source,
            tuple(tensor.shape for tensor in op.inputs),
            tuple(tensor.shape for tensor in op.outputs),
        )
        for op in ops[-LAST_OPS:]
    )


def _message(error: Exception) -> str:
    """Return the lines of a message about the failure, without the C++ stack."""
    lines = []
    for line in message_of(error).splitlines():
        if line.startswith(("Exception raised from", "C++ CapturedTraceback", "CUDA kernel errors might")):
            break
        if line.strip():
            lines.append(shortened(line.strip(), MESSAGE))
    return "\n".join(lines[:4])


def _completed(facts: Facts) -> Iterator[ReachedStage]:
    """Yield the completed stages, then other named tensors: variables and projection outputs."""
    recording, stages = facts.reached.graph.recording, facts.reached.stages
    names = _Names.of(facts)
    for stage, tensor in stages.items():
        yield _row(recording, tensor, facts.reached.of_stage(stage), stage, names.of_stage(stage, tensor))
    tensors: dict[int, TensorRef] = {}
    for op in recording.ops:
        tensors.update((tensor.id, tensor) for tensor in op.outputs)
    tensors.update((named.tensor.id, named.tensor) for named in recording.inputs)
    # Without stages, inputs and projections show how far the forward came.
    named_ids = {*names.variables} if stages else {*names.variables, *names.inputs, *names.projections}
    listed = {tensor.id for tensor in stages.values()}
    for number in sorted(named_ids.intersection(tensors) - listed - set(facts.reached.roles)):
        tensor = tensors[number]
        yield _row(recording, tensor, facts.reached.of(tensor), "", names.of_tensor(tensor))


def _row(recording: Recording, tensor: TensorRef, axes: str, stage: str, variable: str) -> ReachedStage:
    op = recording.producer(tensor)
    return ReachedStage(
        stage,
        variable,
        tensor.shape,
        axes,
        tensor.dtype,
        "" if op is None else op.name,
        "" if op is None else op.source,
    )


@dataclass(frozen=True)
class _Names:
    """The names of tensors by their id."""

    variables: Mapping[int, str]
    arguments: Collection[tuple[str, int]]
    """The name and the tensor of each input; one tensor may be several of them."""
    inputs: Mapping[int, str]
    projections: Mapping[int, str]
    """The output of a projection to its module."""

    @classmethod
    def of(cls, facts: Facts) -> _Names:
        """Return the names in a run that failed."""
        graph = facts.reached.graph
        arguments = [(named.name, named.tensor.id) for named in graph.recording.inputs]
        return cls(
            facts.variables,
            arguments,
            {number: name for name, number in arguments},
            {graph.after_call(op).id: op.module for op in graph.recording.ops if graph.is_projection(op)},
        )

    def of_tensor(self, tensor: TensorRef) -> str:
        """Return the variable of a tensor, else the input that it is, or the module that made it; else empty."""
        name = self.variables.get(tensor.id) or self.inputs.get(tensor.id)
        return name or self.projections.get(tensor.id, "")

    def of_stage(self, stage: str, tensor: TensorRef) -> str:
        """Return the argument that is called as the stage, else the name; the module only for a projection."""
        if (stage, tensor.id) in self.arguments:
            return stage
        if stage.endswith("_proj"):
            return self.of_tensor(tensor)
        return self.variables.get(tensor.id) or self.inputs.get(tensor.id, "")
