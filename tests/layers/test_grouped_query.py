"""Shared key/value heads against torch, and rotary positions against a rotation of complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mha_inspect.layers.grouped_query import apply_rotary

from .conftest import BATCH, KEY, QUERY


def test_rotary_turns_each_pair_as_a_complex_number():
    head_dim, half = 6, 3
    x = torch.randn(BATCH, 5, QUERY, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angles = torch.outer(torch.arange(QUERY).double(), 10000 ** (-2 * torch.arange(half).double() / head_dim))
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(apply_rotary(x), torch.cat((z.real, z.imag), -1), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("kv_heads", "rope"), [(1, False), (3, True)])
def test_queries_and_keys_are_turned_and_groups_are_those_of_torchs_enable_gqa(bench, kv_heads, rope):
    sizes = {"embed_dim": 6 * 14, "num_heads": 6}
    layer = bench.build("grouped-query", rope=rope, num_kv_heads=kv_heads, head_dim=10, **sizes)
    inputs = bench.inputs(bench.spec(**sizes), key_len=KEY)
    q = layer.q_proj(inputs.tensors[0]).unflatten(-1, (6, 10)).transpose(1, 2)
    k, v = (
        linear(inputs.tensors[1]).unflatten(-1, (kv_heads, 10)).transpose(1, 2)
        for linear in (layer.k_proj, layer.v_proj)
    )
    q, k = (apply_rotary(q), apply_rotary(k)) if rope else (q, k)
    context = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    expected = layer.o_proj(context.transpose(1, 2).flatten(2))
    torch.testing.assert_close(bench.run("grouped-query", layer, inputs)[0], expected, rtol=0, atol=1e-12)


def test_rotary_keeps_its_angles_when_the_layer_is_in_bfloat16():
    x = torch.ones(1, 1, 259, 2, dtype=torch.bfloat16)
    turned = apply_rotary(x).double()
    angle = torch.atan2(turned[0, 0, :, 1], turned[0, 0, :, 0]) - torch.pi / 4
    exact = torch.arange(259, dtype=torch.float64)
    error = torch.remainder(angle - exact + torch.pi, 2 * torch.pi) - torch.pi
    assert error.abs().max() < 0.02
