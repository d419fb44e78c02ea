"""Layers of the catalog as sides of a diff: two of them, or one with the sizes and the input of a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import SpecError
from ..layers.catalog import LayerKind
from ..layers.settings import spec_for
from ..layers.spec import AttentionSpec, InputSpec, RunSpec
from ..reports.diff import SideName
from ..targets.call import Call
from ..targets.layer_sides import LayerSide, layer_side, require_same_input
from ..targets.pairing import layer_inputs
from ..targets.room import Room
from ..targets.triple import Triple
from .side import Side

_GIVEN = ("num_kv_heads", "head_dim", "rope", "add_bias_kv", "add_zero_attn", "dropout")
"""Sizes and settings that a layer has of its own where somebody gave them."""


def two_layers(planned: Iterable[LayerSide], room: Room | None = None) -> tuple[Side, Side]:
    """Build two layers that `make_sides` planned. Raises as `load_layer`."""
    planned = tuple(planned)
    finer = min((side.spec.dtype for side in planned), key=lambda name: torch.finfo(getattr(torch, name)).eps)
    left, right = (Side.of_layer(side, dtype=finer, room=room) for side in planned)
    return left, right


def layer_beside(
    name: SideName,
    kind: LayerKind,
    beside: Side,
    call: Call,
    given: Mapping[str, Any],
    inputs: InputSpec,
    run: RunSpec,
    settings: Mapping[str, Any],
) -> Side:
    """Return a layer as a side, with the input of the module beside it.

    Args:
        name: left or right.
        kind: the layer.
        beside: the other side, whose sizes it has but for those that somebody gave.
        call: what the module beside it is called with.
        given: fields of `AttentionSpec` that somebody gave.
        inputs: what goes in; its sizes are those of the call.
        run: how it is run.
        settings: what is set for this side alone.

    Raises `SpecError` where a size contradicts the module, or the layer has no use for a setting.
    """
    tensors = layer_inputs(beside.own.module, call)
    unbatched = tensors[0].dim() == 2
    if not unbatched and not call.batch_first:
        tensors = _turned(tensors)
    query, key, _ = tensors
    batch, query_len = (1, query.shape[0]) if unbatched else (query.shape[0], query.shape[1])
    key_len = None if key is query else key.shape[-2]
    inputs = replace(inputs, input=None, batch=batch, seq_len=query_len, key_len=key_len, unbatched=unbatched)
    spec = _spec(kind, beside, tensors, given)
    side, like = (
        layer_side(name, kind, spec, inputs, run, settings, kind),
        LayerSide(beside.name, kind, spec, inputs, run),
    )
    require_same_input(*((side, like) if name == "left" else (like, side)))
    return Side.of_layer(side, given=tensors if side.spec.batch_first or unbatched else _turned(tensors))


def _turned(tensors: Triple) -> Triple:
    """Return the tensors with batch and length in each other's place, one that serves as several staying one."""
    changed = {id(tensor): tensor.transpose(0, 1).contiguous() for tensor in tensors}
    query, key, value = (changed[id(tensor)] for tensor in tensors)
    return query, key, value


def _spec(kind: LayerKind, beside: Side, tensors: Triple, given: Mapping[str, Any]) -> AttentionSpec:
    """Return the sizes of the layer: those of the module beside it, but for those that somebody gave."""
    embed_dim, kdim, vdim = (tensor.shape[-1] for tensor in tensors)
    if given.get("embed_dim", embed_dim) != embed_dim:
        module = beside.own.label
        raise SpecError(
            f"embed_dim {given['embed_dim']} contradicts {module}, which takes {embed_dim} features: diff gives both "
            f"the same input. Drop --embed-dim, or give {module} another size: --{beside.name}-set NAME=VALUE."
        )
    found = {"num_heads": AttentionSpec.num_heads, "bias": AttentionSpec.bias, **sizes_of(beside)}
    sizes = {flag: given.get(flag, found[flag]) for flag in ("num_heads", "bias")}
    if "num_kv_heads" in kind.takes and found.get("num_kv_heads", found["num_heads"]) != found["num_heads"]:
        sizes["num_kv_heads"] = found["num_kv_heads"]
    if "head_dim" in kind.takes and found.get("head_dim", 0) * found["num_heads"] not in (0, embed_dim):
        sizes["head_dim"] = found["head_dim"]
    sizes |= {flag: given[flag] for flag in _GIVEN if flag in given and flag in (*kind.takes, "dropout")}
    return spec_for(
        kind,
        embed_dim=embed_dim,
        kdim=kdim if kdim != embed_dim else None,
        vdim=vdim if vdim != embed_dim else None,
        training=given["training"],
        dtype=given.get("dtype", beside.dtype),
        seed=given["seed"],
        **sizes,
    )


def sizes_of(side: Side) -> dict[str, Any]:
    """Return those sizes of a side's first attention that show when it runs, by the names of `AttentionSpec`."""
    if not side.attentions:
        return {}
    found, names = side.attentions[0]
    sizes: dict[str, Any] = {
        "num_heads": names.num_heads,
        "num_kv_heads": names.num_kv_heads,
        "head_dim": names.head_dim,
    }
    if "query" in found.stages:
        sizes["embed_dim"] = found.stages["query"].shape[-1]
    if found.projections:
        sizes["bias"] = any(map(side.run.graph.has_bias, found.projections.values()))
    return sizes
