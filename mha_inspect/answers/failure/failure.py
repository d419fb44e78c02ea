"""A forward that raises, or a block of code: how far it came, what clashed, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from ...errors import ForwardError
from ...naming.canonical import own_axes
from ...record.kernels import is_fused
from ...record.ops import Recording, TensorRef
from ...record.run import Attempt, AttemptRecorder, record_until_failure
from ...record.subject import Run, State, Subject
from ...reports.failure import FailedOperand, Failure, ReachedOp, ReachedStage
from ...reports.trace import Proof, Trace
from ...targets.spec import Show
from ..trace import environment_of, layer_of, report
from .axes import Side, pattern
from .called import Reading, dispatched, read_call
from .causes import find_cause
from .evidence import Argument, Evidence, arguments_of
from .scene import Given, Scene, clash
from .site import site_of
from .stages import Failing, Reached, reach
from .witness import Witness

LAST_OPS = 6
"""How many of the completed operations are told one by one."""

_LAYERS = {"multi_head_attention": "MultiheadAttention", "transformer": "Transformer"}

_SIDES: dict[str, Side] = {"q": "query", "k": "key", "v": "key"}


def forward_error(own: Subject, before: State, attempt: Attempt, show: Show) -> Exception:
    """What to raise for a run that raised: a `ForwardError` with the trace up to there.

    The error itself is given back where it is none of the forward's: the arguments did not fit its signature, memory
    ran out, or it was raised by this package on purpose.
    """
    error = attempt.error
    assert error is not None
    if is_not_the_forwards(error):
        return error
    trace = trace_failure(own, before, attempt, show)
    failure = trace.failure
    assert failure is not None
    why = f" {failure.cause.explanation}" if failure.cause is not None else ""
    first = failure.message.splitlines()[0] if failure.message else ""
    return ForwardError(
        f"the forward of {trace.layer.name} failed at {failure.source}: {failure.error}: {first}{why}", trace
    )


def is_not_the_forwards(error: Exception) -> bool:
    """Whether an error is no answer to what is wrong with a forward."""
    from ...errors import MhaInspectError
    from ...targets.memory import is_out_of_memory

    return is_out_of_memory(error) or isinstance(error, MhaInspectError) or not site_of(error).entered


def trace_failure(own: Subject, before: State, attempt: Attempt, show: Show) -> Trace:
    """Report a run that raised.

    What the call that raised was given is read off the traceback. Where that does not tell it, or a fused kernel raised
    it, the module is run once more, from the state before that run, with the calls of torch watched. Where that run
    does not end on the same line with the same kind of error, what is reported is the first one's alone.

    Args:
        own: the module and its arguments.
        before: generators and buffers as they were before the run.
        attempt: the run that raised.
        show: what else the report holds; tensors are never kept here.
    """
    error = attempt.error
    assert error is not None
    reading = read_call(error, attempt.recorder, attempt.recording.ops)
    seen = Run(attempt.recording, None)
    try:
        if reading.told and not is_fused(dispatched(error)):
            failure, reached = _examine(error, seen, Evidence(error, reading, attempt.recorder))
        else:
            seen, failure, reached = _run_again(own, before, attempt, error)
    finally:
        # Each of these leads to a traceback, and a traceback to this frame.
        del reading, error
    trace = report(
        seen,
        own_axes(seen),
        replace(show, stats=False, values=False),
        environment=environment_of(own),
        layer=layer_of(own),
        proof=Proof(None, None, None, "the forward did not return"),
    )
    return replace(trace, attentions=trace.attentions[: len(reached.others)], failure=failure)


def block_failure(error: Exception, recording: Recording, recorder: AttemptRecorder) -> tuple[Failure, int]:
    """How a recorded block of code ended that raised, and how many attentions were completed before.

    A block cannot be run again: what the traceback does not tell is not told.
    """
    reading = read_call(error, recorder, recording.ops, in_block=True)
    evidence = Evidence(error, reading, recorder, in_block=True)
    try:
        failure, reached = _examine(error, Run(recording, None), evidence)
        if not reading.told:
            failure = replace(failure, note="What the call was given cannot be told without running it once more.")
        return failure, len(reached.others)
    finally:
        del reading, evidence, error


def _run_again(own: Subject, before: State, attempt: Attempt, error: Exception) -> tuple[Run, Failure, Reached]:
    witness = Witness()
    with own.replaying(before):
        again = record_until_failure(own.module, own.args, own.kwargs, watching=witness)
    try:
        call = witness.took(again.error) if again.error is not None else None
        repeated = again.error is not None and type(again.error) is type(error)
        if repeated and again.error is not None and site_of(again.error).source == site_of(error).source:
            seen = Run(again.recording, None)
            failure, reached = _examine(error, seen, Evidence(again.error, Reading(call, told=True), again.recorder))
        else:
            seen = Run(attempt.recording, None)
            failure, reached = _examine(error, seen, Evidence(error, Reading(None, told=False), None))
            note = "Run once more, it did not fail in the same way: what the call was given is not known."
            failure = replace(failure, note=note)
        return seen, failure, reached
    finally:
        del again, witness, error


def _examine(error: Exception, seen: Run, evidence: Evidence) -> tuple[Failure, Reached]:
    call, site = evidence.call, evidence.site
    arguments = list(arguments_of(evidence, seen.recording)) if evidence.known else []
    layer = site.attention.module if site.attention is not None else None
    asserted = call is None and site.attention is None
    base = "" if call is None else call.name.rpartition(".")[2].strip("_")
    if layer is not None:
        base = "multi_head_attention" if isinstance(layer, nn.MultiheadAttention) else "transformer"
    failing = None
    if not asserted:
        failing = Failing(
            base,
            tuple((a.role, a.tensor) for a in arguments),
            frozenset(a.tensor.id for a in arguments if isinstance(a.value, nn.Parameter)),
            batch_first=bool(getattr(layer, "batch_first", True)),
            activations=tuple(a.tensor for a in arguments if _is_activation(base, a)),
        )
    reached = reach(seen, failing)
    variables: dict[int, str] = {}
    for name, value in site.variables:
        variables.setdefault(evidence.identify(value).id, name)
    scene = Scene(
        error=type(error).__name__,
        message=_message(error),
        call=f"nn.{_LAYERS[base]}" if layer is not None else "" if call is None else call.name,
        base=base,
        operands=tuple(_given(a, reached) for a in arguments),
        reached=reached,
        variables=variables,
        settings=() if call is None else tuple(arg for arg in call.args if not isinstance(arg, torch.Tensor)),
        num_heads=layer.num_heads if isinstance(layer, nn.MultiheadAttention) else 0,
        widths=_widths(layer) if isinstance(layer, nn.MultiheadAttention) else {},
        batch_first=bool(getattr(layer, "batch_first", True)),
    )
    failure = Failure(
        error=scene.error,
        message=scene.message,
        call=scene.call,
        op=evidence.op,
        module=evidence.module,
        source=site.source,
        line=site.line,
        operands=tuple(FailedOperand(o.name, o.role, o.shape, o.dtype, o.device, o.pattern) for o in scene.operands),
        clash="" if asserted else clash(scene),
        cause=find_cause(scene) if not asserted or scene.error == "EinopsError" else None,
        completed=tuple(_completed(reached, variables)),
        last_ops=tuple(_last(seen.recording)),
        num_ops=len(seen.recording.ops),
    )
    return failure, reached


def _is_activation(base: str, argument: Argument) -> bool:
    """Whether this is what a layer takes in: batch, sequence, features."""
    if base in _LAYERS:
        return argument.role in ("query", "key", "value", "src", "tgt")
    return base == "linear" and argument.role == "input" and argument.value.is_floating_point()


def _widths(module: nn.MultiheadAttention) -> dict[str, int]:
    return {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}


def _message(error: Exception) -> str:
    """The lines of a message that are about the failure, without the stack of C++."""
    lines = []
    for line in str(error).splitlines():
        if line.startswith(("Exception raised from", "C++ CapturedTraceback", "CUDA kernel errors might")):
            break
        if line.strip():
            lines.append(line.strip())
    return "\n".join(lines[:4])


def _given(argument: Argument, reached: Reached) -> Given:
    graph, tensor = reached.graph, argument.tensor
    return Given(
        name=argument.name,
        role=argument.role,
        tensor=tensor,
        device=str(argument.value.device),
        axes=reached.of(tensor),
        part=reached.roles.get(tensor.id, ""),
        is_parameter=isinstance(argument.value, nn.Parameter),
        is_contiguous=argument.value.is_contiguous(),
        is_floating=argument.value.is_floating_point(),
        from_scores=_carries_scores(reached, tensor),
        from_parameters=any(graph.is_weight(behind) for behind in reached.behind(tensor)),
    )


def _carries_scores(reached: Reached, tensor: TensorRef) -> bool:
    """Whether this is the scores, scaled or masked at most: not the context, which is a product as well."""
    graph = reached.graph
    for step in graph.back(tensor, graph.carries):
        op = graph.recording.producer(step.tensor)
        product = None if op is None else graph.product(op)
        if product is None:
            continue
        steps = (step for factor in (product.left, product.right) for step in graph.back(factor, graph.carries))
        behind = (graph.recording.producer(step.tensor) for step in steps)
        return not any(earlier is not None and graph.is_softmax(earlier) for earlier in behind)
    return False


def _completed(reached: Reached, variables: dict[int, str]) -> Iterable[ReachedStage]:
    """The stages that were reached; then what else has a name: the user's variables, and what projections gave."""
    recording = reached.graph.recording
    inputs = {named.tensor.id: named.name for named in recording.inputs}

    def row(name: str, tensor: TensorRef, axes: str) -> ReachedStage:
        op = recording.producer(tensor)
        variable = variables.get(tensor.id) or inputs.get(tensor.id, "")
        if any(named.name == name and named.tensor.id == tensor.id for named in recording.inputs):
            variable = name
        if not variable and name.endswith("_proj") and op is not None:
            variable = op.module
        return ReachedStage(
            name,
            variable,
            tensor.shape,
            axes,
            tensor.dtype,
            "" if op is None else op.name,
            "" if op is None else op.source,
        )

    for name, tensor in reached.stages.items():
        if reached.names is not None:
            yield row(name, tensor, reached.names.of_stage(name))
        else:
            side = _SIDES.get(name[0] if name in ("query", "key", "value") or name[1] == "_" else "", "scores")
            yield row(name, tensor, pattern(reached.axes.of(tensor, side)))
    known = {tensor.id: tensor for op in recording.ops for tensor in op.outputs}
    known.update({named.tensor.id: named.tensor for named in recording.inputs})
    graph = reached.graph
    projected = {graph.after_call(op).id: op.module for op in recording.ops if graph.is_projection(op)}
    told = {tensor.id for tensor in reached.stages.values()}
    loose = {*variables} if told else {*variables, *inputs, *projected}
    for number in sorted((loose & set(known)) - told - set(reached.roles)):
        made = row("", known[number], pattern(reached.of(known[number])))
        yield made if made.variable else replace(made, variable=projected[number])


def _last(recording: Recording) -> Iterable[ReachedOp]:
    for op in recording.ops[-LAST_OPS:]:
        yield ReachedOp(
            op.index,
            op.name,
            op.module,
            op.source,
            tuple(t.shape for t in op.inputs),
            tuple(t.shape for t in op.outputs),
        )
