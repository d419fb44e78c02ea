"""The oracle that carries weights by what is declared of each layer: into any of them and out again."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mha_inspect.layers.catalog import LAYERS, find_layer

from .conftest import HEAD_DIM, HEADS
from .declared import load_weights, read_weights

EMBED = HEADS * HEAD_DIM


def parameters(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def distinct(layer: nn.Module) -> nn.Module:
    """Every element of every parameter a number of its own: nothing can be swapped unseen."""
    start = 1
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view(parameter.shape))
            start += parameter.numel()
    return layer


def build(name: str, heads: int, head_dim: int, kv_heads: int | None = None, **more) -> nn.Module:
    kind = find_layer(name)
    sizes = {"embed_dim": heads * head_dim, "num_heads": heads, "dtype": "float64", **more}
    if "head_dim" in kind.takes:
        sizes["head_dim"] = head_dim
    if "num_kv_heads" in kind.takes:
        sizes["num_kv_heads"] = kv_heads
    return kind.build(kind.spec(**sizes))


FULL = ["torch", "split-heads", "fold-heads", "per-head", "grouped-query", "wide"]
"""Layers that have a place for every number."""
LESS = ["bert", "narrow"]
"""Layers that have not: their weights go to the others, and come back."""


@settings(max_examples=4, deadline=None)
@given(heads=st.integers(1, 5), head_dim=st.integers(1, 7), bias=st.booleans())
def test_out_of_one_into_another_and_back_is_the_identity(heads, head_dim, bias):
    for source, target in product([*FULL, *LESS], FULL):
        layer, other = distinct(build(source, heads, head_dim, bias=bias)), build(target, heads, head_dim, bias=bias)
        before = parameters(layer)
        load_weights(other, read_weights(layer))
        carried = read_weights(other)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        load_weights(layer, carried)
        assert same(parameters(layer), before), (source, target)


def test_torchs_packed_matrix_is_q_k_v_by_head(bench):
    layer = distinct(bench.build("torch"))
    weights = read_weights(layer)
    assert torch.equal(weights.w_q[1, 2], layer.in_proj_weight[HEAD_DIM + 2])
    assert torch.equal(weights.w_k[2, 0], layer.in_proj_weight[EMBED + 2 * HEAD_DIM])
    assert torch.equal(weights.b_v[1], layer.in_proj_bias[2 * EMBED + HEAD_DIM : 2 * EMBED + 2 * HEAD_DIM])
    assert torch.equal(weights.w_o[:, 2, 5], layer.out_proj.weight[:, 2 * HEAD_DIM + 5])


def test_every_layer_is_covered_here():
    assert set(FULL) | set(LESS) == set(LAYERS)
