"""`mha-inspect params`: every parameter, and which part of it belongs to which head."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ExitCode, MhaInspectError
from .collection import resume
from .help import GroupedCommand
from .options import Options, TargetArgument, option, shares_options
from .picture import Drawn, require_drawable

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
        bool, option("--picture", "Params", "Draw how large each head's part of W_q, W_k, W_v and W_o is.")
    ] = False,
) -> ExitCode:
    """Show every parameter tensor: its name, shape, axes and count, and what it is for.

    With a list, as in --num-heads 1,2,4,8, it sets the head counts side by side.

    TARGET is a class, a function that returns a module, or a module of your own: its arguments come from --set and from
    the options under the names that it has for them. Importing it runs its code. Its forward is run once, on inputs as
    trace makes them: what each parameter is for, and which rows and columns belong to which head, is read off that run.
    """
    from . import subject

    if target is not None:
        subject.check_target(target, options, "params")
    else:
        options.require_no_target_settings("params")
        for count in subject.head_counts(options):
            subject.attention(options, count)
        subject.inputs(options)
    subject.show(options)
    from .answer import give, prepare

    if picture:
        require_drawable(options, in_json=True)
    export = prepare(options, draws=picture)

    resume()
    asked: dict[str, Any] = {"per_head": per_head, "norms": picture}
    report = _of_layer(options, asked) if target is None else _of_target(target, options, asked)
    give(report, options, export, _drawn(report))
    return ExitCode.OK


def _drawn(report: ParamsReport) -> Drawn | None:
    """Return the picture of a report that has norms."""
    if report.head_norms is None:
        return None
    from ..pictures.heads import norms_picture

    return Drawn((norms_picture(report.head_norms),), printed=True)


def _of_layer(options: Options, asked: dict[str, Any]) -> ParamsReport:
    from ..answers.params import params_spec
    from . import subject

    first, *more = subject.head_counts(options)
    return params_spec(
        subject.attention(options, first),
        subject.run(options),
        subject.show(options),
        layer=options.layer,
        num_heads=(first, *more) if more else (),
        **asked,
    )


def _of_target(text: str, options: Options, asked: dict[str, Any]) -> ParamsReport:
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
                report = params(target.module, own=own, show=show, **asked)
            except Exception as error:
                raise explained(error, own) from error
        except MhaInspectError as error:
            if options.input_shape or options.input or any(map(is_lazy, target.module.parameters())):
                raise
            report = params(target.module, show=show, **asked)
            why = f"What they are for is read off a run, and there is none: {error}"
    for note in target.notes:
        subject.tell(note)
    return replace(
        report,
        environment=replace(report.environment, seed=options.seed),
        layer=LayerInfo(target.name, target.passed),
        notes=(*report.notes, *filter(None, [why])),
    )
