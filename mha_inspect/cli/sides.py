"""The sides of a diff: what is said of one alone, and the layers that are planned for it. No torch here."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import typer

from ..errors import SpecError
from ..layers.catalog import OPTIONAL, USUAL, LayerKind, find_layer
from ..layers.spec import AttentionSpec, InputSpec, RunSpec
from ..text import did_you_mean, shown
from . import subject
from .options import Options, counts, is_target

if TYPE_CHECKING:
    from ..reports.diff import SideName

SETTINGS = tuple(name.name for spec in (AttentionSpec, InputSpec, RunSpec) for name in fields(spec))
"""Every setting that a side may have for itself."""
_OF_RUN = ("dtype", "device", "training", "causal", "padding", "attn_mask", "grad", "need_weights", "average_weights")
"""Settings of a side that a target has under the names of our options, as a layer has them."""
_OF_BOTH = ("seed", "batch", "seq_len", "key_len", "unbatched", "input")
"""What makes the weights and the input, and is the same on both sides."""
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class AskedSide:
    """What the command line says of one side."""

    name: SideName
    text: str
    settings: list[str]
    path: str | None
    """The module of the target that is the side; None: the whole target."""

    @property
    def flag(self) -> str:
        """The flag that gives it settings of its own."""
        return f"--{self.name}-set"

    @property
    def is_target(self) -> bool:
        """Whether it is a module of somebody's own, and not a layer of the catalog."""
        return is_target(self.text)

    @property
    def kind(self) -> LayerKind:
        """The layer that it is. Raises `SpecError` where there is none, or a module of it is named."""
        if self.path is not None:
            raise SpecError(
                f"--{self.name}-module {shown(self.path)} names a module of a target, and that side is a layer. "
                "Drop it."
            )
        return find_layer(self.text)

    @property
    def of_constructor(self) -> list[str]:
        """The settings of a target that are arguments of its own, and do not say how it is run."""
        return [text for text in self.settings if self.is_target and setting_of(text) not in _OF_RUN]

    def options(self, options: Options) -> Options:
        """Return the options with the other settings of this side: hyphens may stand for underscores.

        Raises `SpecError` for a text without `=`, a key that is none (with the nearest, and the list) or given twice,
        and a value that is not of its kind.
        """
        side, names = copy(options), set[str]()
        for text in [text for text in self.settings if text not in self.of_constructor]:
            typed, equals, value = (part.strip() for part in text.partition("="))
            name = setting_of(text)
            if not equals:
                raise SpecError(
                    f"{self.flag} {shown(text)} has no value: write KEY=VALUE, as in {self.flag} dtype=bfloat16."
                )
            if name not in SETTINGS:
                raise SpecError(
                    f"{self.flag} {shown(typed)} is not a setting of a side: {', '.join(SETTINGS)}."
                    f"{did_you_mean(typed, SETTINGS)}"
                )
            if name in names:
                raise SpecError(f"{self.flag} gives {name} twice: give it once.")
            names.add(name)
            if name in _OF_BOTH:
                raise SpecError(
                    f"{self.flag} {name} is for both sides: diff gives both the same weights and the same input. Give "
                    f"--{name.replace('_', '-')} in its place."
                )
            try:
                setattr(side, _option(name), _read(name, value))
            except typer.BadParameter as error:
                raise SpecError(f"{self.flag} {name}={shown(value)} cannot be read: {error.message}") from None
            side.given, side.typed = side.given | {_option(name)}, side.typed | {_option(name)}
        return side


def setting_of(text: str) -> str:
    """Return the name in a `KEY=VALUE` text as settings have it."""
    name = text.partition("=")[0].strip().replace("-", "_").lower()
    return "training" if name == "train" else name


def _option(name: str) -> str:
    return "train" if name == "training" else name


def _read(name: str, text: str) -> Any:
    """Return the value that a text says, as the option of this name has it. Raises as its parser."""
    hint, declared = Options.__annotations__[_option(name)], getattr(Options, _option(name))
    if text.lower() == "none" and (type(None) in get_args(hint) or name == "padding"):
        return declared.default
    if hint is bool and text.lower() not in _SWITCH:
        raise typer.BadParameter(f"{name} is true or false.")
    if name in ("num_heads", "padding") and len(text) < 100:
        counts(name, text)
    parser = declared.parser or (Path if Path in get_args(hint) else str)
    return _SWITCH[text.lower()] if hint is bool else parser(text)


@dataclass(frozen=True)
class PlannedLayer:
    """A layer as one side of a diff: what is built, what goes in, how it is run."""

    kind: LayerKind
    spec: AttentionSpec
    inputs: InputSpec
    run: RunSpec
    settings: dict[str, Any]
    """What was set for this side alone."""
    unheard: tuple[str, ...]
    """Sentences: settings that were given for both, and for which this layer has no use."""


def planned_layer(options: Options, asked: AskedSide, other: LayerKind) -> PlannedLayer:
    """Return a layer with its own settings, and those of both that it has a use for where the `other` layer has.

    Raises `SpecError` where the settings contradict each other, or neither layer has a use for one.
    """
    kind, names = asked.kind, [setting_of(text) for text in asked.settings]
    changed, usual, unheard = asked.options(options), Options(), []
    changed.layer = kind.name
    for name in OPTIONAL:
        value = getattr(changed, name)
        if name in (*kind.takes, *names) or name not in other.takes or value == getattr(usual, name):
            continue
        setattr(changed, name, getattr(usual, name))
        # What comes to the same is left as it is without a word.
        if name not in USUAL or str(value) != str(getattr(changed, USUAL[name])):
            typed = str(value).lower() if isinstance(value, bool) else value
            unheard.append(f"{kind.name} has no use for {name} {typed}, and is left as it is.")
    try:
        spec = subject.attention(changed, subject.single_head_count(changed, "diff"))
        inputs, run = subject.inputs(changed), subject.run(changed)
    except SpecError as error:
        raise SpecError(f"{asked.name} side: {error}" if names else str(error)) from None
    kind.check(spec, inputs, run)
    values = {name: getattr(part, name) for part in (spec, inputs, run) for name in part.__dataclass_fields__}
    return PlannedLayer(kind, spec, inputs, run, {name: values[name] for name in names}, tuple(unheard))


def require_same_rows(left: PlannedLayer, right: PlannedLayer) -> None:
    """Let it pass where both can have the same weights, for all that their heads tell. Raises `SpecError` otherwise."""
    widths = [int(side.spec.head_dim) for side in (left, right)]
    rows = [side.spec.num_heads * width for side, width in zip((left, right), widths, strict=True)]
    whole, none = " ({}: each head has the whole embed_dim)", " ({} has no other head_dim)"
    kinds = [(side.kind, whole if side.kind.whole_heads else none) for side in (left, right)]
    why = [text.format(kind.name) if kind.whole_heads or "head_dim" not in kind.takes else "" for kind, text in kinds]
    if rows[0] != rows[1] and left.spec.embed_dim == right.spec.embed_dim:
        raise SpecError(
            f"head_dim is {widths[0]} on the left{why[0]} and {widths[1]} on the right{why[1]}: W_q would have "
            f"{rows[0]} rows and {rows[1]}, and diff gives both the same weights. Try --head-dim {min(widths)}."
        )
