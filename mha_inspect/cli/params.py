"""`mha-inspect params`: every parameter, and which part of it belongs to which head."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..build.vocabulary import dashed
from ..errors import ExitCode, MhaInspectError, SpecError
from ..files.checkpoint import is_checkpoint
from ..layers.catalog import LAYERS
from ..text import shown
from . import subject
from .app import command
from .options import TARGET, Options, option
from .output import Drawn, give, prepare, require_drawable

if TYPE_CHECKING:
    from ..reports.params import ParamsReport

PANEL = "Params"
_OF_INPUTS = ("causal", "padding", "attn_mask", "input")
"""Options that say more of the inputs than their sizes: a layer's parameters do not depend on them."""
_OF_CHECKPOINT = ("num_heads", "stats", "values", "precision", "edge_items")
"""Options that a checkpoint has a use for by itself; a module beside it takes all of them."""


@command(
    "params --embed-dim 512 --num-heads 8 --per-head",
    "params --embed-dim 512 --num-heads 1,2,4,8",
    without=("grad", "need_weights", "average_weights", "ops"),
)
def params(
    options: Options,
    target: str | None = TARGET,
    per_head: bool = option(PANEL, "Show the rows and columns of each head, read off a run of it.", False),
    picture: bool = option(
        PANEL, "Draw how large each head's part of W_q, W_k, W_v and W_o is.", False, allow_from_autoenv=False
    ),
    like: str | None = option(
        PANEL,
        "Hold a checkpoint against this TARGET, built without memory: what does not fit, and what tensors are for.",
        metavar="TARGET",
        show_default="what names tell",
    ),
    module: str | None = option(
        PANEL, "Show, and read, the tensors of a checkpoint below this path alone.", metavar="PATH"
    ),
) -> ExitCode:
    """Show every parameter tensor: its name, shape, axes and count, and what it is for.

    With a list, as in --num-heads 1,2,4,8, it sets the head counts side by side.

    TARGET is a class, a function that returns a module, or a module of your own: its arguments come from --set and from
    the options under the names that it has for them. Importing it runs its code. Its forward is run once, on inputs as
    trace makes them: what each parameter is for, and which rows and columns belong to which head, is read off that run.

    TARGET may also be a checkpoint: a .safetensors, .pt, .pth or .bin file, an index of shards, or a folder of a model.
    Its headers are read and nothing is run: what the tensors are for is told by their names and shapes. With --like it
    is held against a module, which is run without memory, and --stats, --values and --picture read the tensors.
    """
    is_file = target is not None and is_checkpoint(target)
    heads = () if is_file else subject.head_counts(options)
    if is_file:
        _check_checkpoint(str(target), options, like)
    elif like is not None or module is not None:
        raise SpecError(
            f"--{'like' if like is not None else 'module'} is for a checkpoint, and "
            f"{'none was named' if target is None else f'{shown(target)} is none'}. As in mha-inspect params "
            "model.safetensors --like hf:gpt2."
        )
    elif target is not None:
        subject.check_target(target, options, "params", many_heads=True)
        if len(heads) > 1:
            subject.require_open_head_count(options, heads, "--num-heads gives the counts.")
    else:
        options.require_no_target_settings("params")
        subject.check_layer(options, heads)
        for name in sorted(options.typed & {*_OF_INPUTS}):
            raise SpecError(
                f"{dashed(name)} says what goes in, and a layer has the same parameters whatever does: drop it."
            )
    asked: dict[str, Any] = {"show": subject.show(options), "per_head": per_head, "norms": picture}
    if picture:
        require_drawable(options, in_json=True)
    reads = picture or options.stats or options.values
    export = prepare(options, draws=picture, computes=not is_file or reads or like is not None)
    if is_file:
        asked |= {"show": asked["show"] if options.stats or options.values else None, "module": module or ""}
        report = _of_checkpoint(str(target), options, like, asked)
    elif target is None:
        report = _of_layer(options, heads, asked)
    else:
        report = _of_target(target, options, heads, asked)
    drawn = None
    if report.head_norms is not None:
        from ..pictures.stages import norms_picture

        drawn = Drawn((norms_picture(report.head_norms),))
    give(report, options, export, drawn)
    return ExitCode.OK


def _check_checkpoint(text: str, options: Options, like: str | None) -> None:
    """Look at what can be judged before a file is read. Raises `MhaInspectError` where an option is of no use."""
    if like is None:
        options.require_of_use_to_a_file(text, *_OF_CHECKPOINT)
    elif like in LAYERS:
        subject.check(None, options, "params")
    else:
        subject.check_target(like, options, "params")


def _of_checkpoint(text: str, options: Options, like: str | None, asked: dict[str, Any]) -> ParamsReport:
    """Read a checkpoint; beside a target, or a layer by its name, that is built without memory."""
    from ..answers.checkpoint.params import params_of_checkpoint

    if like is None:
        count = subject.single_head_count(options, "a checkpoint") if "num_heads" in options.typed else None
        with subject.waiting(options, f"reading {text}"):
            return params_of_checkpoint(Path(text), num_heads=count, **asked)
    with subject.running(options, f"reading {text}"):
        on_meta = copy(options)
        on_meta.device = "meta"
        on_meta.layer = like if like in LAYERS else options.layer
        beside = subject.load(None if like in LAYERS else like, on_meta)
        return params_of_checkpoint(Path(text), like=beside, **asked)


def _of_layer(options: Options, heads: tuple[int, ...], asked: dict[str, Any]) -> ParamsReport:
    with subject.running(options, f"reading {options.layer}"):
        from ..answers.params import INPUTS, params
        from ..call.load import load_layer

        specs, run = [subject.attention(options, count) for count in heads], subject.run(options)
        first, *others = [load_layer(spec, INPUTS, run, options.layer) for spec in specs]
        return params(first, beside=others, **asked)


def _of_target(text: str, options: Options, heads: tuple[int, ...], asked: dict[str, Any]) -> ParamsReport:
    """Report the parameters of a target, and what they are for by one call of it; else why there is none."""
    many, why = len(heads) > 1, ""
    with subject.running(options, f"reading {text}"):
        from torch.nn.parameter import is_lazy

        from ..answers.params import params
        from ..call.load import subject_of
        from ..running.subject import Subject

        each = [subject.with_heads(options, count) for count in heads] if many else [options]
        targets = [subject.load_target(text, changed) for changed in each]
        first = targets[0]
        if many:
            subject.require_head_count(first, "params")
        try:
            calls = zip(targets, map(subject.call_of, targets, each), strict=True)
            subjects = [subject_of(target, call, options.seed, options.grad) for target, call in calls]
            report = params(subjects[0], beside=subjects[1:], **asked)
        except MhaInspectError as error:
            if many or options.input_shape or options.input or any(map(is_lazy, first.module.parameters())):
                raise
            unrun = Subject(first.module, (), {}, label=first.name, made_with=first.passed, seed=options.seed)
            report = params(unrun, called=False, **asked)
            why = f"What they are for is read off a run, and there is none: {error}"
    subject.tell(first.notes, options)
    return replace(report, notes=(*report.notes, *filter(None, [why])))
