"""`mha-inspect params`: every parameter, and which part of it belongs to which head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ExitCode, MhaInspectError, SpecError
from ..text import shown
from .collection import resume
from .help import GroupedCommand
from .options import Options, TargetArgument, option, shares_options
from .picture import Drawn, is_wanted, require_drawable

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
    picture: Annotated[
        bool, option("--picture", "Params", "Draw how large each head's part of W_q, W_k, W_v and W_o is.", envvar="")
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
    heads = () if is_file else subject.head_counts(options)
    if is_file:
        _check_checkpoint(str(target), options)
    elif target is not None:
        subject.check_target(target, options, "params", many_heads=True)
        if len(heads) > 1:
            subject.require_open_head_count(options, heads, "--num-heads gives the counts.")
    else:
        options.require_no_target_settings("params")
        for count in heads:
            subject.attention(options, count)
        subject.inputs(options)
    subject.show(options)
    from .answer import give, prepare

    picture = is_wanted(picture)
    if picture:
        require_drawable(options, in_json=True)
    export = prepare(options, draws=picture)

    if is_file:
        report = _of_checkpoint(str(target), options, per_head, picture)
        give(report, options, export, _drawn(report))
        return ExitCode.OK
    resume()
    asked: dict[str, Any] = {"show": subject.show(options), "per_head": per_head, "norms": picture}
    report = _of_layer(options, heads, asked) if target is None else _of_target(target, options, heads, asked)
    give(report, options, export, _drawn(report))
    return ExitCode.OK


def _drawn(report: ParamsReport) -> Drawn | None:
    """Return the picture of a report that has norms."""
    if report.head_norms is None:
        return None
    from ..pictures.heads import norms_picture

    return Drawn((norms_picture(report.head_norms),), printed=True)


_OF_CHECKPOINT = frozenset({"num_heads", "format", "export", "stats"})
"""Options that a checkpoint has a use for."""


def _check_checkpoint(text: str, options: Options) -> None:
    unused = sorted((options.typed & {*vars(Options)}) - _OF_CHECKPOINT)
    if unused:
        flag = {"settings": "set", "batch_first": "seq-first"}.get(unused[0], unused[0].replace("_", "-"))
        raise SpecError(f"{shown(text)} is a file of tensors, which --{flag} cannot change: drop it.")


def _of_checkpoint(text: str, options: Options, per_head: bool, picture: bool) -> ParamsReport:
    from ..answers.checkpoint import params_of_checkpoint
    from . import subject

    count = subject.single_head_count(options, "a checkpoint") if "num_heads" in options.typed else None
    return params_of_checkpoint(Path(text), num_heads=count, per_head=per_head, stats=options.stats, norms=picture)


def _of_layer(options: Options, heads: Sequence[int], asked: dict[str, Any]) -> ParamsReport:
    from ..answers.params import layers_for_params, params
    from . import subject

    spec, run = subject.attention(options, heads[0]), subject.run(options)
    first, *others = layers_for_params(spec, run, options.layer, num_heads=heads, per_head=asked["per_head"])
    return params(first, beside=others, **asked)


def _of_target(text: str, options: Options, heads: Sequence[int], asked: dict[str, Any]) -> ParamsReport:
    """Build the target, and report its parameters: what they are for is read off one call of it.

    Where its inputs cannot be made, or its forward raises, the report of one head count says why, and has no roles.

    Raises `MhaInspectError` where it cannot be built, or inputs were asked for that are of no use.
    """
    from torch.nn.parameter import is_lazy

    from ..answers.params import params
    from ..record.subject import Subject
    from ..targets.call import explained
    from ..targets.load import subject_of
    from . import subject

    many, why = len(heads) > 1, ""
    with subject.running(options):
        each = [subject.with_heads(options, count) for count in heads] if many else [options]
        targets = [subject.load_target(text, one) for one in each]
        first = targets[0]
        if many:
            subject.require_head_count(first, "params")
        try:
            calls = zip(targets, map(subject.call_of, targets, each), strict=True)
            made = [subject_of(target, call, options.seed, options.grad) for target, call in calls]
            try:
                report = params(made[0], beside=made[1:], **asked)
            except Exception as error:
                raise explained(error, made[0]) from error
        except MhaInspectError as error:
            if many or options.input_shape or options.input or any(map(is_lazy, first.module.parameters())):
                raise
            own = Subject(first.module, (), {}, label=first.name, made_with=first.passed, seed=options.seed)
            report = params(own, called=False, **asked)
            why = f"What they are for is read off a run, and there is none: {error}"
    for note in first.notes:
        subject.tell(note)
    return replace(report, notes=(*report.notes, *filter(None, [why])))
