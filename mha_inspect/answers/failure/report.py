"""A forward that raises, or a block of code: how far it came, what clashed, and why.

The mistakes that people make are each told by evidence and never by a name or a guess. To add one, name it in `CAUSES`,
and let the judge of the calls that it happens in return it: a `Cause` with what is wrong, in the real numbers, and what
to write instead. The judges are asked in order, and the first that answers is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from ...errors import ForwardError, MhaInspectError, is_out_of_memory
from ...layers.spec import Show
from ...naming.canonical import own_axes
from ...naming.subject import Run, Subject
from ...record.ops import Recording, TensorRef
from ...record.recorder import Recorder
from ...reports.failure import Cause, FailedOperand, Failure, ReachedOp, ReachedStage
from ...reports.trace import Proof
from ...text import MESSAGE, message_of, shortened
from ..run_report import environment_of, layer_of, report
from .call import dispatched, operands_of, read_call
from .of_products import einops_sizes, heads_not_transposed, keys_not_transposed, not_split, two_sizes, views
from .of_tensors import devices, dtypes, mask_dtype, masks_of_layers, masks_over_scores, sequences_of_layers, widths
from .reached import Reached, reach
from .scene import Scene, clash
from .site import Site, site_of

CAUSES: dict[str, str] = {
    "mixed_devices": "tensors of several devices in one call",
    "mask_dtype": "a mask of integers",
    "mixed_dtypes": "tensors of several dtypes in one call",
    "heads_not_joined": "heads not put side by side behind the sequence",
    "weight_not_transposed": "a weight matrix that is the wrong way round",
    "features_not_last": "features in another dimension than the last",
    "wrong_width": "a width that the layer does not take",
    "batch_and_sequence_swapped": "sequence first where batch first is expected, or the other way round",
    "batch_differs": "queries and keys of different batch sizes",
    "lengths_differ": "as many values as keys are needed, and there are not",
    "mask_rank": "a mask that lacks a dimension",
    "heads_not_transposed": "divided into heads, and left behind the sequence",
    "mask_transposed": "a mask with queries and keys swapped",
    "mask_size": "a mask of other lengths",
    "heads_not_split": "one operand is divided into heads and the other is not",
    "key_not_transposed": "the keys' features and positions are not swapped for the product",
    "heads_not_repeated": "fewer key heads than query heads, not repeated",
    "head_dim_differs": "queries and keys with heads of different widths",
    "not_contiguous": "a view of what a transpose has left scattered in memory",
    "heads_do_not_divide": "a width that the heads do not divide",
    "wrong_head_dim": "heads times head_dim is not the width",
}
"""Name of each cause, and what it is in a phrase."""
_JUDGES: tuple[Callable[[Scene], Cause | None], ...] = (
    *(devices, mask_dtype, dtypes, widths, sequences_of_layers, masks_of_layers, masks_over_scores, not_split),
    *(keys_not_transposed, heads_not_transposed, two_sizes, views, einops_sizes),
)
"""What judges a scene, in the order in which they are asked."""


def find_cause(scene: Scene) -> Cause | None:
    """Return the mistake that the evidence shows; None where it shows none."""
    return next(filter(None, (judge(scene) for judge in _JUDGES)), None)


LAST_OPS = 6
"""How many of the completed operations are told one by one."""


def forward_error(own: Subject, seen: Run, show: Show) -> Exception:
    """Return what to raise for a run that raised: a `ForwardError` with the trace up to there.

    The error itself is given back where it is none of the forward's: the arguments did not fit its signature, memory
    ran out, or it was raised by this package on purpose.

    Args:
        own: the module and its arguments.
        seen: the run that raised.
        show: what else the trace holds; tensors are never kept here.
    """
    error, recorder = seen.error, seen.recorder
    assert error is not None
    assert recorder is not None
    try:
        if is_out_of_memory(error) or isinstance(error, MhaInspectError) or site_of(error) is None:
            return error
        failure, completed = describe_failure(error, seen.recording, recorder)
    finally:
        del error  # its traceback leads to this frame
    trace = report(
        seen,
        own_axes(seen),
        replace(show, stats=False, values=False),
        environment=environment_of(own),
        layer=layer_of(own),
        proof=Proof(None, None, None, "the forward did not return"),
    )
    first = next(iter(failure.message.splitlines()), "")
    what = f"the forward of {trace.layer.name} failed at {failure.source}: {failure.error}: {first}"
    return ForwardError(
        what if failure.cause is None else f"{what.rstrip('.')}. {failure.cause.explanation}",
        replace(trace, attentions=trace.attentions[:completed], failure=failure),
    )


def describe_failure(
    error: Exception, recording: Recording, recorder: Recorder, *, in_block: bool = False
) -> tuple[Failure, int]:
    """Return how a recorded run ended that raised, and how many attentions were completed before."""
    site = site_of(error, in_block=in_block)
    assert site is not None
    try:
        return _describe(error, Run(recording, None), site, recorder, in_block=in_block)
    finally:
        del site, error  # they hold tensors, and the error's traceback leads to this frame


def _describe(error: Exception, seen: Run, site: Site, recorder: Recorder, *, in_block: bool) -> tuple[Failure, int]:
    reading = read_call(error, recorder, seen.recording, in_block=in_block)
    call, base = reading.call, "" if reading.call is None else reading.call.base
    operands = tuple(operands_of(site, reading, recorder.identify, seen.recording))
    batch_first = bool(getattr(reading.layer, "batch_first", True))
    reached = reach(seen, base, () if call is None else operands, batch_first=batch_first)
    scene = Scene(
        error=type(error).__name__,
        message=_message(error),
        base=base,
        operands=tuple(map(reached.named, operands)),
        reached=reached,
        batch_first=batch_first,
        settings=() if call is None else call.settings,
        layer=reading.layer,
        variables={recorder.identify(value).id: name for name, value in reversed(site.variables)},
    )
    failure = Failure(
        error=scene.error,
        message=scene.message,
        call="" if call is None else call.name,
        op=dispatched(error),
        module=recorder.path_of(site.module),
        source=site.source,
        line=site.line,
        operands=tuple(FailedOperand(o.name, o.role, o.shape, o.dtype, o.device, o.pattern) for o in scene.operands),
        clash="" if call is None else clash(scene),
        cause=find_cause(scene) if call is not None or scene.error == "EinopsError" else None,
        completed=tuple(_completed(scene.reached, scene.variables)),
        last_ops=tuple(
            ReachedOp(
                o.index, o.name, o.module, o.source, *(tuple(t.shape for t in ts) for ts in (o.inputs, o.outputs))
            )
            for o in seen.recording.ops[-LAST_OPS:]
        ),
        num_ops=len(seen.recording.ops),
        note="" if reading.told else "All that the call was given cannot be told without calling code of yours again.",
    )
    return failure, scene.reached.completed


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
