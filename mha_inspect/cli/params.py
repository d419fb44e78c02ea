"""`mha-inspect params`: every parameter, and which part of it belongs to which head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ExitCode, MhaInspectError, SpecError
from ..text import shown
from .collection import resume
from .help import GroupedCommand
from .options import Options, TargetArgument, option, shares_options

if TYPE_CHECKING:
    from ..reports.params import ParamsReport

app = typer.Typer(add_completion=False)

EPILOG = """Examples:

mha-inspect params --embed-dim 512 --num-heads 8 --per-head

mha-inspect params --embed-dim 512 --num-heads 1,2,4,8"""


@app.command(cls=GroupedCommand, epilog=EPILOG)
@shares_options
def params(
    options: Options,
    target: TargetArgument = None,
    per_head: Annotated[
        bool, option("--per-head", "Params", "Show the rows and columns of each head, found or proved by running it.")
    ] = False,
) -> ExitCode:
    """Show every parameter tensor: its name, shape, axes and count, and what it is for.

    With a list, as in --num-heads 1,2,4,8, it sets the head counts side by side.

    TARGET is a class, a function that returns a module, or a module of your own: its arguments come from --set and from
    the options under the names that it has for them. Importing it runs its code. Its forward is run once, on inputs as
    trace makes them: what each parameter is for, and which rows and columns belong to which head, is read off that run.

    TARGET may also be a checkpoint: a .safetensors, .pt, .pth or .bin file, an index of shards, or a folder of a model.
    Its headers are read and nothing is run: what the tensors are for is told by their names and shapes.
    """
    from ..checkpoints.checkpoint import is_checkpoint
    from . import subject

    is_file = target is not None and is_checkpoint(target)
    if is_file:
        _check_checkpoint(str(target), options)
    elif target is not None:
        subject.check_target(target, options, "params")
    else:
        options.require_no_target_settings("params")
        for count in subject.head_counts(options):
            subject.attention(options, count)
        subject.inputs(options)
    subject.show(options)
    from .answer import give, prepare

    export = prepare(options)

    if is_file:
        report = _of_checkpoint(str(target), options, per_head)
        give(report, options, export)
        return ExitCode.OK
    resume()
    report = _of_layer(options, per_head) if target is None else _of_target(target, options, per_head)
    give(report, options, export)
    return ExitCode.OK


_OF_CHECKPOINT = frozenset({"num_heads", "format", "export", "stats"})
"""Options that a checkpoint has a use for."""


def _check_checkpoint(text: str, options: Options) -> None:
    unused = sorted((options.typed & {*vars(Options)}) - _OF_CHECKPOINT)
    if unused:
        flag = {"settings": "set", "batch_first": "seq-first"}.get(unused[0], unused[0].replace("_", "-"))
        raise SpecError(f"{shown(text)} is a file of tensors, which --{flag} cannot change: drop it.")


def _of_checkpoint(text: str, options: Options, per_head: bool) -> ParamsReport:
    from ..answers.checkpoint import params_of_checkpoint
    from . import subject

    count = subject.single_head_count(options, "a checkpoint") if "num_heads" in options.typed else None
    return params_of_checkpoint(Path(text), num_heads=count, per_head=per_head, stats=options.stats)


def _of_layer(options: Options, per_head: bool) -> ParamsReport:
    from ..answers.params import params_spec
    from . import subject

    first, *more = subject.head_counts(options)
    return params_spec(
        subject.attention(options, first),
        subject.run(options),
        subject.show(options),
        layer=options.layer,
        per_head=per_head,
        num_heads=(first, *more) if more else (),
    )


def _of_target(text: str, options: Options, per_head: bool) -> ParamsReport:
    """Build the target, and report its parameters: what they are for is read off one call of it.

    Where its inputs cannot be made, or its forward raises, the report says why, and has no roles.

    Raises `MhaInspectError` where it cannot be built, or inputs were asked for that are of no use.
    """
    from torch.nn.parameter import is_lazy

    from ..answers.params import params
    from ..reports.common import LayerInfo
    from ..targets.call import explained
    from ..targets.load import subject_of
    from . import subject

    show, why = subject.show(options), ""
    with subject.running(options):
        target = subject.load_target(text, options)
        try:
            own = subject_of(target, subject.call_of(target, options), options.seed, options.grad)
            try:
                report = params(target.module, own=own, show=show, per_head=per_head)
            except Exception as error:
                raise explained(error, own) from error
        except MhaInspectError as error:
            if options.input_shape or options.input or any(map(is_lazy, target.module.parameters())):
                raise
            report = params(target.module, show=show, per_head=per_head)
            why = f"What they are for is read off a run, and there is none: {error}"
    for note in target.notes:
        subject.tell(note)
    return replace(
        report,
        environment=replace(report.environment, seed=options.seed),
        layer=LayerInfo(target.name, target.passed),
        notes=(*report.notes, *filter(None, [why])),
    )
