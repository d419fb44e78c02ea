"""Keras on torch: its attention layers and cells, and layers that do not attend."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from .table import table

os.environ.setdefault("KERAS_BACKEND", "torch")

_TRUE: dict[str, Any] = {"heads": 3, "head_dim": 10, "kind": "self", "scale": 10**-0.5, "count": 1}
_CROSS = {"kind": "cross"}
_NONE: dict[str, Any] = {"count": 0, "parts": ()}
_ONE: dict[str, Any] = {"heads": 1, "head_dim": 44, "scale": 1.0, "kind": None, "parts": (), "along": None}


class _Called(nn.Module):
    """Calls a layer as Keras does, on its positional inputs twice or as a list."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any], *given: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.call = layer, call
        with torch.no_grad():
            self.call(self.layer, *given)

    def forward(self, *given: torch.Tensor) -> Any:
        return self.call(self.layer, *given)


def _layer(name: str, shapes: str, call: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    def make() -> nn.Module:
        keras = import_module("keras")
        given = [torch.randn([int(size) for size in shape.split("x")]) for shape in shapes.split()]
        return _Called(getattr(keras.layers, name)(*args, **settings), call, *given)

    return make


def _twice(layer: Any, x: torch.Tensor) -> Any:
    return layer(x, x)


def _thrice(layer: Any, x: torch.Tensor) -> Any:
    return layer(x, x, x)


def _causal(layer: Any, x: torch.Tensor) -> Any:
    return layer(x, x, use_causal_mask=True)


def _plain(layer: Any, *given: torch.Tensor) -> Any:
    return layer(*given)


def _weights(layer: Any, x: torch.Tensor) -> Any:
    return layer(x, x, return_attention_scores=True)


def _list(layer: Any, *given: torch.Tensor) -> Any:
    return layer(list(given))


_MHA = {"num_heads": 3, "key_dim": 10}
_GQA = {"head_dim": 10, "num_query_heads": 6, "num_key_value_heads": 2}
_X, _Y = "2x13x44", "2x11x44"
_GROUPED = {"heads": 6, "kv_heads": 2, "kind": "self grouped"}

CONFIGURATIONS = table(
    "keras",
    _TRUE,
    {
        "heads": (_layer("MultiHeadAttention", _X, _twice, **_MHA), _X, {"along": 1}),
        "heads, weights": (_layer("MultiHeadAttention", _X, _weights, **_MHA), _X, {"along": 1}),
        "heads, without bias": (_layer("MultiHeadAttention", _X, _twice, **_MHA, use_bias=False), _X, {"along": 1}),
        "heads, value width": (_layer("MultiHeadAttention", _X, _twice, **_MHA, value_dim=7), _X, {"along": 1}),
        "heads, output": (_layer("MultiHeadAttention", _X, _twice, **_MHA, output_shape=17), _X, {"along": 1}),
        "heads, causal": (_layer("MultiHeadAttention", _X, _causal, **_MHA), _X, {"kind": "self causal", "along": 1}),
        "heads, not flash": (_layer("MultiHeadAttention", _X, _twice, **_MHA, flash_attention=False), _X, {"along": 1}),
        "heads, cross": (_layer("MultiHeadAttention", f"{_X} {_Y}", _plain, **_MHA), f"{_X} {_Y}", {**_CROSS, "along": 1}),
        "heads, three": (_layer("MultiHeadAttention", _X, _thrice, **_MHA), _X, {"along": 1}),
        "heads, one": (_layer("MultiHeadAttention", _X, _twice, num_heads=1, key_dim=10), _X, {"heads": 1, "along": 1}),
        "heads, two axes": (_layer("MultiHeadAttention", "2x4x5x44", _twice, **_MHA, attention_axes=(1, 2)), "2x4x5x44", {}),
        "heads, second axis": (_layer("MultiHeadAttention", "2x4x5x44", _twice, **_MHA, attention_axes=(2,)), "2x4x5x44", {}),
        "grouped": (_layer("GroupQueryAttention", _X, _twice, **_GQA), _X, {**_GROUPED, "along": 1}),
        "grouped, causal": (_layer("GroupQueryAttention", _X, _causal, **_GQA), _X, {**_GROUPED, "kind": "self causal grouped", "along": 1}),
        "grouped, one": (
            _layer("GroupQueryAttention", _X, _twice, head_dim=10, num_query_heads=6, num_key_value_heads=1),
            _X,
            {**_GROUPED, "kv_heads": 1, "along": 1},
        ),
        "grouped, cross": (_layer("GroupQueryAttention", f"{_X} {_Y}", _plain, **_GQA), f"{_X} {_Y}", {**_GROUPED, "kind": "cross grouped", "along": 1}),
        "grouped, not flash": (_layer("GroupQueryAttention", _X, _twice, **_GQA, flash_attention=False), _X, {**_GROUPED, "along": 1}),
        "dot": (_layer("Attention", f"{_X} {_Y}", _list), f"{_X} {_Y}", {**_ONE, "kind": ""}),
        "dot, self": (_layer("Attention", _X, lambda layer, x: layer([x, x])), _X, {**_ONE, "kind": "self"}),
        "dot, scaled": (_layer("Attention", f"{_X} {_Y}", _list, use_scale=True), f"{_X} {_Y}", {**_ONE, "kind": "", "scale": None}),
        "dot, causal": (_layer("Attention", _X, lambda layer, x: layer([x, x], use_causal_mask=True)), _X, {**_ONE, "kind": "self causal"}),
        "concat": (_layer("Attention", f"{_X} {_Y}", _list, score_mode="concat"), f"{_X} {_Y}", {**_ONE, "kind": "", "scale": None}),
        "additive": (_layer("AdditiveAttention", f"{_X} {_Y}", _list), f"{_X} {_Y}", {**_ONE, "kind": "", "scale": None}),
        "additive, causal": (
            _layer("AdditiveAttention", _X, lambda layer, x: layer([x, x], use_causal_mask=True)),
            _X,
            {**_ONE, "kind": "self causal", "scale": None},
        ),
        "dense": (_layer("Dense", _X, _plain, 7, activation="softmax"), _X, _NONE),
        "einsum": (_layer("EinsumDense", _X, _plain, "abc,cde->abde", output_shape=(None, 3, 10)), _X, _NONE),
        "softmax": (_layer("Softmax", _X, _plain), _X, _NONE),
        "LSTM": (_layer("LSTM", _X, _plain, 7, return_sequences=True), _X, _NONE),
        "GRU": (_layer("GRU", _X, _plain, 7), _X, _NONE),
        "dot product": (_layer("Dot", f"{_X} {_X}", _list, axes=(2, 2)), f"{_X} {_X}", _NONE),
    },
)
