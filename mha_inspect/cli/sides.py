"""Read, check and build the two sides of a diff, each with settings of its own."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

import typer

from ..errors import NoMaskError, SpecError
from ..layers.catalog import OPTIONAL, LayerKind, find_layer
from ..layers.catalog import USUAL as SAME_SIZE
from ..layers.spec import AttentionSpec, InputSpec, RunSpec
from ..text import did_you_mean, shown
from . import subject
from .options import Options, is_target, read_setting, require_numbers

if TYPE_CHECKING:
    from ..answers.diff import Side
    from ..call.call import Call
    from ..layers.spec import DtypeName
    from ..reports.diff import SideName
    from ..running.subject import Subject


USUAL = ("torch", "per-head")
"""The default sides: projections split into heads, and one matrix for each head."""
_FINEST = ("float64", "float32", "float16", "bfloat16")
SETTINGS = tuple(name.name for spec in (AttentionSpec, InputSpec, RunSpec) for name in fields(spec))
"""Every setting that may be set for one side."""
_OF_RUN = ("dtype", "device", "training", "causal", "padding", "attn_mask", "grad", "need_weights", "average_weights")
"""Settings that apply to a target as they do to a layer."""
_OF_BOTH = ("seed", "batch", "seq_len", "key_len", "unbatched", "input")
"""Settings of the weights and the input, which are the same on both sides."""
_SHAPES = " For shapes: `mha-inspect trace --device meta`."


@dataclass(frozen=True)
class AskedSide:
    """One side, as on the command line."""

    name: SideName
    text: str
    settings: list[str]
    path: str | None
    """The module of the target to compare; None for the whole target."""

    @property
    def flag(self) -> str:
        """The flag of this side's settings."""
        return f"--{self.name}-set"

    @property
    def is_target(self) -> bool:
        """Whether it is a target rather than a layer of the catalog."""
        return is_target(self.text)

    @property
    def kind(self) -> LayerKind:
        """The layer of the catalog. Raises `SpecError` for an unknown layer, or for a module of a layer."""
        if self.path is not None:
            raise SpecError(
                f"--{self.name}-module {shown(self.path)} needs a target, and the {self.name} side is a layer. Drop it."
            )
        return find_layer(self.text)

    @property
    def of_constructor(self) -> list[str]:
        """The settings that are arguments of a target's constructor, rather than of its run."""
        return [text for text in self.settings if self.is_target and setting_of(text) not in _OF_RUN]

    def options(self, options: Options) -> Options:
        """Return the options with the other settings of this side. Keys may have hyphens for underscores."""
        side, names = copy(options), set[str]()
        for text in [text for text in self.settings if text not in self.of_constructor]:
            typed, equals, value = (part.strip() for part in text.partition("="))
            name = setting_of(text)
            if not equals:
                raise SpecError(
                    f"{self.flag} {shown(text)} has no value: write KEY=VALUE, e.g. {self.flag} dtype=bfloat16."
                )
            if name not in SETTINGS:
                raise SpecError(
                    f"{self.flag} {shown(typed)} is not a setting. Settings: {', '.join(SETTINGS)}."
                    f"{did_you_mean(typed, SETTINGS)}"
                )
            if name in names:
                raise SpecError(f"{self.flag} gives {name} twice. Give it once.")
            names.add(name)
            if name in _OF_BOTH:
                raise SpecError(
                    f"{self.flag} {name} affects both sides, which have the same weights and the same input. Use "
                    f"--{name.replace('_', '-')} instead."
                )
            try:
                setattr(side, _option(name), read_setting(_option(name), value))
            except typer.BadParameter as error:
                raise SpecError(f"{self.flag} {name}={shown(value)} is invalid: {error.message}") from None
            side.given, side.typed = side.given | {_option(name)}, side.typed | {_option(name)}
        return side


def setting_of(text: str) -> str:
    """Return the name of the setting in a `KEY=VALUE` text."""
    name = text.partition("=")[0].strip().replace("-", "_").lower()
    return "training" if name == "train" else name


def _option(name: str) -> str:
    return "train" if name == "training" else name


@dataclass(frozen=True)
class PlannedLayer:
    """A layer as one side of a diff: how it is built, its inputs, and how it is run."""

    kind: LayerKind
    spec: AttentionSpec
    inputs: InputSpec
    run: RunSpec
    settings: dict[str, Any]
    """The settings of this side only."""
    ignored: tuple[str, ...]
    """Sentences about settings of both sides that this layer does not have."""


def planned_layer(options: Options, asked: AskedSide, other: LayerKind) -> PlannedLayer:
    """Return a layer with the settings of its side, and without settings that only the `other` layer has."""
    kind, names = asked.kind, [setting_of(text) for text in asked.settings]
    changed, usual, ignored = asked.options(options), Options(), []
    changed.layer = kind.name
    for name in OPTIONAL:
        value = getattr(changed, name)
        if name in (*kind.takes, *names) or name not in other.takes or value == getattr(usual, name):
            continue
        setattr(changed, name, getattr(usual, name))
        # A value that changes nothing needs no note.
        if name not in SAME_SIZE or str(value) != str(getattr(changed, SAME_SIZE[name])):
            typed = str(value).lower() if isinstance(value, bool) else value
            ignored.append(f"{kind.name} has no setting {name}: {name} {typed} applies to the other side only.")
    try:
        spec = subject.attention(changed, subject.single_head_count(changed, "diff"))
        inputs, run = subject.inputs(changed), subject.run(changed)
    except SpecError as error:
        raise SpecError(f"{asked.name} side: {error}" if names else str(error)) from None
    kind.check(spec, inputs, run)
    values = {name: getattr(part, name) for part in (spec, inputs, run) for name in part.__dataclass_fields__}
    return PlannedLayer(kind, spec, inputs, run, {name: values[name] for name in names}, tuple(ignored))


def require_same_rows(left: PlannedLayer, right: PlannedLayer) -> None:
    """Raise `SpecError` if the sizes of their heads keep both sides from having the same weights."""
    widths = [int(side.spec.head_dim) for side in (left, right)]
    rows = [side.spec.num_heads * width for side, width in zip((left, right), widths, strict=True)]
    whole, none = " ({}: each head has the whole embed_dim)", " ({} has no other head_dim)"
    kinds = [(side.kind, whole if side.kind.whole_heads else none) for side in (left, right)]
    why = [text.format(kind.name) if kind.whole_heads or "head_dim" not in kind.takes else "" for kind, text in kinds]
    if rows[0] != rows[1] and left.spec.embed_dim == right.spec.embed_dim:
        raise SpecError(
            f"head_dim is {widths[0]} on the left{why[0]} and {widths[1]} on the right{why[1]}: W_q would have "
            f"{rows[0]} rows and {rows[1]}. Both sides need the same weights. Try --set head_dim={min(widths)}."
        )


def checked_sides(options: Options, left: AskedSide, right: AskedSide) -> tuple[AskedSide, AskedSide]:
    """Return both sides, checked as far as possible before torch is imported.

    A side that is not named is --layer. Otherwise the right side is the left one with other settings, or per-head for
    a layer (torch if per-head is on the left).
    """
    from ..making.arguments import parse_settings

    has_target, both_named = left.is_target or right.is_target, bool(left.text and right.text)
    if not has_target:
        options.take_settings("diff")
    if both_named and not has_target and options.layer not in ("torch", left.text, right.text):
        raise SpecError(
            f"layer {options.layer} is a third layer beside {left.text} and {right.text}, and diff compares two. "
            "Drop --layer."
        )
    first, second = left.text or options.layer, right.text
    if not second and "layer" in options.typed and options.layer != first:
        second = options.layer
    elif not second and (left.settings or right.settings or right.path):
        second = first
    usual = options.layer if has_target else next(name for name in reversed(USUAL) if name != first)
    sides = replace(left, text=first), replace(right, text=second or usual)
    for side in sides:
        if side.is_target:
            subject.check_target(side.text, options, "diff", beside_layer=not both_named)
            parse_settings(side.settings, side.flag)
        else:
            _ = side.kind
        changed = side.options(options)
        require_numbers(changed.device, "compare", _SHAPES)
        subject.inputs(changed)
    subject.single_head_count(options, "diff")
    if not has_target:
        kinds = sides[0].kind, sides[1].kind
        require_same_rows(planned_layer(options, sides[0], kinds[1]), planned_layer(options, sides[1], kinds[0]))
    return sides


def runs(options: Options, left: AskedSide, right: AskedSide) -> tuple[Side, Side]:
    """Build both sides, and run the targets. The side built second gets the inputs of the first.

    A module of a model is built first: it determines the other side's sizes and arguments. A layer is built last. Of
    two layers it is the one of lower precision: its input and weights are those of the other, rounded.
    """
    first, second = (right, left) if left.path is None and right.path is not None else (left, right)
    dtypes = [_FINEST.index(side.options(options).dtype) if not side.is_target else -1 for side in (first, second)]
    if dtypes[1] < dtypes[0]:
        first, second = second, first
    side, call = _built(options, first, second)
    other, _ = _built(options, second, first, (side, call))
    return (side, other) if first is left else (other, side)


def _built(
    options: Options, asked: AskedSide, other: AskedSide, beside: tuple[Side, Call] | None = None
) -> tuple[Side, Call]:
    """Build a side, and return it with its forward's arguments: those of the side `beside` it, if there is one."""
    from ..answers.diff import Side, sizes_of
    from ..call.call import explaining
    from ..call.load import load_layer, subject_of
    from ..call.part import call_with, part_of, with_arguments_of, with_the_same
    from ..making.arguments import parse_settings

    finish: Callable[[Call], Subject]
    if asked.is_target:
        set_options = asked.options(options)
        taken = frozenset() if other.is_target else frozenset({"embed_dim", "num_heads", "bias"}) | other.kind.takes
        # Beside a module of a model, a whole target gets the sizes and arguments of that module.
        of_part = beside if other.path is not None and asked.path is None else None
        sizes = {} if of_part is None else sizes_of(of_part[0])
        target = subject.load_target(asked.text, set_options, asked.of_constructor, sizes, taken, asked.flag)
        target = target if of_part is None else with_arguments_of(target, of_part[1])
        try:
            call = subject.call_of(target, set_options)
        except NoMaskError as error:
            if not options.causal:
                raise
            way = f"For the other side only: --{other.name}-set causal=true."
            raise SpecError(f"{error} {way}") from None
        target, call = (target, call) if asked.path is None else part_of(target, call, asked.path)
        settings = dict[str, Any](parse_settings(asked.settings))
        # A lambda, because both branches make one and mypy rejects two `def`s of one name.
        finish = lambda call: subject_of(target, call, options.seed, set_options.grad)  # noqa: E731 - said above
    else:
        if beside is not None and other.is_target:
            options = _sized_like(options, asked, *beside)
        plan = planned_layer(options, asked, asked.kind if other.is_target else other.kind)
        layer = replace(load_layer(plan.spec, plan.inputs, plan.run, plan.kind.name), notes=plan.ignored)
        call = call_with(layer.module, layer.args, layer.kwargs, "" if beside is None else beside[1].origin)
        settings, finish = plan.settings, lambda call: replace(layer, args=call.args, kwargs=call.kwargs)
    finer = None
    if beside is not None:
        module, shared = finish(call).module, (beside[1], beside[0].subject.module)
        finer = finish(with_the_same(call, module, *shared, rounded=False))
        call = with_the_same(call, module, *shared)
        if not asked.is_target and not other.is_target and beside[0].dtype != plan.spec.dtype:
            spec = replace(plan.spec, dtype=cast("DtypeName", beside[0].dtype))  # its weights have this dtype too
            finer = replace(finer, module=plan.kind.build(spec, plan.run.device))
    side = Side(asked.name, finish(call), settings, finer)
    if asked.is_target or options.input is not None:  # a file may contain tensors that a layer rejects
        with explaining(side.subject):
            _ = side.run
    return side, call


def _sized_like(options: Options, asked: AskedSide, beside: Side, call: Call) -> Options:
    """Return the options of a layer with the sizes of the target beside it, except for sizes that the user set."""
    from ..answers.diff import sizes_of
    from ..call.part import layer_inputs

    query, key, value = layer_inputs(beside.subject.module, call)
    is_sequence_first = query.dim() == 3 and not call.batch_first
    batch, length = (1, 0) if is_sequence_first else (0, query.dim() - 2)
    width, usual, kind = query.shape[-1], Options(), asked.kind
    # An environment variable is for all commands: another width in it is not a contradiction.
    if "embed_dim" in options.typed and options.embed_dim != width:
        module = beside.subject.label
        raise SpecError(
            f"embed_dim {options.embed_dim} contradicts {module}, which takes {width} features: both sides get "
            f"the same input. Drop --embed-dim, or give {module} another size: --{beside.name}-set NAME=VALUE."
        )
    sizes = {"num_heads": int(usual.num_heads), "bias": True, **sizes_of(beside)}
    heads = sizes["num_heads"]
    fitting = {"num_heads": str(heads), "bias": sizes["bias"], **{name: getattr(usual, name) for name in OPTIONAL}}
    if "num_kv_heads" in kind.takes and sizes.get("num_kv_heads", heads) != heads:
        fitting["num_kv_heads"] = sizes["num_kv_heads"]
    if "head_dim" in kind.takes and sizes.get("head_dim", 0) * heads not in (0, width):
        fitting["head_dim"] = sizes["head_dim"]
    if "dtype" not in beside.settings:  # set for that side only
        fitting["dtype"] = beside.dtype
    user_set = {name for name in options.given if name not in OPTIONAL or name in kind.takes}
    of_input = {
        "unbatched": query.dim() == 2,
        "batch_first": True,
        "input": None,
        "batch": 1 if query.dim() == 2 else query.shape[batch],
        "seq_len": query.shape[length],
        "key_len": None if key is query else key.shape[length],
        "embed_dim": width,
        "kdim": None if key.shape[-1] == width else key.shape[-1],
        "vdim": None if value.shape[-1] == width else value.shape[-1],
    }
    sized = copy(options)
    sized.__dict__.update({name: size for name, size in fitting.items() if name not in user_set} | of_input)
    return sized
