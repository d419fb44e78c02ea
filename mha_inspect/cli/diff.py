"""`mha-inspect diff`: two layers, or one under two settings, with the same weights and the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from ..errors import ExitCode, SpecError
from ..layers.catalog import LAYERS
from ..text import shown
from .collection import resume
from .comparison import PANEL, FailIf, exit_code
from .help import GroupedCommand
from .options import FORMS, Options, is_target, option, shares_options

app = typer.Typer(add_completion=False)

EPILOG = """Examples:

mha-inspect diff torch fold-heads --embed-dim 512 --num-heads 8

mha-inspect diff path/to/file.py:Attention torch --embed-dim 64 --right-set dtype=bfloat16"""

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
            help=f"A layer ({', '.join(LAYERS)}), or a module of your own: {FORMS}. Importing it runs its code.",
            autocompletion=_names,
            rich_help_panel=PANEL,
            show_default="--layer",
        ),
    ] = "",
    right: Annotated[
        str,
        typer.Argument(
            metavar="[RIGHT]",
            help="Another layer, or another module of your own.",
            autocompletion=_names,
            rich_help_panel=PANEL,
            show_default="LEFT under other settings, or else per-head; --layer beside a module of your own",
        ),
    ] = "",
    left_set: Annotated[
        list[str] | None,
        option(
            "--left-set",
            PANEL,
            "A setting, or an argument, of the left side alone; again for another.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    right_set: Annotated[
        list[str] | None,
        option(
            "--right-set",
            PANEL,
            "A setting, or an argument, of the right side alone; again for another.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    left_module: Annotated[
        str | None,
        option(
            "--left-module",
            PANEL,
            "The left side is this module of its target, called as the target calls it.",
            metavar="PATH",
            show_default="the whole target",
        ),
    ] = None,
    right_module: Annotated[
        str | None,
        option(
            "--right-module",
            PANEL,
            "The right side is this module of its target.",
            metavar="PATH",
            show_default="the whole target",
        ),
    ] = None,
    fail_if: FailIf = None,
) -> ExitCode:
    """Give two layers the same weights and the same input, and show stage by stage where they part ways.

    Stages are compared in the same axes, whatever their layout. A difference counts when it is above the rounding error
    that is measured in the same run.

    A side may be a module of your own, as in trace, or one out of a model: --left-module and --right-module. Its
    weights go into the other side where that can hold them, and it says where not; the attentions of two models are
    paired in order.
    """
    if is_target(left) or is_target(right):
        return _of_targets(
            options, left, right, (left_set or (), right_set or ()), (left_module, right_module), fail_if
        )
    for flag, path in (("--left-module", left_module), ("--right-module", right_module)):
        if path is not None:
            raise SpecError(f"{flag} {shown(path)} names a module of a target, and that side is a layer. Drop it.")
    options.require_no_target_settings("trace")
    from ..answers.sides.settings import make_sides, parse_settings
    from . import subject

    ours, theirs = parse_settings("--left-set", left_set or ()), parse_settings("--right-set", right_set or ())
    first, second = chosen_layers(options, left, right, several_settings=bool(ours or theirs))
    # The layer whose sizes are checked here is the one that both are, or else one that takes any.
    options.layer = first if first == second and first in LAYERS else "torch"
    spec = subject.attention(options, subject.single_head_count(options, "diff"))
    inputs, run = subject.inputs(options), subject.run(options)
    make_sides(first, second, spec, inputs, run, ours, theirs)
    subject.show(options)
    from .answer import give, prepare

    target = prepare(options)

    from ..answers.diff import diff_spec

    resume()
    report = diff_spec(first, second, spec, inputs, run, left_set=ours, right_set=theirs)
    give(report, options, target)
    return exit_code(report.verdict, fail_if)


def _of_targets(
    options: Options,
    left: str,
    right: str,
    own: tuple[Sequence[str], Sequence[str]],
    paths: tuple[str | None, str | None],
    fail_if: str | None,
) -> ExitCode:
    """A diff of which a side at least is a target; where the other is not named, it is --layer, or the target under
    other settings."""
    from .answer import give, prepare
    from .diff_target import check_sides, diff_target

    named = bool(left and right)
    again = any(own) or paths[1] is not None
    texts = (left or options.layer, right or (left if again and "layer" not in options.typed else options.layer))
    check_sides(options, texts, own, paths, beside_layer=not named)
    export = prepare(options)
    resume()
    report = diff_target(options, texts, own, paths)
    give(report, options, export)
    return exit_code(report.verdict, fail_if)


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
