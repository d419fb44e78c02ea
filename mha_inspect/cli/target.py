"""A target on the command line: what it is built and called with, and what its own code does wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ExitCode, ForwardError, InputError, MhaInspectError, SpecError
from ..layers.registry import LAYERS
from ..text import shown
from . import specs
from .options import Options
from .target_argument import FORMS, is_target

if TYPE_CHECKING:
    from ..record.subject import Run
    from ..reports.params import ParamsReport
    from ..reports.trace import Trace
    from ..targets.call import Call
    from ..targets.inputs import Asked
    from ..targets.room import Room
    from ..targets.spec import Show
    from ..targets.target import Target


class TargetFailedError(MhaInspectError):
    """The target's own forward raised."""

    exit_code = ExitCode.CONDITION


def check_target(text: str, options: Options, command: str, *, beside_layer: bool = False) -> None:
    """Look at everything that can be judged before torch is imported; with `beside_layer` --layer names another side.

    Raises `MhaInspectError` when the text is no target, or options contradict it.
    """
    from ..targets.importing import split_target
    from ..targets.shapes import parse_shapes
    from ..targets.values import parse_settings

    if not is_target(text):
        way_out = f" The layer of this name: {command} --layer {text}." if text in LAYERS else ""
        raise SpecError(
            f"{shown(text)} is not a target: write {FORMS}. Sizes go by name, as in --embed-dim 512.{way_out}"
        )
    if not text.startswith("hf:"):
        split_target(text)
    if "layer" in options.typed and not beside_layer:
        raise SpecError(f"--layer {options.layer} and {shown(text)} are two layers: drop one of them.")
    specs.seed(options)
    parse_settings(options.settings or [])
    parse_shapes(options.input_shape or [])
    specs.flags(options)


def load(text: str, options: Options, own: Sequence[str] = (), sizes: Mapping[str, Any] | None = None) -> Target:
    """Build the target as the options say, and with settings of its own that come before those of --set.

    `sizes` stand in for those options that nobody has given.
    """
    from dataclasses import replace

    from ..targets.target import TargetSpec, load_target
    from ..targets.values import parse_settings

    flags = specs.flags(options)
    unsaid = {flag: value for flag, value in (sizes or {}).items() if flag not in flags.given}
    spec = TargetSpec(
        flags=replace(flags, values={**flags.values, **unsaid}),
        dtype=options.dtype if "dtype" in options.given else None,
        device=options.device,
        training=options.train,
        seed=options.seed,
    )
    return load_target(text, parse_settings([*(options.settings or []), *own]), spec)


def trace_target(text: str, options: Options, *, keep: bool = False) -> tuple[Trace, Run | None]:
    """Build the target, call it, and report what it did; where its forward raises, as far as it came.

    What it prints goes to stderr: stdout is for the answer. The run comes with it, its tensors kept when asked for;
    None where the forward raised.

    Raises:
        MhaInspectError: it cannot be built or called as asked.
        TargetFailedError: the call did not fit its forward.
    """
    from dataclasses import replace

    import torch

    from ..answers.trace import traced
    from ..reports.common import LayerInfo
    from ..targets.importing import stdout_for_the_answer
    from ..targets.room import Room
    from ..targets.target import seed_everything

    show = specs.show(options)
    keep = keep or show.stats or show.values
    run: Run | None = None
    with stdout_for_the_answer(), torch.set_grad_enabled(options.grad):
        target = load(text, options)
        call = call_of(target, options, Room(kept=keep, shapes_do=True))
        seed_everything(options.seed)
        hint = ""
        try:
            report, run = traced(call.of(target.module), show, keep=keep)
        except ForwardError as failed:
            report, hint = failed.trace, _ways(call)
        except Exception as error:
            raise explained(error, target, call) from error
    notes = (*target.notes, called(call), hint)
    told = replace(
        report,
        environment=replace(report.environment, seed=options.seed),
        layer=LayerInfo(target.name, target.passed),
        notes=(*report.notes, *filter(None, notes)),
    )
    return told, run


def called(call: Call) -> str:
    """What the forward was called with, in a sentence."""
    if not call.described:
        return ""
    were = "was" if len(call.drawn) == 1 else "were"
    drawn = f" {', '.join(call.drawn)} {were} {call.origin}." if call.drawn else ""
    return f"The forward was called with {call.described}.{drawn}"


def params_target(text: str, options: Options, *, per_head: bool, norms: bool = False) -> ParamsReport:
    """Build the target, and report its parameters: what they are for is read off one call of it.

    Where its inputs cannot be made, or its forward raises, the report says why, and has no roles. Raises as
    `trace_target`, and where inputs were asked for that are of no use.
    """
    from dataclasses import replace

    import torch
    from torch.nn.parameter import is_lazy

    from ..answers.params import params
    from ..reports.common import LayerInfo
    from ..targets.importing import stdout_for_the_answer

    show = specs.show(options)
    with stdout_for_the_answer(), torch.set_grad_enabled(options.grad):
        target = load(text, options)
        try:
            report, why = _params_of_call(target, options, show, per_head, norms), ""
        except MhaInspectError as error:
            if options.input_shape or options.input or any(map(is_lazy, target.module.parameters())):
                raise
            report = params(target.module, show=show, per_head=per_head, norms=norms)
            why = f"What they are for is read off a run, and there is none: {error}"
    for note in target.notes:
        tell(note)
    return replace(
        report,
        environment=replace(report.environment, seed=options.seed),
        layer=LayerInfo(target.name, target.passed),
        notes=(*report.notes, *filter(None, [why])),
    )


def _params_of_call(target: Target, options: Options, show: Show, per_head: bool, norms: bool) -> ParamsReport:
    """Raises `MhaInspectError` where it cannot be called, or its forward raises."""
    from ..answers.params import params
    from ..targets.target import seed_everything

    call = call_of(target, options)
    seed_everything(options.seed)
    try:
        return params(target.module, own=call.of(target.module), show=show, per_head=per_head, norms=norms)
    except Exception as error:
        raise explained(error, target, call) from error


def tell(note: str) -> None:
    """Say on stderr what was decided on somebody's behalf."""
    from .failure import say

    say(note)


def call_of(target: Target, options: Options, room: Room | None = None) -> Call:
    """The arguments of its forward; lazy parameters get their shapes from one call with them.

    Raises `InputError` where it has no forward, and `DoesNotFitError` where it is sure that its run does not fit into
    `room`.
    """
    import torch
    from torch import nn
    from torch.nn.parameter import is_lazy

    from ..targets.inputs import make_call

    if getattr(target.module.forward, "__func__", None) is nn.Module.forward:
        raise InputError(f"{target.name} has no forward, and its inside is seen in a call. Name a module that has one.")
    if room is not None:
        room.require(target, asked(options))
    call = make_call(target, asked(options))
    if any(map(is_lazy, target.module.parameters())):
        torch.manual_seed(options.seed)
        try:
            with torch.no_grad():
                target.module(*call.args, **call.kwargs)
        except Exception as error:
            raise explained(error, target, call) from error
    return call


def try_once(target: Target, call: Call, options: Options, how: str = "") -> None:
    """Run its forward once, and leave no trace of that: what it does wrong is told with the line that did it.

    Raises `TargetFailedError`; `how` says how the target was built.
    """
    import torch

    from ..record.subject import Subject

    own = Subject(target.module, call.args, call.kwargs)
    with torch.no_grad(), own.replaying(own.state()):
        torch.manual_seed(options.seed)
        try:
            target.module(*call.args, **call.kwargs)
        except Exception as error:
            raise explained(error, target, call, how) from error


def asked(options: Options) -> Asked:
    """What the options say of the inputs."""
    from ..targets.inputs import Asked
    from ..targets.shapes import parse_shapes

    return Asked(specs.inputs(options), specs.flags(options), parse_shapes(options.input_shape or []), options.seed)


def explained(error: Exception, target: Target, call: Call, how: str = "") -> BaseException:
    """What to raise for an exception of the target's forward; any other is a fault of ours and stays as it is."""
    from ..targets.importing import in_one_line
    from ..targets.memory import is_out_of_memory

    if isinstance(error, MhaInspectError) or is_out_of_memory(error) or not _in_forward(error):
        return error
    ways = _ways(call)
    hint = f" {ways}" if ways else ""
    return TargetFailedError(
        f"{target.name}{how} failed on {call.described or 'a call without tensors'}: {in_one_line(error)}.{hint}"
    )


def _ways(call: Call) -> str:
    """How to call it with other inputs than those that were drawn."""
    ways = [f"--input-shape {name}={_shape(call, name)}" for name in call.guessed]
    return f"If that is not what it takes: {' '.join(ways)}, or --set." if ways else ""


def _shape(call: Call, name: str) -> str:
    tensor: Any = call.kwargs.get(name, call.args[0] if call.args else None)
    sizes = "x".join(map(str, tensor.shape))
    return f"{sizes}:{str(tensor.dtype).removeprefix('torch.')}"


def _in_forward(error: BaseException) -> bool:
    """Whether an exception came out of a module's forward, and not out of the program around it."""
    from torch import nn

    code = nn.Module._call_impl.__code__
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code is code:
            return True
        step = step.tb_next
    return False
