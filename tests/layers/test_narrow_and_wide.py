"""The two styles that are not torch's mathematics, against explicit loops over every index."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mha_inspect.layers.catalog import find_layer

from .conftest import BATCH, HEAD_DIM, HEADS, KEY, QUERY


def linear(weight: np.ndarray, bias: np.ndarray, x: np.ndarray) -> np.ndarray:
    out = np.zeros(weight.shape[0])
    for row in range(weight.shape[0]):
        out[row] = bias[row] + sum(weight[row, column] * x[column] for column in range(weight.shape[1]))
    return out


def attend(queries: list, keys: list, values: list, allowed) -> tuple[list, np.ndarray]:
    contexts, weights = [], np.zeros((len(queries), len(keys)))
    for i, q in enumerate(queries):
        exps = [
            math.exp(sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))) if allowed(i, j) else 0.0
            for j, k in enumerate(keys)
        ]
        weights[i] = np.array(exps) / sum(exps)
        contexts.append(sum(w * v for w, v in zip(weights[i], values, strict=True)))
    return contexts, weights


def by_hand(projections, w_o, b_o, query, key, allowed, cut):
    """Output and weights for one sequence; `projections[head]` has (weight, bias) of q, k and v."""
    contexts, weights = [], []
    for head, ((wq, bq), (wk, bk), (wv, bv)) in enumerate(projections):
        queries = [linear(wq, bq, cut(head, x)) for x in query]
        keys = [linear(wk, bk, cut(head, x)) for x in key]
        values = [linear(wv, bv, cut(head, x)) for x in key]
        context, weight = attend(queries, keys, values, allowed)
        contexts.append(context)
        weights.append(weight)
    rows = [np.concatenate([context[i] for context in contexts]) for i in range(len(query))]
    return np.stack([linear(w_o, b_o, row) for row in rows]), np.stack(weights)


def numbers(linear_layer) -> tuple[np.ndarray, np.ndarray]:
    return linear_layer.weight.detach().numpy(), linear_layer.bias.detach().numpy()


def check(bench, name, layer, projections, cut, causal):
    inputs = bench.inputs(key_len=KEY, causal=causal)
    output, weights = bench.run(name, layer, inputs)
    w_o, b_o = numbers(layer.unifyheads)
    for b in range(BATCH):
        expected, expected_weights = by_hand(
            projections,
            w_o,
            b_o,
            inputs.tensors[0][b].numpy(),
            inputs.tensors[1][b].numpy(),
            lambda i, j: not causal or j <= i,
            cut,
        )
        np.testing.assert_allclose(output[b].numpy(), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(weights[b].numpy(), expected_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_narrow_by_hand(bench, causal):
    layer = bench.build("narrow")
    projections = [
        (numbers(layer.toqueries[h]), numbers(layer.tokeys[h]), numbers(layer.tovalues[h])) for h in range(HEADS)
    ]
    assert projections[0][0][0].shape == (HEAD_DIM, HEAD_DIM)
    check(bench, "narrow", layer, projections, lambda h, x: x[h * HEAD_DIM : (h + 1) * HEAD_DIM], causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [None, 5])
def test_wide_by_hand(bench, causal, head_dim):
    layer, width = bench.build("wide", head_dim=head_dim), head_dim or HEADS * HEAD_DIM
    assert layer.toqueries.weight.shape == (HEADS * width, HEADS * HEAD_DIM)
    projections = []
    for h in range(HEADS):
        rows = slice(h * width, (h + 1) * width)
        linears = (numbers(linear) for linear in (layer.toqueries, layer.tokeys, layer.tovalues))
        projections.append([(weight[rows], bias[rows]) for weight, bias in linears])
    check(bench, "wide", layer, projections, lambda h, x: x, causal)


def test_a_head_of_narrow_sees_its_slice_and_no_other(bench):
    layer = bench.build("narrow")
    before = bench.inputs()
    after = bench.inputs()
    after.tensors[0][..., HEAD_DIM : 2 * HEAD_DIM] += 1.0
    changed = (bench.run("narrow", layer, before)[1] - bench.run("narrow", layer, after)[1]).abs().amax(dim=(0, 2, 3))
    assert changed[0] == 0
    assert changed[2] == 0
    assert changed[1] > 1e-4
    assert before.tensors[0].shape == (BATCH, QUERY, HEADS * HEAD_DIM)


def test_wide_is_as_wide_as_the_embedding_when_no_head_dim_was_given():
    layer = find_layer("wide").build(find_layer("wide").spec(embed_dim=10, num_heads=2))
    assert layer.toqueries.weight.shape == (20, 10)


def test_wide_needs_no_head_count_that_divides(bench):
    layer = bench.build("wide", embed_dim=10, num_heads=3)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 3 * 10 * 10 + 3 * 3 * 10 + 10
    assert torch.isfinite(layer.toqueries.weight).all()
