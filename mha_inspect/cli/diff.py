"""`mha-inspect diff`: two layers, or one under two settings, with the same weights and the same input."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import ExitCode, SpecError
from ..layers.registry import LAYERS
from .collection import resume
from .help import GroupedCommand
from .options import Options, option, shares_options

app = typer.Typer(add_completion=False)

EPILOG = """Examples:

mha-inspect diff torch fold-heads --embed-dim 512 --num-heads 8

mha-inspect diff torch --left-set dtype=bfloat16 --right-set need_weights=false"""

PANEL = "Comparison"
USUAL = ("torch", "per-head")
"""What is compared where nothing is named: what is called a split, and one matrix for each head."""


def _names(incomplete: str) -> list[str]:
    return [name for name in LAYERS if name.startswith(incomplete)]


@app.command(cls=GroupedCommand, epilog=EPILOG)
@shares_options
def diff(
    options: Options,
    left: Annotated[
        str,
        typer.Argument(
            metavar="[LEFT]",
            help=f"A layer: {', '.join(LAYERS)}.",
            autocompletion=_names,
            rich_help_panel=PANEL,
            show_default="--layer",
        ),
    ] = "",
    right: Annotated[
        str,
        typer.Argument(
            metavar="[RIGHT]",
            help="Another layer.",
            autocompletion=_names,
            rich_help_panel=PANEL,
            show_default="LEFT under other settings, or else per-head",
        ),
    ] = "",
    left_set: Annotated[
        list[str] | None,
        option("--left-set", PANEL, "A setting of the left side alone, any number of times.", metavar="KEY=VALUE"),
    ] = None,
    right_set: Annotated[
        list[str] | None,
        option("--right-set", PANEL, "A setting of the right side alone, any number of times.", metavar="KEY=VALUE"),
    ] = None,
    fail_if: Annotated[
        str | None,
        option(
            "--fail-if",
            PANEL,
            "Exit with code 1 when this is the verdict, for scripts.",
            known=("differs", "same"),
            show_default="never",
        ),
    ] = None,
) -> ExitCode:
    """Give two layers the same weights and the same input, and show stage by stage where they part ways.

    Stages are compared in the same axes, whatever their layout. A difference counts when it is above the rounding error
    that is measured in the same run.
    """
    options.require_no_target_settings("trace")
    from ..sides.settings import make_sides, parse_settings

    ours, theirs = parse_settings("--left-set", left_set or ()), parse_settings("--right-set", right_set or ())
    first, second = chosen_layers(options, left, right, several_settings=bool(ours or theirs))
    # The layer whose sizes are checked here is the one that both are, or else one that takes any.
    options.layer = first if first == second and first in LAYERS else "torch"
    spec = options.attention(options.single_head_count("diff"))
    inputs, run = options.inputs(), options.run()
    make_sides(first, second, spec, inputs, run, ours, theirs)
    options.show()
    from .answer import give, prepare

    target = prepare(options)

    from ..difference import diff_spec

    resume()
    report = diff_spec(first, second, spec, inputs, run, left_set=ours, right_set=theirs)
    give(report, options, target)
    return ExitCode.CONDITION if report.verdict == fail_if else ExitCode.OK


def chosen_layers(options: Options, left: str, right: str, *, several_settings: bool) -> tuple[str, str]:
    """The two layers: where one is not named, --layer is the left one, and the right one is the left one under other
    settings, or per-head (torch, where per-head is on the left).

    Raises `SpecError` when --layer asks for a third.
    """
    first = left or options.layer
    if left and right and options.layer not in ("torch", left, right):
        raise SpecError(
            f"layer {options.layer} is a third one beside {left} and {right}: diff compares two. Drop --layer."
        )
    if right:
        return first, right
    if several_settings:
        return first, first
    return first, next(name for name in reversed(USUAL) if name != first)
