"""`mha-inspect diff`: two layers, or one under two settings, with the same weights and the same input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ExitCode, SpecError
from ..layers.catalog import LAYERS
from ..text import quoted, shown
from . import subject
from .app import command
from .options import FAIL_IF, NUMBERS, Options, completing, option
from .output import checked_destination, print_and_export
from .sides import AskedSide, checked_sides, runs

if TYPE_CHECKING:
    from ..reports.diff import CheckpointDiffReport, DiffReport, SideName

PANEL = "Comparison"


def _side(name: str, help: str, default: str) -> Any:
    named: dict[str, Any] = {"metavar": name, "rich_help_panel": PANEL, "show_default": default}
    return typer.Argument("", help=help, autocompletion=completing(tuple(LAYERS)), **named)


def _settings(side: SideName) -> Any:
    said = f"A setting of the {side} side only. Repeatable; an argument of TARGET too."
    return option(PANEL, said, metavar="KEY=VALUE")


def _module(side: SideName) -> Any:
    said = f"Compare this module of the {side} target. The inputs are those of a run of the whole target."
    return option(PANEL, said, metavar="PATH", show_default="the whole target")


@command(
    "diff torch fold-heads --embed-dim 512 --num-heads 8",
    "diff path/to/file.py:Attention torch --embed-dim 64 --right-set dtype=bfloat16",
    without=NUMBERS,
)
def diff(
    options: Options,
    left: str = _side(
        "[LEFT]",
        "As TARGET of trace, or a file of weights. Importing it runs its code.",
        "--layer",
    ),
    right: str = _side(
        "[RIGHT]",
        "Another target, or file of weights.",
        "--layer, LEFT with other settings, or per-head",
    ),
    left_set: list[str] | None = _settings("left"),
    right_set: list[str] | None = _settings("right"),
    left_module: str | None = _module("left"),
    right_module: str | None = _module("right"),
    fail_if: str | None = FAIL_IF,
    show_all: bool = option(PANEL, "Show each stage, also those that are the same.", False, "--all"),
) -> ExitCode:
    """Give two layers the same weights and the same input, and show stage by stage where they differ.

    Stages are compared in the same axes, whatever their layout. A difference counts if it exceeds the rounding error,
    which is measured in the same run.

    Two checkpoints are compared tensor by tensor and head by head: the same bits, the same within rounding, or
    different, and which heads changed most.

    A side may be a target, as in trace, or a module of a model: --left-module and --right-module. Its weights are
    copied to the other side, and the report lists weights that do not fit there. The attentions of two models are
    paired in order.
    """
    asked = (
        AskedSide("left", left, left_set or [], left_module),
        AskedSide("right", right, right_set or [], right_module),
    )
    named = f"comparing {' with '.join(side.text for side in asked if side.text) or options.layer}"
    report: DiffReport | CheckpointDiffReport
    if _are_checkpoints(left, right):
        count = _checked_files(options, *asked)
        export = checked_destination(options)
        with subject.waiting(options, named):
            from ..checkpoints.diff import diff_of_checkpoints

            report = diff_of_checkpoints(Path(left), Path(right), num_heads=count)
    else:
        is_own_batch = "batch" not in options.given and not options.unbatched
        if is_own_batch:
            options.batch = 2  # with one item, what is done to the batch is not seen
        sides = checked_sides(options, *asked)
        export = checked_destination(options)
        with subject.running(options, named):
            from ..call.call import TargetFailedError

            try:
                report = _compared(options, sides)
            except TargetFailedError as failed:
                if not is_own_batch:
                    raise
                options.batch = 1
                try:
                    report = _compared(options, checked_sides(options, *asked))
                except TargetFailedError:
                    raise failed from None
            report = replace(report, _shows_all=show_all)
    print_and_export(report, options, export)
    return ExitCode.CONDITION if report.outcome == fail_if else ExitCode.OK


def _compared(options: Options, sides: tuple[AskedSide, AskedSide]) -> DiffReport:
    """Load both sides and compare them, with this batch."""
    from ..compare.diff import diff as report_of

    return report_of(*runs(options, *sides))


def _are_checkpoints(left: str, right: str) -> bool:
    """Return whether both sides are checkpoints. Raises `SpecError` if only one is."""
    from ..files.checkpoint import is_checkpoint

    files = [text for text in (left, right) if text and text not in LAYERS and is_checkpoint(text)]
    if len(files) == 1:
        module = right if files[0] == left else left
        what = f"{shown(module)} is not" if module else "the other side is missing"
        raise SpecError(
            f"{shown(files[0])} is a checkpoint, and {what}: diff compares two checkpoints or two modules. For a "
            f"checkpoint and a module: `mha-inspect params {quoted(files[0])} --like {quoted(module or 'TARGET')}`."
        )
    return len(files) == 2


def _checked_files(options: Options, left: AskedSide, right: AskedSide) -> int | None:
    """Return --num-heads for two checkpoints; None if not typed. Raises `SpecError` for options that do not apply."""
    for side in (left, right):
        if side.settings or side.path is not None:
            flag = f"{side.name}-{'set' if side.settings else 'module'}"
            raise SpecError(f"{shown(side.text)} is a file of tensors: --{flag} does not apply to it. Drop it.")
    options.require_file_options(left.text, "num_heads")
    return options.single_head_count("diff") if "num_heads" in options.typed else None
