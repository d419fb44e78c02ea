"""`mha-inspect params`: every parameter, and which part of it belongs to which head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ExitCode
from .collection import resume
from .help import GroupedCommand
from .options import Options, option, shares_options
from .picture import Drawn, require_drawable
from .target_argument import TargetArgument

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
    if target is not None:
        return _of_target(target, options, per_head, picture)
    options.require_no_target_settings("params")
    from . import specs

    first, *more = specs.head_counts(options)
    spec = specs.attention(options, first)
    for count in more:
        specs.attention(options, count)
    specs.inputs(options)
    run, show = specs.run(options), specs.show(options)
    from .answer import give, prepare

    if picture:
        require_drawable(options, in_json=True)
    export = prepare(options, draws=picture)

    from ..answers.params import params_spec

    resume()
    side_by_side = (first, *more) if more else ()
    settings: dict[str, Any] = {"per_head": per_head, "num_heads": side_by_side, "norms": picture}
    report = params_spec(spec, run, show, layer=options.layer, **settings)
    give(report, options, export, _drawn(report))
    return ExitCode.OK


def _of_target(target: str, options: Options, per_head: bool, picture: bool) -> ExitCode:
    from . import specs
    from .answer import give, prepare
    from .target import check_target, params_target

    check_target(target, options, "params")
    specs.show(options)
    if picture:
        require_drawable(options, in_json=True)
    export = prepare(options, draws=picture)
    resume()
    report = params_target(target, options, per_head=per_head, norms=picture)
    give(report, options, export, _drawn(report))
    return ExitCode.OK


def _drawn(report: ParamsReport) -> Drawn | None:
    """Return the picture of a report that has norms."""
    if report.head_norms is None:
        return None
    from ..pictures.heads import norms_picture

    return Drawn((norms_picture(report.head_norms),), printed=True)
