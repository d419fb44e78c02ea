"""A forward that raises, or a block of code: how far it came, what clashed, and why.

The mistakes that people make are each told by evidence and never by a name or a guess. To add one, name it in `CAUSES`,
and let the judge of the calls that it happens in return it: a `Cause` with what is wrong, in the real numbers, and what
to write instead. The judges are asked in order, and the first that answers is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ...errors import ForwardError, MhaInspectError, is_out_of_memory
from ...layers.spec import Show
from ...record.arguments import with_copies
from ...record.ops import Op, Recording, TensorRef
from ...record.recorder import Recorder
from ...reports.trace import Cause, FailedOperand, Failure, Proof, ReachedOp, ReachedStage
from ...running.run import Run, run_and_record
from ...running.state import State
from ...running.subject import Subject
from ...text import MESSAGE, message_of, shortened
from ..run_report import environment_of, layer_of, report
from .call import Call, CallWatch, Site, call_of_layer, dispatched, operands_of, site_of
from .of_products import einops_sizes, heads_not_transposed, keys_not_transposed, not_split, two_sizes, views
from .of_tensors import devices, dtypes, mask_dtype, masks_of_layers, masks_over_scores, sequences_of_layers, widths
from .reached import Reached, reach
from .scene import Scene, clash

CAUSES = (
    *("mixed_devices", "mask_dtype", "mixed_dtypes", "heads_not_joined", "weight_not_transposed", "features_not_last"),
    *("wrong_width", "batch_and_sequence_swapped", "batch_differs", "lengths_differ", "mask_rank"),
    *("heads_not_transposed", "mask_transposed", "mask_size", "heads_not_split", "key_not_transposed"),
    *("heads_not_repeated", "head_dim_differs", "not_contiguous", "heads_do_not_divide", "wrong_head_dim"),
)
"""Name of each cause."""
_JUDGES: tuple[Callable[[Scene], Cause | None], ...] = (
    *(devices, mask_dtype, dtypes, widths, sequences_of_layers, masks_of_layers, masks_over_scores, not_split),
    *(keys_not_transposed, heads_not_transposed, two_sizes, views, einops_sizes),
)
"""What judges a scene, in the order in which they are asked."""


def find_cause(scene: Scene) -> Cause | None:
    """Return the mistake that the evidence shows; None where it shows none."""
    return next(filter(None, (judge(scene) for judge in _JUDGES)), None)


_UNTOLD = "All that the call was given cannot be told without calling code of yours again."
LAST_OPS = 6
"""How many of the completed operations are told one by one."""


def forward_error(subject: Subject, failed: Run, show: Show, before: State) -> Exception:
    """Return what to raise for a run that raised: a `ForwardError` with the trace up to there.

    The error itself is given back where it is none of the forward's: the arguments did not fit its signature, memory
    ran out, or it was raised by this package on purpose.

    Args:
        subject: the module and its arguments.
        failed: the run that raised.
        show: what else the trace holds; tensors are never kept here.
        before: the state before that run: it is run once more from there, to see which call raised.
    """
    error, recorder = failed.error, failed.recorder
    assert error is not None
    assert recorder is not None
    try:
        if is_out_of_memory(error) or isinstance(error, MhaInspectError) or site_of(error) is None:
            return error
        failure, completed = _watched(subject, error, before) or describe_failure(error, failed.recording, recorder)
        ops = failed.recording.ops  # beside a function mode torch takes no fast path: these are those that really ran
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
    """Run it once more with every call of torch watched, and describe how that ended; None where it ends otherwise."""
    watch = CallWatch()
    with subject.replaying(before), watch:
        attempt = run_and_record(subject.module, *with_copies((subject.args, subject.kwargs)))
    if type(attempt.error) is not type(error) or attempt.recorder is None:
        return None
    assert attempt.error is not None
    try:
        return describe_failure(attempt.error, attempt.recording, attempt.recorder, watch=watch)
    finally:
        del attempt, error  # they hold tensors, and the error's traceback leads to this frame


def describe_failure(
    error: Exception,
    recording: Recording,
    recorder: Recorder,
    *,
    watch: CallWatch | None = None,
    in_block: bool = False,
) -> tuple[Failure, int]:
    """Return how a recorded run ended that raised, and how many attentions were completed before.

    Without a `watch` on the run the frames of the traceback alone tell the call.
    """
    site = site_of(error, in_block=in_block)
    assert site is not None
    try:
        call = call_of_layer(error, in_block=in_block) or (watch and watch.take(error)) or dispatched(error)
        failure, completed = _describe(error, Run(recording), site, recorder, call)
        note = _UNTOLD if call is None and watch is None and not site.raises else ""
        return replace(failure, note=note), completed
    finally:
        del site, call, error, watch  # they hold tensors, and the error's traceback leads to this frame


def _describe(error: Exception, run: Run, site: Site, recorder: Recorder, call: Call | None) -> tuple[Failure, int]:
    variables = {recorder.identify(value).id: name for name, value in reversed(site.variables)}
    operands = tuple(operands_of(call, site, recorder, run.recording, variables))
    reached = reach(run, call, () if call is None else operands)
    named = tuple(map(reached.named, operands, range(1, len(operands) + 1)))
    scene = Scene(type(error).__name__, _message(error), call, named, reached, variables)
    failure = Failure(
        error=scene.error,
        message=scene.message,
        call="" if call is None else call.name,
        op=_operation(error),
        module=recorder.path_of(site.module),
        source=site.source,
        line=site.line,
        operands=tuple(FailedOperand(o.name, o.role, o.shape, o.dtype, o.device, o.pattern) for o in named),
        clash="" if call is None else clash(scene),
        cause=find_cause(scene) if call is not None or scene.error == "EinopsError" else None,
        completed=tuple(_completed(reached, variables)),
        last_ops=_last_of(run.recording.ops),
        num_ops=len(run.recording.ops),
    )
    return failure, reached.completed


def _operation(error: BaseException) -> str:
    call = dispatched(error)
    return "" if call is None else call.name


def _last_of(ops: Sequence[Op]) -> tuple[ReachedOp, ...]:
    return tuple(
        ReachedOp(
            op.index, op.name, op.module, op.source, *(tuple(t.shape for t in ts) for ts in (op.inputs, op.outputs))
        )
        for op in ops[-LAST_OPS:]
    )


def _message(error: Exception) -> str:
    """Return the lines of a message that are about the failure, without the stack of C++."""
    lines = []
    for line in message_of(error).splitlines():
        if line.startswith(("Exception raised from", "C++ CapturedTraceback", "CUDA kernel errors might")):
            break
        if line.strip():
            lines.append(shortened(line.strip(), MESSAGE))
    return "\n".join(lines[:4])


def _completed(reached: Reached, variables: dict[int, str]) -> Iterable[ReachedStage]:
    """Yield the stages that were reached, then what else has a name: variables, and what projections gave."""
    graph, recording = reached.graph, reached.graph.recording
    given = [(named.name, named.tensor.id) for named in recording.inputs]
    inputs = {number: name for name, number in given}
    projected = {graph.after_call(op).id: op.module for op in recording.ops if graph.is_projection(op)}

    def row(stage: str, tensor: TensorRef, axes: str) -> ReachedStage:
        op = recording.producer(tensor)
        variable = variables.get(tensor.id) or inputs.get(tensor.id, "")
        if (stage, tensor.id) in given:
            variable = stage
        if not variable and (not stage or stage.endswith("_proj")):
            variable = projected.get(tensor.id, "")
        made = ("", "") if op is None else (op.name, op.source)
        return ReachedStage(stage, variable, tensor.shape, axes, tensor.dtype, *made)

    for stage, tensor in reached.stages.items():
        yield row(stage, tensor, reached.of_stage(stage))
    known = {tensor.id: tensor for tensor in (*recording.tensors(), *(named.tensor for named in recording.inputs))}
    told = {tensor.id for tensor in reached.stages.values()}
    loose = {*variables} if told else {*variables, *inputs, *projected}
    for number in sorted((loose & set(known)) - told - set(reached.roles)):
        yield row("", known[number], reached.of(known[number]))
