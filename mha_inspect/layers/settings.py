"""Which settings a layer has a use for, and the defaults that are its own. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..errors import SpecError
from .catalog import LAYERS, LayerKind
from .spec import AttentionSpec, DerivedInt, InputSpec, RunSpec

OPTIONAL = {
    "num_kv_heads": "it has one key and value head for every head",
    "head_dim": "its heads have embed_dim / num_heads features",
    "rope": "it knows nothing of positions",
    "kdim": "its keys are as wide as its queries",
    "vdim": "its values are as wide as its queries",
    "add_bias_kv": "it appends nothing to the sequence",
    "add_zero_attn": "it appends nothing to the sequence",
    "dropout": "it drops no weights",
    "batch_first": "its inputs are batch first",
    "unbatched": "its inputs have a batch",
    "need_weights": "it always returns its weights",
}
"""The settings that some layers have no use for, and why."""


def asked_of(name: str, *specs: AttentionSpec | InputSpec | RunSpec) -> object:
    """Return what was asked of a setting, or None where a layer is left as it is without it."""
    (own,) = [spec for spec in specs if name in spec.__dataclass_fields__]
    value, widths = getattr(own, name), {"num_kv_heads": "num_heads", "kdim": "embed_dim", "vdim": "embed_dim"}
    usual = (default_of(name), getattr(own, widths[name]) if name in widths else None)
    return None if value in usual or isinstance(value, DerivedInt) else value


def default_of(name: str) -> Any:
    """Return what a setting is where nobody gives it."""
    return next(own.default for cls in (AttentionSpec, InputSpec, RunSpec) for own in fields(cls) if own.name == name)


def settings_in(cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that are fields of one of the specs."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in settings.items() if name in names}


def check_settings(kind: LayerKind, spec: AttentionSpec, inputs: InputSpec, run: RunSpec) -> None:
    """Refuse a setting that the layer has no use for, rather than leave it unheard.

    Raises `SpecError`, which says which layers have it.
    """
    for name, why in OPTIONAL.items():
        value = asked_of(name, spec, inputs, run)
        if value is None or name in kind.takes:
            continue
        takers = ", ".join(other.name for other in LAYERS.values() if name in other.takes)
        raise SpecError(
            f"layer {kind.name} has no use for {name} {str(value).lower()}: {why}. Layers that have: {takers}."
        )


def spec_for(kind: LayerKind, **settings: Any) -> AttentionSpec:
    """The spec of this layer: `AttentionSpec(**settings)` with the defaults that are the layer's own.

    Where a head is as wide as the embedding by default, no head count needs to divide it.

    Raises `SpecError` when the settings contradict each other.
    """
    if kind.whole_heads and settings.get("head_dim") is None:
        settings["head_dim"] = settings.get("embed_dim", AttentionSpec.embed_dim)
    return AttentionSpec(**settings)
