"""One set of weights for two layers: drawn once, and loaded as far as each has a place for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ...layers.places import Places, places_of
from ...layers.weights import AttentionWeights, canonical_weights, load_weights
from ...targets.spec import DtypeName
from .settings import Side

_OF_INPUT = ("w_q", "w_k", "w_v")


def finer_dtype(left: Side, right: Side) -> DtypeName:
    """The dtype of the two that rounds less."""
    return min(left.spec.dtype, right.spec.dtype, key=lambda name: torch.finfo(getattr(torch, name)).eps)


def draw(left: Side, right: Side) -> tuple[AttentionWeights, AttentionWeights]:
    """The same numbers for both sides, cut into the heads of each.

    They have all that one side or the other has a place for. Key and value heads are as many as both can repeat from.

    Raises `WeightsError` where key/value heads are shared and the head counts differ.
    """
    spec = left.spec
    shared = any(side.spec.kv_heads != side.spec.num_heads for side in (left, right))
    kv_heads = math.gcd(spec.kv_heads, right.spec.kv_heads) if shared else spec.num_heads
    drawn = canonical_weights(
        replace(
            spec,
            num_kv_heads=None if kv_heads == spec.num_heads else kv_heads,
            bias=spec.bias or right.spec.bias,
            add_bias_kv=spec.add_bias_kv or right.spec.add_bias_kv,
            dtype=finer_dtype(left, right),
        )
    )
    same_heads = right.spec.num_heads == spec.num_heads
    return drawn, drawn if same_heads else drawn.with_heads(right.spec.num_heads)


def load_what_fits(module: nn.Module, weights: AttentionWeights, label: str) -> tuple[str, ...]:
    """Load the weights, but for what the layer has no place for; one sentence for each thing that is left out.

    Raises `WeightsError` where sizes differ, or heads that differ would have to share a key and value.
    """
    fitting = weights
    left_out = []
    for fitted, sentence in _without_what_has_no_place(places_of(module), weights, label):
        fitting = replace(fitting, **fitted)
        left_out.append(sentence)
    load_weights(module, fitting)
    return tuple(left_out)


def _without_what_has_no_place(
    places: Places, weights: AttentionWeights, label: str
) -> Iterator[tuple[dict[str, Any], str]]:
    if places.w_o is None and weights.w_o is not None:
        what = "W_o is" if weights.b_o is None else "W_o and b_o are"
        yield {"w_o": None, "b_o": None}, f"{label} has no output projection: {what} left out there."
    if places.sliced:
        heads, width = weights.num_heads, weights.w_q.shape[2] // weights.num_heads
        kept = {name: within_slices(getattr(weights, name)) for name in _OF_INPUT}
        if any(not torch.equal(kept[name], getattr(weights, name)) for name in _OF_INPUT):
            yield (
                dict(kept),
                f"{label} gives head 0 the features 0–{width - 1} of the embedding and no others, and so on: of W_q, "
                f"W_k and W_v only {heads} blocks of {[weights.head_dim, width]} have a place there, 1/{heads} of "
                "each; the rest is left out.",
            )
    if places.b_q is None and weights.b_q is not None:
        biases = "b_q, b_k, b_v" + ("" if weights.b_o is None or places.w_o is None else " and b_o")
        none: dict[str, Any] = dict.fromkeys(("b_q", "b_k", "b_v", "b_o"))
        yield none, f"{label} has no biases: {biases} are left out there."
    if places.bias_k is None and weights.bias_k is not None:
        yield (
            {"bias_k": None, "bias_v": None},
            f"{label} appends no learned key and value: bias_k and bias_v are left out there.",
        )


def within_slices(matrices: Tensor) -> Tensor:
    """`heads head_dim embed` with zeros where head i reads outside of slice i of the embedding."""
    heads = matrices.shape[0]
    columns = rearrange(matrices, "heads head_dim (slices width) -> heads slices head_dim width", slices=heads)
    outside = ~torch.eye(heads, dtype=torch.bool, device=matrices.device)[:, :, None, None]
    return rearrange(columns.masked_fill(outside, 0.0), "heads slices head_dim width -> heads head_dim (slices width)")
