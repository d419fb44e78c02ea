"""`mha-inspect trace`: every stage of one forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ExitCode
from ..layers.registry import LAYERS
from .collection import resume
from .help import GroupedCommand
from .options import Options, option, shares_options, size
from .picture import HeadOption, RowOption, StageOption, TokensOption, draw, wanted
from .target_argument import TargetArgument

if TYPE_CHECKING:
    from ..record.subject import Run

app = typer.Typer(add_completion=False)

EPILOG = """Examples:

mha-inspect trace --embed-dim 512 --num-heads 2 --batch 1 --seq-len 12

mha-inspect trace torch.nn:TransformerEncoderLayer --embed-dim 64 --num-heads 4 --seq-len 10"""

PANEL = "Trace"


@app.command(cls=GroupedCommand, epilog=EPILOG)
@shares_options
def trace(
    options: Options,
    target: TargetArgument = None,
    number: Annotated[
        int | None, size("--attention", PANEL, "Show this attention of several in full.", show_default="each kind once")
    ] = None,
    module: Annotated[
        str | None,
        option("--module", PANEL, "Show those of this module in full.", metavar="PATH", show_default="each kind once"),
    ] = None,
    picture: StageOption = None,
    head: HeadOption = "",
    batch_row: RowOption = 0,
    tokens: TokensOption = None,
) -> ExitCode:
    """Show every stage of one forward pass: its name, what is computed, its shape, and what each axis is.

    The plain forward is run too, and the last line says whether both outputs agree.

    TARGET is a class, a function that returns a module, or a module of your own: its arguments come from --set and from
    the options under the names that it has for them, its inputs follow the signature of its forward. Importing it runs
    its code.
    """
    from . import specs

    show = specs.show(options)
    want = wanted(options, picture, head, batch_row, tokens)
    if target is None:
        options.require_no_target_settings("trace")
        spec = specs.attention(options, specs.single_head_count(options, "trace"))
        inputs, run = specs.inputs(options), specs.run(options)

        from ..layers.settings import check_settings

        check_settings(LAYERS[options.layer], spec, inputs, run)
    else:
        from .target import check_target, trace_target

        check_target(target, options, "trace")
    from .answer import give, prepare

    export = prepare(options, draws=want is not None, prints=want is not None and want.asked)

    from ..answers.trace import traced_spec
    from .choice import choose

    seen: Run | None
    resume()
    if target is None:
        report, seen = traced_spec(spec, inputs, run, show, layer=options.layer, keep=want is not None)
    else:
        report, seen = trace_target(target, options, keep=want is not None)
    if seen is None:
        give(report, options, export)
        return ExitCode.CONDITION
    report = choose(report, number, module)
    give(report, options, export, None if want is None else draw(report, seen, want, export))
    return ExitCode.OK
