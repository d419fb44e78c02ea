"""`mha-inspect diff`: two layers, or one under two settings, with the same weights and the same input."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from ..errors import ExitCode, SpecError
from ..layers.catalog import LAYERS, find_layer
from ..text import shown
from . import subject
from .app import command
from .options import FAIL_IF, FORMS, NUMBERS, Options, completing, is_target, option, require_numbers
from .output import give, prepare
from .sides import AskedSide, LayerSide, layer_side, require_alike, setting_of

if TYPE_CHECKING:
    from ..answers.side import Side
    from ..build.target import Target
    from ..call.call import Call
    from ..call.triple import Triple
    from ..layers.catalog import LayerKind
    from ..layers.spec import DtypeName
    from ..reports.diff import CheckpointDiffReport, DiffReport, SideName


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
    asked = (
        AskedSide("left", left, left_set or [], left_module),
        AskedSide("right", right, right_set or [], right_module),
    )
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


def _checked_files(options: Options, left: AskedSide, right: AskedSide) -> int | None:
    """Return the number of heads of two files of tensors, if it was typed. Raises `SpecError` for what is of no use."""
    for one in (left, right):
        if one.settings or one.path is not None:
            flag = f"{one.name}-{'set' if one.settings else 'module'}"
            raise SpecError(f"{shown(one.text)} is a file of tensors, which --{flag} cannot change: drop it.")
    options.require_of_use_to_a_file(left.text, "num_heads")
    return subject.single_head_count(options, "diff") if "num_heads" in options.typed else None


def _layers(options: Options, left: AskedSide, right: AskedSide) -> Callable[[], tuple[Side, Side]]:
    """Return what builds two layers, once everything is judged that can be before torch is imported."""
    left.require_no_module()
    right.require_no_module()
    options.require_no_target_settings("diff")
    several = bool(left.settings or right.settings)
    kinds = [find_layer(name) for name in chosen_layers(options, left.text, right.text, several_settings=several)]
    sides = layer_side(options, left, *kinds), layer_side(options, right, *reversed(kinds))
    require_alike(*sides)
    for side in sides:
        require_numbers(side.run.device, "compare", _SHAPES)
    return partial(_two_layers, sides)


def _two_layers(sides: tuple[LayerSide, LayerSide]) -> tuple[Side, Side]:
    """Build two layers, each also in the dtype of the other where that is finer. Raises as `load_layer`."""
    from ..answers.side import Side

    finer = min((side.spec.dtype for side in sides), key=_FINEST.index)
    left, right = (
        Side(side.name, side.build(), side.settings, None if side.spec.dtype == finer else side.build(finer))
        for side in sides
    )
    return left, right


_FINEST: tuple[DtypeName, ...] = ("float64", "float32", "float16", "bfloat16")


def _targets(options: Options, left: AskedSide, right: AskedSide) -> Callable[[], tuple[Side, Side]]:
    """Return what builds and runs two sides, at least one of them a target, once everything is judged as in `_layers`.

    A side that is not named is --layer, or the target under other settings.
    """
    from ..build.arguments import parse_settings

    again = bool(left.settings or right.settings or right.path)
    beside = left.text if again and "layer" not in options.typed else options.layer
    sides = replace(left, text=left.text or options.layer), replace(right, text=right.text or beside)
    for side in sides:
        if is_target(side.text):
            subject.check_target(side.text, options, "diff", beside_layer=not (left.text and right.text))
            parse_settings(side.settings, side.flag)
            own = side.of_run().options(options)
            subject.inputs(own)
        else:
            find_layer(side.text)
            side.require_no_module()
            own = side.options(options)
        require_numbers(own.device, "compare", _SHAPES)
    subject.single_head_count(options, "diff")
    subject.inputs(options)
    return partial(_runs, options, *sides)


def _runs(options: Options, left: AskedSide, right: AskedSide) -> tuple[Side, Side]:
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
    options: Options, one: AskedSide, other: AskedSide, beside: tuple[Call, Side] | None = None
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
    options: Options, one: AskedSide, other: AskedSide, sizes: dict[str, Any] | None = None
) -> tuple[Target, Options]:
    """Build a target, and return the options as it has them: what is set and none of its arguments may be of a run."""
    try:
        return subject.load_target(one.text, options, one.settings, sizes, _taken_by(other)), options
    except SpecError as error:
        of_run = one.of_run()
        if not of_run.settings:
            raise SpecError(_of_side(str(error), one)) from None
        settings = [text for text in one.settings if text not in of_run.settings]
        own = of_run.options(options)
        return subject.load_target(one.text, own, settings, sizes, _taken_by(other)), own


_OF_BOTH = ("seed", "batch", "seq_len", "key_len", "unbatched", "input")
"""What makes the input, and is the same on both sides where one is a target."""


def _of_side(message: str, asked: AskedSide) -> str:
    """Return what is wrong with --set as what is wrong with the settings of a side, some of which both have."""
    for text in asked.settings:
        name = setting_of(text)
        if name in _OF_BOTH and message.startswith(f"--set {text.partition('=')[0].strip()} is no argument"):
            return (
                f"{asked.flag} {name} is for both sides: diff gives both the same weights and the same input. Give "
                f"--{name.replace('_', '-')} in its place."
            )
    return message.replace("--set ", f"{asked.flag} ")


def _taken_by(other: AskedSide) -> frozenset[str]:
    """Return the flags that the other side takes, if it is a layer: a target that has no use for them need not."""
    if is_target(other.text):
        return frozenset()
    return frozenset({"embed_dim", "num_heads", "bias"}) | find_layer(other.text).takes


def _target_run(options: Options, asked: AskedSide, target: Target, call: Call, exact: Call | None = None) -> Side:
    """Run a target; `exact` are its arguments as the other side has them. Raises `TargetFailedError` as it does."""
    from ..answers.side import Side
    from ..build.arguments import parse_settings
    from ..call.call import explaining
    from ..call.load import subject_of

    own = subject_of(target, call, options.seed, asked.of_run().options(options).grad)
    finer = None if exact is None else replace(own, args=exact.args, kwargs=exact.kwargs)
    run = Side(asked.name, own, dict(parse_settings(asked.settings)), finer)
    with explaining(own):
        _ = run.run
    return run


def _layer_run(options: Options, asked: AskedSide, call: Call, beside: Side) -> Side:
    """Return a layer with the sizes of the target beside it, but for those that somebody gave, and its input.

    Raises `SpecError` where a size contradicts the target, or the layer has no use for a setting.
    """
    from ..answers.side import Side
    from ..call.part import layer_inputs
    from ..call.triple import turned

    kind, tensors = find_layer(asked.text), layer_inputs(beside.subject.module, call)
    unbatched = tensors[0].dim() == 2
    if not unbatched and not call.batch_first:
        tensors = turned(tensors)
    own = _sized_like(options, kind, beside, tensors)
    side = layer_side(own, asked, kind, kind)
    like = layer_side(own, replace(asked, name=beside.name, settings=[]), kind, kind)
    require_alike(*((side, like) if asked.name == "left" else (like, side)))
    tensors = tensors if side.spec.batch_first or unbatched else turned(tensors)
    layer, finer = side.build(given=tensors), min(side.spec.dtype, cast("DtypeName", beside.dtype), key=_FINEST.index)
    exact = layer if finer == side.spec.dtype else side.build(finer, tensors)
    return Side(asked.name, layer, side.settings, replace(layer, args=exact.args, kwargs=exact.kwargs))


def _sized_like(options: Options, kind: LayerKind, beside: Side, tensors: Triple) -> Options:
    """Return the options of a layer: the sizes and the input of the target beside it, but for what somebody gave."""
    from ..answers.side import sizes_of

    query, key, value = tensors
    width = query.shape[-1]
    # A variable is for all commands: that it is of another width than a target is no contradiction.
    if "embed_dim" in options.typed and options.embed_dim != width:
        module = beside.subject.label
        raise SpecError(
            f"embed_dim {options.embed_dim} contradicts {module}, which takes {width} features: diff gives both the "
            f"same input. Drop --embed-dim, or give {module} another size: --{beside.name}-set NAME=VALUE."
        )
    own, usual = copy(options), Options()
    sizes = {"num_heads": int(usual.num_heads), "bias": True, **sizes_of(beside)}
    for name in ("num_kv_heads", "head_dim", "rope", "add_bias_kv", "add_zero_attn"):
        if name not in options.given or name not in kind.takes:
            setattr(own, name, getattr(usual, name))
    if "num_heads" not in options.given:
        own.num_heads = str(sizes["num_heads"])
    if "bias" not in options.given:
        own.bias = sizes["bias"]
    heads = sizes["num_heads"]
    if "num_kv_heads" in kind.takes - options.given and sizes.get("num_kv_heads", heads) != heads:
        own.num_kv_heads = sizes["num_kv_heads"]
    if "head_dim" in kind.takes - options.given and sizes.get("head_dim", 0) * heads not in (0, width):
        own.head_dim = sizes["head_dim"]
    if "dtype" not in options.given and "dtype" not in beside.settings:  # that is of that side alone
        own.dtype = beside.dtype
    own.unbatched, own.batch_first, own.input = query.dim() == 2, True, None
    own.batch, own.seq_len = 1 if own.unbatched else query.shape[0], query.shape[-2]
    own.key_len = None if key is query else key.shape[-2]
    own.embed_dim = width
    own.kdim, own.vdim = (None if size == width else size for size in (key.shape[-1], value.shape[-1]))
    return own


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
