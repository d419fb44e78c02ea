"""Which settings a layer has a use for, and the defaults that are its own. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import SpecError
from .catalog import LAYERS, LayerKind
from .spec import AttentionSpec, InputSpec, RunSpec

Asked = Callable[[AttentionSpec, InputSpec, RunSpec], object]
"""What was asked of a setting, or None where the layer is left as it is without it."""


def _unless(plain: object, asked: object) -> object:
    return None if asked == plain else asked


OPTIONAL: dict[str, Asked] = {
    "num_kv_heads": lambda spec, inputs, run: _unless(spec.num_heads, spec.kv_heads),
    "head_dim": lambda spec, inputs, run: int(spec.head_dim) if spec.head_dim_given else None,
    "rope": lambda spec, inputs, run: spec.rope or None,
    "kdim": lambda spec, inputs, run: _unless(spec.embed_dim, spec.key_width),
    "vdim": lambda spec, inputs, run: _unless(spec.embed_dim, spec.value_width),
    "add_bias_kv": lambda spec, inputs, run: spec.add_bias_kv or None,
    "add_zero_attn": lambda spec, inputs, run: spec.add_zero_attn or None,
    "dropout": lambda spec, inputs, run: spec.dropout or None,
    "batch_first": lambda spec, inputs, run: None if spec.batch_first else False,
    "unbatched": lambda spec, inputs, run: inputs.unbatched or None,
    "need_weights": lambda spec, inputs, run: None if run.need_weights else False,
}
"""The settings that some layers have no use for, by name."""

_WHY = {
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


def check_settings(kind: LayerKind, spec: AttentionSpec, inputs: InputSpec, run: RunSpec) -> None:
    """Refuse a setting that the layer has no use for, rather than leave it unheard.

    Raises `SpecError`, which says which layers have it.
    """
    for name, asked in OPTIONAL.items():
        value = asked(spec, inputs, run)
        if value is None or name in kind.takes:
            continue
        takers = ", ".join(other.name for other in LAYERS.values() if name in other.takes)
        raise SpecError(
            f"layer {kind.name} has no use for {name} {str(value).lower()}: {_WHY[name]}. Layers that have: {takers}."
        )


def spec_for(kind: LayerKind, **settings: Any) -> AttentionSpec:
    """The spec of this layer: `AttentionSpec(**settings)` with the defaults that are the layer's own.

    Where a head is as wide as the embedding by default, no head count needs to divide it.

    Raises `SpecError` when the settings contradict each other.
    """
    if kind.whole_heads and settings.get("head_dim") is None:
        settings["head_dim"] = settings.get("embed_dim", AttentionSpec.embed_dim)
    return AttentionSpec(**settings)


def own_spec(kind: LayerKind, spec: AttentionSpec) -> AttentionSpec:
    """A spec that was made without knowing of the layer, with the defaults that are the layer's own."""
    if kind.whole_heads and not spec.head_dim_given:
        return replace(spec, head_dim=spec.embed_dim)
    return spec
