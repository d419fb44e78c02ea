"""`mha-inspect params`: every parameter, and which part of it belongs to which head."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ExitCode, MhaInspectError, SpecError
from ..files.checkpoint import is_checkpoint
from ..layers.catalog import LAYERS
from ..text import shown
from . import subject
from .app import command
from .options import TARGET, Options, option, require_ranks, size
from .output import checked_destination, print_and_export

if TYPE_CHECKING:
    from ..reports.params import ParamsReport
    from ..running.subject import Subject

PANEL = "Params"
_OF_MASKS = ("causal", "padding", "attn_mask")
"""Options of masks, which parameters do not depend on."""
_OF_CHECKPOINT = ("num_heads", "stats", "values")
"""Options that apply to a checkpoint alone; with a module beside it, all of them apply."""


@command(
    "params --embed-dim 512 --num-heads 8 --per-head",
    "params --embed-dim 512 --num-heads 1,2,4,8",
    without=("ops", *_OF_MASKS),
)
def params(
    options: Options,
    target: str | None = TARGET,
    per_head: bool = option(PANEL, "Show the rows and columns of each head. One run finds them.", False),
    like: str | None = option(
        PANEL,
        "Compare a checkpoint with this TARGET. The purpose of each tensor is that in the module.",
        metavar="TARGET",
        show_default="names and shapes only",
    ),
    ranks: int | None = size(PANEL, "Shard the heads over N ranks, and show the part of rank 0.", unset="one"),
) -> ExitCode:
    """Show every parameter tensor: its name, shape, axes, count and purpose.

    With a list, e.g. --num-heads 1,2,4,8, it shows the head counts side by side.

    TARGET is a class, a function that returns a module, or a module. Its arguments come from --set and from options of
    a matching name, e.g. --embed-dim sets d_model. Importing TARGET runs its code. Its forward runs once, with inputs
    as in trace, which shows the purpose of each parameter and which rows and columns belong to which head.

    TARGET may also be a checkpoint: a .safetensors, .pt, .pth or .bin file, an index of shards, or a folder of a model.
    Nothing is run, and only its headers are read: names and shapes show the purpose of each tensor. --like compares
    it with a module, which is run without memory; --stats and --values read the tensors.
    """
    if target is not None and is_checkpoint(target):
        return _params_of_file(target, options, like, per_head=per_head, ranks=ranks)
    heads = options.head_counts()
    if like is not None:
        given = "none was given" if target is None else f"{shown(target)} is not one"
        way = "Give one, e.g. mha-inspect params model.safetensors --like hf:gpt2."
        raise SpecError(f"--like needs a checkpoint, and {given}. {way}")
    if target is None:
        _check_layer(options, heads)
    else:
        subject.check_target(target, options, "params", many_heads=True)
        if len(heads) > 1:
            subject.require_open_head_count(options, heads, "--num-heads gives the counts.")
    require_ranks(ranks, per_head=per_head)
    if ranks is not None and len(heads) > 1:
        raise _nothing_to_cut(ranks)
    export = checked_destination(options, computes=True)
    asked = {"show": options.show(), "per_head": per_head}
    report = _of_module(target, options, heads, asked, ranks)
    print_and_export(report, options, export)
    return ExitCode.OK


def _params_of_file(text: str, options: Options, like: str | None, *, per_head: bool, ranks: int | None) -> ExitCode:
    """Show the tensors of a checkpoint. Only --stats and --values read their numbers."""
    _check_checkpoint(text, options, like)
    require_ranks(ranks, per_head=per_head)
    if ranks is not None:
        raise _nothing_to_cut(ranks)
    reads = options.stats or options.values
    show = options.show()
    export = checked_destination(options, computes=reads or like is not None)
    report = _of_checkpoint(text, options, like, {"show": show if reads else None, "per_head": per_head})
    print_and_export(report, options, export)
    return ExitCode.OK


def _nothing_to_cut(ranks: int) -> SpecError:
    return SpecError(f"--ranks {ranks} needs one module to shard. Give a layer or a TARGET, and one --num-heads.")


def _check_layer(options: Options, heads: tuple[int, ...]) -> None:
    """Check the options of a layer with each head count. Raises `SpecError` for --input."""
    options.take_settings("params")
    subject.check_layer(options, heads)
    if "input" in options.typed:
        raise SpecError("--input sets the inputs, but the parameters of a layer do not depend on them. Drop it.")


def _check_checkpoint(text: str, options: Options, like: str | None) -> None:
    """Check the options before a file is read. Raises `MhaInspectError` for one that does not apply."""
    if like is None:
        options.require_file_options(text, *_OF_CHECKPOINT)
    elif like in LAYERS:
        subject.check(None, options, "params")
    else:
        subject.check_target(like, options, "params")


def _of_checkpoint(text: str, options: Options, like: str | None, asked: dict[str, Any]) -> ParamsReport:
    """Read a checkpoint; with --like, beside a target or a layer that is built without memory."""
    from ..checkpoints.params import params_of_checkpoint

    if like is None:
        count = options.single_head_count("a checkpoint") if "num_heads" in options.typed else None
        with subject.waiting(options, f"reading {text}"):
            return params_of_checkpoint(Path(text), num_heads=count, **asked)
    with subject.running(options, f"reading {text}"):
        on_meta = copy(options)
        on_meta.device = "meta"
        on_meta.layer = like if like in LAYERS else options.layer
        beside = subject.load(None if like in LAYERS else like, on_meta)
        return params_of_checkpoint(Path(text), like=beside, **asked)


def _of_module(
    text: str | None, options: Options, heads: tuple[int, ...], asked: dict[str, Any], ranks: int | None
) -> ParamsReport:
    """Report the parameters of a module and their purposes, from one call; or why a target cannot be called."""
    many = len(heads) > 1
    why: tuple[str, ...] = ()
    with subject.running(options, f"reading {text or options.layer}"):
        from torch.nn.parameter import is_lazy

        from ..call.load import load_layer, subject_of
        from ..questions.params import INPUTS, params
        from ..running.subject import Subject

        if text is None:
            specs = [options.attention_spec(count) for count in heads]
            run = options.run_spec()
            return _cut([load_layer(spec, INPUTS, run, options.layer) for spec in specs], ranks, asked)
        by_count = [options.with_heads(count) for count in heads] if many else [options]
        targets = [subject.load_target(text, changed) for changed in by_count]
        first = targets[0]
        if many:
            subject.require_head_count(first, "params")
        try:
            subjects: list[Subject] = []
            for target, changed in zip(targets, by_count, strict=True):
                call = subject.call_of(target, changed)
                subjects.append(subject_of(target, call, options.seed, options.grad))
            report = _cut(subjects, ranks, asked)
        except MhaInspectError as error:
            must_run = many or ranks is not None or options.input_shape or options.input
            if must_run or any(map(is_lazy, first.module.parameters())):
                raise
            unrun = Subject(first.module, (), {}, label=first.name, made_with=first.passed, seed=options.seed)
            report = params(unrun, called=False, **asked)
            why = (f"The purpose of the parameters is unknown, because the module cannot be run: {error}",)
    subject.print_notes(first.notes, options)
    return replace(report, notes=(*report.notes, *why))


def _cut(subjects: list[Subject], ranks: int | None, asked: dict[str, Any]) -> ParamsReport:
    """Report the parameters of modules side by side, or with --ranks those of rank 0 of the first one."""
    from ..questions.params import params
    from ..questions.sharding import cut_parameters

    with cut_parameters(subjects[0], ranks) as (cut, every):
        return params(subjects[0], beside=subjects[1:], cut=cut, ranks=every, **asked)
