"""The sides of a diff: the settings of each side, and the layers planned for it. No torch here."""

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
"""Every setting that may be set for one side."""
_OF_RUN = ("dtype", "device", "training", "causal", "padding", "attn_mask", "grad", "need_weights", "average_weights")
"""Settings that apply to a target as they do to a layer."""
_OF_BOTH = ("seed", "batch", "seq_len", "key_len", "unbatched", "input")
"""Settings of the weights and the input, which are the same on both sides."""
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


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
        """Return the options with the other settings of this side. Keys may have hyphens for underscores.

        Raises `SpecError` for a text without `=`, an unknown key (with the nearest, and the list), a key given twice,
        or an invalid value.
        """
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
                setattr(side, _option(name), _read(name, value))
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


def _read(name: str, text: str) -> Any:
    """Return a text as the value of the option of this name. Raises as its parser."""
    hint, declared = Options.__annotations__[_option(name)], getattr(Options, _option(name))
    if text.lower() == "none" and (type(None) in get_args(hint) or name == "padding"):
        return declared.default
    if hint is bool and text.lower() not in _SWITCH:
        raise typer.BadParameter(f"{name} must be true or false.")
    if name in ("num_heads", "padding") and len(text) < 100:
        counts(name, text)
    parser = declared.parser or (Path if Path in get_args(hint) else str)
    return _SWITCH[text.lower()] if hint is bool else parser(text)


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
    """Return a layer with the settings of its side, and without settings that only the `other` layer has.

    Raises `SpecError` if settings contradict each other, or neither layer has one of them.
    """
    kind, names = asked.kind, [setting_of(text) for text in asked.settings]
    changed, usual, ignored = asked.options(options), Options(), []
    changed.layer = kind.name
    for name in OPTIONAL:
        value = getattr(changed, name)
        if name in (*kind.takes, *names) or name not in other.takes or value == getattr(usual, name):
            continue
        setattr(changed, name, getattr(usual, name))
        # A value that changes nothing needs no note.
        if name not in USUAL or str(value) != str(getattr(changed, USUAL[name])):
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
            f"{rows[0]} rows and {rows[1]}. Both sides need the same weights. Try --head-dim {min(widths)}."
        )
