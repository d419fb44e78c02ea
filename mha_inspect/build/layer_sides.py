"""Two layers as the sides of a diff: the settings of each, and what must be the same on both. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, get_args, get_type_hints

from ..errors import SpecError
from ..layers.catalog import LayerKind, find_layer
from ..layers.settings import OPTIONAL, asked_of, check_settings, default_of, settings_in
from ..layers.spec import AttentionSpec, DtypeName, InputSpec, RunSpec
from ..reports.diff import SideName
from ..text import did_you_mean, shown

_HINTS = {name: hint for spec in (AttentionSpec, InputSpec, RunSpec) for name, hint in get_type_hints(spec).items()}
_NULLABLE = ("num_kv_heads", "head_dim", "kdim", "vdim", "key_len", "attn_mask", "input")
"""Settings that may be `none`."""
SETTINGS: dict[str, Any] = {
    name: get_args(_HINTS[name])[0] if NoneType in get_args(_HINTS[name]) else _HINTS[name]
    for name in sorted(_HINTS, key=_NULLABLE.__contains__)
}
"""Every setting that a side may have for itself, with the type of its value."""
_SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_MUST_BE = {
    bool: "true or false",
    float: "a number, as in 0.1",
    **dict.fromkeys((int, tuple[int, ...]), "a whole number, as in 512"),
}
_OTHER_WORDS = {"train": "training"}


def parse_settings(flag: str, texts: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` texts as typed settings; hyphens may stand for underscores.

    Raises `SpecError` for a text without `=`, a key that is none (with the nearest, and the list), a key given twice,
    and a value that is not of its kind.
    """
    settings: dict[str, Any] = {}
    for text in texts:
        typed, equals, value = text.partition("=")
        name = setting_of(text)
        if not equals:
            raise SpecError(f"{flag} {shown(text)} has no value: write KEY=VALUE, as in {flag} dtype=bfloat16.")
        if name not in SETTINGS:
            raise SpecError(_unknown(flag, typed.strip()))
        if name in settings:
            raise SpecError(f"{flag} gives {name} twice, {settings[name]} and {shown(value)}: give it once.")
        settings[name] = _read(flag, name, value.strip())
    return settings


def setting_of(text: str) -> str:
    """Return the name in a `KEY=VALUE` text as settings have it."""
    name = text.partition("=")[0].strip().replace("-", "_").lower()
    return _OTHER_WORDS.get(name, name)


def _read(flag: str, name: str, value: str) -> Any:
    if value.lower() == "none" and name in (*_NULLABLE, "padding"):
        return () if name == "padding" else None
    kind = SETTINGS[name]
    try:
        if kind == tuple[int, ...]:
            return tuple(map(int, filter(None, value.strip("()").split(","))))
        if kind is DtypeName:
            return get_args(kind)[get_args(kind).index(value)]
        return _SWITCH[value.casefold()] if kind is bool else kind(value)
    except (ValueError, TypeError, KeyError):
        must_be = _MUST_BE.get(kind) or f"one of {', '.join(get_args(kind))}"
        raise SpecError(f"{flag} {name}={shown(value)} cannot be read: {name} must be {must_be}.") from None


def _unknown(flag: str, typed: str) -> str:
    return f"{flag} {shown(typed)} is not a setting of a side: {', '.join(SETTINGS)}.{did_you_mean(typed, SETTINGS)}"


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


def written(value: Any) -> str:
    """Return a setting as it would be typed."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def make_sides(
    left: str,
    right: str,
    spec: AttentionSpec,
    inputs: InputSpec,
    run: RunSpec,
    left_set: Mapping[str, Any],
    right_set: Mapping[str, Any],
) -> tuple[LayerSide, LayerSide]:
    """Both sides, with the settings that they share and those that each has for itself.

    A setting that both share is left out on the side whose layer has no use for it, as long as the other's has.

    Raises:
        SpecError: a layer is unknown; a setting is unknown, contradicts others, or is one that the layer has no use
            for; the sides are of sizes that cannot agree.
    """
    kinds = find_layer(left), find_layer(right)
    for flag, settings in (("left_set", left_set), ("right_set", right_set)):
        for name in settings:
            if name not in SETTINGS:
                raise SpecError(_unknown(flag, name))
    one = layer_side("left", kinds[0], spec, inputs, run, left_set, kinds[1])
    other = layer_side("right", kinds[1], spec, inputs, run, right_set, kinds[0])
    require_same_input(one, other)
    _require_same_rows(one, other)
    return one, other


def layer_side(
    name: SideName,
    kind: LayerKind,
    spec: AttentionSpec,
    inputs: InputSpec,
    run: RunSpec,
    settings: Mapping[str, Any],
    other: LayerKind,
) -> LayerSide:
    """Return a layer with its own settings, and those of both that it has a use for where the `other` layer has.

    Raises `SpecError` where the settings contradict each other, or neither layer has a use for one.
    """
    specs: list[Any] = [spec, inputs, run]
    unheard = []
    for setting in OPTIONAL:
        value = asked_of(setting, *specs)
        if value is None or setting in kind.takes or setting not in other.takes or setting in settings:
            continue
        # Where it is the default of the other layer, it was not asked for.
        if not (setting == "head_dim" and other.whole_heads and value == spec.embed_dim):
            unheard.append(f"{kind.name} has no use for {setting} {written(value)}, and is left as it is.")
        specs = [_with(one, {setting: default_of(setting)}) for one in specs]
    try:
        spec, inputs, run = (_with(one, settings) for one in specs)
        spec = kind.own(spec)
    except SpecError as error:
        raise SpecError(f"{name} side: {error}") from None
    check_settings(kind, spec, inputs, run)
    return LayerSide(name, kind, spec, inputs, run, dict(settings), tuple(unheard))


def _with(one: Any, settings: Mapping[str, Any]) -> Any:
    """Return a spec with those of the settings that belong to it."""
    return replace(one, **settings_in(type(one), settings))


def require_same_input(left: LayerSide, right: LayerSide) -> None:
    """Raise `SpecError` that says which of the sizes and numbers is not the same that make weights and input."""
    for (name, ours), theirs in zip(_shared(left).items(), _shared(right).values(), strict=True):
        if ours != theirs:
            raise SpecError(
                f"{name} is {ours} on the left{_why(left, name)} and {theirs} on the right{_why(right, name)}: diff "
                f"gives both the same weights and the same input. {_way_out(left, right, name)}"
            )


def _require_same_rows(left: LayerSide, right: LayerSide) -> None:
    """Raise `SpecError` where the matrices are of other sizes, or one file would have to be laid out in two ways."""
    ours, theirs = (side.spec.num_heads * int(side.spec.head_dim) for side in (left, right))
    if ours != theirs:
        raise SpecError(
            f"head_dim is {int(left.spec.head_dim)} on the left{_why(left, 'head_dim')} and "
            f"{int(right.spec.head_dim)} on the right{_why(right, 'head_dim')}: W_q would have {ours} rows "
            f"and {theirs}, and diff gives both the same weights. {_way_out(left, right, 'head_dim')}"
        )
    if left.inputs.input is not None and (left.spec.batch_first, left.inputs.unbatched) != (
        right.spec.batch_first,
        right.inputs.unbatched,
    ):
        raise SpecError(
            f"The file {left.inputs.input.name} is laid out in one way, and the sides take inputs in two: batch_first "
            "and unbatched must be the same on both. Drop them, or --input."
        )


def _shared(side: LayerSide) -> dict[str, Any]:
    """Return what makes the weights and the input what they are, by name."""
    spec, inputs = side.spec, side.inputs
    widths = {"embed_dim": spec.embed_dim, "kdim": spec.key_width, "vdim": spec.value_width}
    lengths = {"batch": inputs.batch, "seq_len": inputs.seq_len, "key_len": inputs.keys}
    return {"seed": spec.seed, **widths, **lengths, "input": inputs.input}


def _why(side: LayerSide, name: str) -> str:
    if name in side.settings:
        return ""
    if name == "head_dim" and side.kind.whole_heads and side.spec.head_dim == side.spec.embed_dim:
        return f" ({side.kind.name}: each head has the whole embed_dim)"
    if name in OPTIONAL and name not in side.kind.takes:
        return f" ({side.kind.name} has no other {name})"
    return ""


def _way_out(left: LayerSide, right: LayerSide, name: str) -> str:
    if name in OPTIONAL:
        for side, other in ((left, right), (right, left)):
            if name in side.kind.takes and name not in other.kind.takes:
                value = int(other.spec.head_dim) if name == "head_dim" else _shared(other)[name]
                return f"Try --{name.replace('_', '-')} {value}."
    return f"Give one {name} for both: --{name.replace('_', '-')}, and not --left-set or --right-set."
