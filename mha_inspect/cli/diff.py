"""`mha-inspect diff`: two layers, or one under two settings, with the same weights and the same input."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ExitCode, SpecError
from ..layers.catalog import LAYERS, find_layer
from ..text import shown
from . import subject
from .options import FAIL_IF, FORMS, NUMBERS, Options, command, completing, is_target, option, require_numbers
from .output import give, prepare

if TYPE_CHECKING:
    from ..answers.side import Side
    from ..build.target import Target
    from ..call.call import Call
    from ..reports.checkpoint_diff import CheckpointDiffReport
    from ..reports.diff import DiffReport, SideName


PANEL = "Comparison"
USUAL = ("torch", "per-head")
"""What is compared where nothing is named: what is called a split, and one matrix for each head."""
_SHAPES = " The shapes: `mha-inspect trace --device meta`."


def _side(name: str, help: str, default: str) -> Any:
    named: dict[str, Any] = {"metavar": name, "rich_help_panel": PANEL, "show_default": default}
    return typer.Argument("", help=help, autocompletion=completing(tuple(LAYERS)), **named)


def _settings(side: SideName) -> Any:
    said = f"A setting, or an argument, of the {side} side alone; again for another."
    return option(PANEL, said, metavar="KEY=VALUE")


def _module(side: SideName) -> Any:
    said = f"The {side} side is this module of its target, called as the target calls it."
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
        f"A layer ({', '.join(LAYERS)}), a checkpoint, or a module of your own: {FORMS}. Importing it runs its code.",
        "--layer",
    ),
    right: str = _side(
        "[RIGHT]",
        "Another layer, module of your own, or checkpoint.",
        "--layer, LEFT under other settings, or per-head",
    ),
    left_set: list[str] | None = _settings("left"),
    right_set: list[str] | None = _settings("right"),
    left_module: str | None = _module("left"),
    right_module: str | None = _module("right"),
    fail_if: str | None = FAIL_IF,
) -> ExitCode:
    """Give two layers the same weights and the same input, and show stage by stage where they part ways.

    Stages are compared in the same axes, whatever their layout. A difference counts when it is above the rounding error
    that is measured in the same run.

    Two checkpoints are compared tensor by tensor and head by head: the same bits, the same within rounding, or
    different, and which heads changed most.

    A side may be a module of your own, as in trace, or one out of a model: --left-module and --right-module. Its
    weights go into the other side where that can hold them, and it says where not; the attentions of two models are
    paired in order.
    """
    asked = _Asked("left", left, left_set or [], left_module), _Asked("right", right, right_set or [], right_module)
    named = f"comparing {' with '.join(one.text for one in asked if one.text) or options.layer}"
    report: DiffReport | CheckpointDiffReport
    if _are_checkpoints(left, right):
        count = _checked_files(options, *asked)
        export = prepare(options)
        with subject.waiting(options, named):
            from ..answers.checkpoint.diff import diff_of_checkpoints

            report = diff_of_checkpoints(Path(left), Path(right), num_heads=count)
    else:
        made = (_targets if is_target(left) or is_target(right) else _layers)(options, *asked)
        export = prepare(options)
        with subject.running(options, named):
            from ..answers.diff import diff as report_of

            report = report_of(*made())
    give(report, options, export)
    return ExitCode.CONDITION if report.verdict == fail_if else ExitCode.OK


def _are_checkpoints(left: str, right: str) -> bool:
    """Return whether both sides are files of tensors. Raises `SpecError` where one is, and the other is none."""
    from ..files.checkpoint import is_checkpoint

    found = [text != "" and text not in LAYERS and is_checkpoint(text) for text in (left, right)]
    if any(found) and not all(found):
        file, other = (left, right) if found[0] else (right, left)
        what = f"{shown(other)} is none" if other else "no other is named"
        raise SpecError(
            f"{shown(file)} is a checkpoint, and {what}: diff compares two of a kind. A checkpoint against a module: "
            f"`mha-inspect params {shown(file)} --like TARGET`."
        )
    return all(found)


@dataclass(frozen=True)
class _Asked:
    """What the command line says of one side."""

    name: SideName
    text: str
    settings: list[str]
    path: str | None
    """The module of the target that is the side; None: the whole target."""

    @property
    def flag(self) -> str:
        """Return the flag that gives it settings of its own."""
        return f"--{self.name}-set"

    def require_no_module(self) -> None:
        """Raise `SpecError` where a module is named of what is a layer."""
        if self.path is not None:
            raise SpecError(
                f"--{self.name}-module {shown(self.path)} names a module of a target, and that side is a layer. "
                "Drop it."
            )


def _checked_files(options: Options, left: _Asked, right: _Asked) -> int | None:
    """Return the number of heads of two files of tensors, if it was typed. Raises `SpecError` for what is of no use."""
    for one in (left, right):
        if one.settings or one.path is not None:
            flag = f"{one.name}-{'set' if one.settings else 'module'}"
            raise SpecError(f"{shown(one.text)} is a file of tensors, which --{flag} cannot change: drop it.")
    options.require_of_use_to_a_file(left.text, "num_heads")
    return subject.single_head_count(options, "diff") if "num_heads" in options.typed else None


def _layers(options: Options, left: _Asked, right: _Asked) -> Callable[[], tuple[Side, Side]]:
    """Return what builds two layers, once everything is judged that can be before torch is imported."""
    from ..build.layer_sides import make_sides, parse_settings

    left.require_no_module()
    right.require_no_module()
    options.require_no_target_settings("diff")
    ours, theirs = (parse_settings(one.flag, one.settings) for one in (left, right))
    first, second = chosen_layers(options, left.text, right.text, several_settings=bool(ours or theirs))
    # The layer whose sizes are checked here is the one that both are, or else one that takes any.
    options.layer = first if first == second and first in LAYERS else "torch"
    spec = subject.attention(options, subject.single_head_count(options, "diff"))
    planned = make_sides(first, second, spec, subject.inputs(options), subject.run(options), ours, theirs)
    for side in planned:
        require_numbers(side.run.device, "compare", _SHAPES)

    def made() -> tuple[Side, Side]:
        from ..answers.side import two_layers

        return two_layers(planned)

    return made


def _targets(options: Options, left: _Asked, right: _Asked) -> Callable[[], tuple[Side, Side]]:
    """Return what builds and runs two sides, at least one of them a target, once everything is judged as in `_layers`.

    A side that is not named is --layer, or the target under other settings.
    """
    from ..build.layer_sides import parse_settings as layer_settings
    from ..build.values import parse_settings

    again = bool(left.settings or right.settings or right.path)
    beside = left.text if again and "layer" not in options.typed else options.layer
    sides = replace(left, text=left.text or options.layer), replace(right, text=right.text or beside)
    for one in sides:
        if is_target(one.text):
            subject.check_target(one.text, options, "diff", beside_layer=not (left.text and right.text))
            parse_settings(one.settings, one.flag)
            changed, _ = _options_of(options, one)
            subject.inputs(changed)
            require_numbers(changed.device, "compare", _SHAPES)
        else:
            find_layer(one.text)
            own = layer_settings(one.flag, one.settings)
            require_numbers(own.get("device", options.device), "compare", _SHAPES)
            one.require_no_module()
    subject.single_head_count(options, "diff")
    subject.inputs(options)
    return partial(_runs, options, *sides)


def _runs(options: Options, left: _Asked, right: _Asked) -> tuple[Side, Side]:
    """Build both sides, and run those that are targets.

    A part of a model comes first: it says what the other gets, its sizes and its arguments. A layer comes last.

    Raises:
        MhaInspectError: a side cannot be built or called as asked.
        TargetFailedError: the forward of a target raised.
    """
    first, second = (right, left) if left.path is None and right.path is not None else (left, right)
    if not is_target(first.text):
        first, second = second, first
    target, call = _called(options, first, second)
    run = _target_run(options, first, target, call)
    if is_target(second.text):
        from ..call.part import with_the_same

        other, other_call = _called(options, second, first, (call, run))
        same, exact = (
            with_the_same(other_call, other.module, call, target.module, rounded=rounded) for rounded in (True, False)
        )
        other_run = _target_run(options, second, other, same, exact)
    else:
        other_run = _layer_run(options, second, call, run)
    return (run, other_run) if first is left else (other_run, run)


def _called(
    options: Options, one: _Asked, other: _Asked, beside: tuple[Call, Side] | None = None
) -> tuple[Target, Call]:
    """Return a target, and what its forward gets, be it made to fit a part of a model beside it."""
    from ..answers.side import sizes_of
    from ..call.part import part_of, with_arguments_of

    beside = beside if other.path is not None and one.path is None else None
    target, options = _loaded(options, one, other, None if beside is None else sizes_of(beside[1]))
    if beside is not None:
        target = with_arguments_of(target, beside[0])
    call = subject.call_of(target, options)
    return (target, call) if one.path is None else part_of(target, call, one.path)


def _loaded(
    options: Options, one: _Asked, other: _Asked, sizes: dict[str, Any] | None = None
) -> tuple[Target, Options]:
    """Build a target, and return the options as it has them: what is set and none of its arguments may be of a run."""
    try:
        return subject.load_target(one.text, options, one.settings, sizes, _taken_by(other)), options
    except SpecError as error:
        own, settings = _options_of(options, one)
        if len(settings) == len(one.settings):
            raise SpecError(_of_side(str(error), one)) from None
        return subject.load_target(one.text, own, settings, sizes, _taken_by(other)), own


_OF_RUN = frozenset(
    {"dtype", "device", "training", "causal", "padding", "attn_mask", "grad", "need_weights", "average_weights"}
)
"""Settings of a side that a target has under the names of our options, whatever its own arguments are called."""
_OF_BOTH = ("seed", "batch", "seq_len", "key_len", "unbatched", "input")
"""What makes the input, and is the same on both sides where one is a target."""


def _of_side(message: str, one: _Asked) -> str:
    """Return what is wrong with --set as what is wrong with the settings of a side, some of which both have."""
    for typed in (text.partition("=")[0].strip() for text in one.settings):
        name = typed.replace("-", "_")
        if name in _OF_BOTH and message.startswith(f"--set {typed} is no argument"):
            return (
                f"{one.flag} {name} is for both sides: diff gives both the same weights and the same input. Give "
                f"--{name.replace('_', '-')} in its place."
            )
    return message.replace("--set ", f"{one.flag} ")


def _options_of(options: Options, one: _Asked) -> tuple[Options, list[str]]:
    """Return the options as a target's side has them, and what is set of its own arguments."""
    from ..build.layer_sides import parse_settings, setting_of

    ours = [text for text in one.settings if setting_of(text) in _OF_RUN]
    changed = copy(options)
    for name, value in parse_settings(one.flag, ours).items():
        field = "train" if name == "training" else name
        setattr(changed, field, ",".join(map(str, value)) if isinstance(value, tuple) else value)
        changed.given, changed.typed = changed.given | {field}, changed.typed | {field}
    return changed, [text for text in one.settings if text not in ours]


def _taken_by(other: _Asked) -> frozenset[str]:
    """Return the flags that the other side takes, if it is a layer: a target that has no use for them need not."""
    if is_target(other.text):
        return frozenset()
    return frozenset({"embed_dim", "num_heads", "bias"}) | find_layer(other.text).takes


def _target_run(options: Options, asked: _Asked, target: Target, call: Call, exact: Call | None = None) -> Side:
    """Run a target; `exact` are its arguments as the other side has them. Raises `TargetFailedError` as it does."""
    from ..answers.side import Side
    from ..build.values import parse_settings
    from ..call.call import explaining
    from ..call.load import subject_of

    changed, _ = _options_of(options, asked)
    own = subject_of(target, call, options.seed, changed.grad)
    finer = None if exact is None else replace(own, args=exact.args, kwargs=exact.kwargs)
    run = Side(asked.name, own, dict(parse_settings(asked.settings)), finer)
    with explaining(own):
        _ = run.run
    return run


def _layer_run(options: Options, asked: _Asked, call: Call, beside: Side) -> Side:
    """Return a layer with the sizes of the target beside it, but for those that somebody gave, and its input."""
    from ..answers.side import layer_beside
    from ..build.layer_sides import parse_settings

    # A variable is for all commands: that it is of another width than a target is no contradiction.
    given = {name: getattr(options, name) for name in options.given if name != "embed_dim" or name in options.typed}
    if "num_heads" in given:
        given["num_heads"] = subject.single_head_count(options, "diff")
    given |= {"training": options.train, "seed": options.seed}
    if "dtype" in beside.settings:  # of that side alone
        given.setdefault("dtype", options.dtype)
    kind, settings = find_layer(asked.text), parse_settings(asked.flag, asked.settings)
    return layer_beside(asked.name, kind, beside, call, given, subject.inputs(options), subject.run(options), settings)


def chosen_layers(options: Options, left: str, right: str, *, several_settings: bool) -> tuple[str, str]:
    """Return the two layers: where one is not named, --layer is it.

    The right one is else the left one under other settings, or per-head (torch, where per-head is on the left).

    Raises `SpecError` when --layer asks for a third.
    """
    if left and right and options.layer not in ("torch", left, right):
        raise SpecError(
            f"layer {options.layer} is a third one beside {left} and {right}: diff compares two. Drop --layer."
        )
    first = left or options.layer
    if not right and "layer" in options.typed and options.layer != first:
        right = options.layer
    otherwise = first if several_settings else next(name for name in reversed(USUAL) if name != first)
    return first, right or otherwise
