"""The sides of a diff: what is said of one alone, and the layers that are planned for it. No torch here."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from ..errors import SpecError
from ..layers.catalog import OPTIONAL, USUAL, LayerKind
from ..layers.spec import AttentionSpec, DtypeName, InputSpec, RunSpec
from ..text import did_you_mean, shown
from . import subject
from .options import DTYPES, Options

if TYPE_CHECKING:
    from ..call.triple import Triple
    from ..reports.diff import SideName
    from ..running.subject import Subject

_NAMES = [name.name for spec in (AttentionSpec, InputSpec, RunSpec) for name in fields(spec)]
SETTINGS = {name: Options.__annotations__["train" if name == "training" else name] for name in _NAMES}
"""Every setting that a side may have for itself, with the type of the option."""
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_MUST_BE = {bool: "true or false", float: "a number, as in 0.1", int: "a whole number, as in 512"}
_SHARED = ("seed", "embed_dim", "kdim", "vdim", "batch", "seq_len", "key_len", "input")
"""What makes the weights and the input."""
OF_RUN = frozenset(
    {"dtype", "device", "training", "causal", "padding", "attn_mask", "grad", "need_weights", "average_weights"}
)
"""Settings of a side that a target has under the names of our options, whatever its own arguments are called."""


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
        """Return the flag that gives it settings of its own."""
        return f"--{self.name}-set"

    def require_no_module(self) -> None:
        """Raise `SpecError` where a module is named of what is a layer."""
        if self.path is not None:
            raise SpecError(
                f"--{self.name}-module {shown(self.path)} names a module of a target, and that side is a layer. "
                "Drop it."
            )

    def of_run(self) -> AskedSide:
        """Return the side with those settings alone that a target has under the names of our options."""
        return replace(self, settings=[text for text in self.settings if setting_of(text) in OF_RUN])

    def options(self, options: Options) -> Options:
        """Return the options with the settings of this side: hyphens may stand for underscores.

        Raises `SpecError` for a text without `=`, a key that is none (with the nearest, and the list) or given twice,
        and a value that is not of its kind.
        """
        side, names = copy(options), set[str]()
        for text in self.settings:
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
            option = "train" if name == "training" else name
            setattr(side, option, self._read(name, value))
            side.given, side.typed = side.given | {option}, side.typed | {option}
        return side

    def _read(self, name: str, text: str) -> Any:
        kinds = get_args(SETTINGS[name]) or (SETTINGS[name],)
        if text.lower() == "none" and (type(None) in kinds or name == "padding"):
            return "" if name == "padding" else None
        kind = int if name in ("num_heads", "padding") else kinds[0]
        try:
            if kind is int:
                numbers = [int(part) for part in text.split(",")] if len(text) < 100 else []
                if len(numbers) != 1 and name != "padding":
                    raise ValueError
                return text if name in ("num_heads", "padding") else numbers[0]
            if name == "dtype":
                return DTYPES[DTYPES.index(text)]
            return _SWITCH[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            must_be = _MUST_BE.get(kind, f"one of {', '.join(DTYPES)}")
            raise SpecError(f"{self.flag} {name}={shown(text)} cannot be read: {name} must be {must_be}.") from None


def setting_of(text: str) -> str:
    """Return the name in a `KEY=VALUE` text as settings have it."""
    name = text.partition("=")[0].strip().replace("-", "_").lower()
    return "training" if name == "train" else name


@dataclass(frozen=True)
class LayerSide:
    """A layer as one side of a diff: what is built, what goes in, how it is run."""

    name: SideName
    kind: LayerKind
    spec: AttentionSpec
    inputs: InputSpec
    run: RunSpec
    settings: dict[str, Any] = field(default_factory=dict)
    """What was set for this side alone."""
    unheard: tuple[str, ...] = ()
    """Sentences: settings that were given for both, and for which this layer has no use."""

    def build(self, dtype: DtypeName | None = None, given: Triple | None = None) -> Subject:
        """Build the layer, in another dtype or with inputs that are given. Raises as `load_layer`."""
        from ..call.load import load_layer

        spec = replace(self.spec, dtype=dtype or self.spec.dtype)
        return replace(load_layer(spec, self.inputs, self.run, self.kind.name, given), notes=self.unheard)

    def shared(self, name: str) -> Any:
        """Return one of the sizes and numbers that make the weights and the input."""
        alias = {"kdim": "key_width", "vdim": "value_width", "key_len": "keys"}.get(name, name)
        return getattr(self.spec if hasattr(self.spec, alias) else self.inputs, alias)


def layer_side(options: Options, asked: AskedSide, kind: LayerKind, other: LayerKind) -> LayerSide:
    """Return a layer with its own settings, and those of both that it has a use for where the `other` layer has.

    Raises `SpecError` where the settings contradict each other, or neither layer has a use for one.
    """
    names = [setting_of(text) for text in asked.settings]
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
    return LayerSide(asked.name, kind, spec, inputs, run, {name: values[name] for name in names}, tuple(unheard))


def require_alike(left: LayerSide, right: LayerSide) -> None:
    """Let it pass where both sides can have the same weights and the same input. Raises `SpecError` otherwise."""
    for name in _SHARED:
        if left.shared(name) != right.shared(name):
            raise SpecError(
                f"{name} is {left.shared(name)} on the left{_why(left, name)} and {right.shared(name)} on the right"
                f"{_why(right, name)}: diff gives both the same weights and the same input. "
                f"{_way_out(left, right, name)}"
            )
    widths = [int(side.spec.head_dim) for side in (left, right)]
    rows = [side.spec.num_heads * width for side, width in zip((left, right), widths, strict=True)]
    if rows[0] != rows[1]:
        raise SpecError(
            f"head_dim is {widths[0]} on the left{_why(left, 'head_dim')} and {widths[1]} on the right"
            f"{_why(right, 'head_dim')}: W_q would have {rows[0]} rows and {rows[1]}, and diff gives both the same "
            f"weights. {_way_out(left, right, 'head_dim')}"
        )
    layouts = {(side.spec.batch_first, side.inputs.unbatched) for side in (left, right)}
    if left.inputs.input is not None and len(layouts) > 1:
        raise SpecError(
            f"The file {left.inputs.input.name} is laid out in one way, and the sides take inputs in two: batch_first "
            "and unbatched must be the same on both. Drop them, or --input."
        )


def _why(side: LayerSide, name: str) -> str:
    """Return why a side has the size that it has, in brackets; empty where it was set."""
    if name in side.settings:
        return ""
    if name == "head_dim" and side.kind.whole_heads and side.spec.head_dim == side.spec.embed_dim:
        return f" ({side.kind.name}: each head has the whole embed_dim)"
    return f" ({side.kind.name} has no other {name})" if name in OPTIONAL and name not in side.kind.takes else ""


def _way_out(left: LayerSide, right: LayerSide, name: str) -> str:
    flag = f"--{name.replace('_', '-')}"
    for side, other in ((left, right), (right, left)):
        if name in OPTIONAL and name in side.kind.takes and name not in other.kind.takes:
            return f"Try {flag} {int(other.spec.head_dim) if name == 'head_dim' else other.shared(name)}."
    return f"Give one {name} for both: {flag}, and not --left-set or --right-set."
