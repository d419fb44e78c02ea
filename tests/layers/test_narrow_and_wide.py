"""The two styles that are not torch's mathematics, against the formulas written out head by head in float64."""

from __future__ import annotations

import math

import pytest
import torch

from .conftest import HEAD_DIM, HEADS, KEY, QUERY


def check(bench, name, layer, projections, cut, causal):
    """Hold a layer to the formulas; `projections[head]` has (weight, bias) of q, k and v."""
    inputs = bench.inputs(key_len=KEY, causal=causal)
    output, weights = bench.run(name, layer, inputs)
    masked = torch.arange(KEY) > torch.arange(QUERY)[:, None] if causal else torch.zeros(QUERY, KEY, dtype=torch.bool)
    query, key, _ = inputs.tensors
    contexts = []
    for head, of_head in enumerate(projections):
        read = (cut(head, tensor) for tensor in (query, key, key))
        q, k, v = (x @ weight.mT + bias for x, (weight, bias) in zip(read, of_head, strict=True))
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(masked, -math.inf).exp()
        expected = scores / scores.sum(-1, keepdim=True)
        torch.testing.assert_close(weights[:, head], expected, rtol=0, atol=1e-12)
        contexts.append(expected @ v)
    w_o, b_o = numbers(layer.unifyheads)
    torch.testing.assert_close(output, torch.cat(contexts, -1) @ w_o.mT + b_o, rtol=0, atol=1e-12)


def numbers(linear):
    return linear.weight.detach(), linear.bias.detach()


@pytest.mark.parametrize("causal", [False, True])
def test_narrow_by_hand(bench, causal):
    layer = bench.build("narrow")
    projections = [[numbers(part[h]) for part in (layer.toqueries, layer.tokeys, layer.tovalues)] for h in range(HEADS)]
    assert projections[0][0][0].shape == (HEAD_DIM, HEAD_DIM)
    check(bench, "narrow", layer, projections, lambda h, x: x[..., h * HEAD_DIM : (h + 1) * HEAD_DIM], causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [None, 5])
def test_wide_by_hand(bench, causal, head_dim):
    layer, width = bench.build("wide", head_dim=head_dim), head_dim or HEADS * HEAD_DIM
    assert layer.toqueries.weight.shape == (HEADS * width, HEADS * HEAD_DIM)
    linears = [numbers(linear) for linear in (layer.toqueries, layer.tokeys, layer.tovalues)]
    rows = [slice(h * width, (h + 1) * width) for h in range(HEADS)]
    projections = [[(weight[row], bias[row]) for weight, bias in linears] for row in rows]
    check(bench, "wide", layer, projections, lambda h, x: x, causal)
