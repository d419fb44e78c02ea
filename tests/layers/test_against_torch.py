"""Every style against torch.nn.MultiheadAttention with the same weights, where the mathematics is the same."""

from __future__ import annotations

import pytest
import torch

from .conftest import BATCH, HEAD_DIM, HEADS, KEY, QUERY
from .declared import canonical_weights, load_weights, read_weights

SAME = {
    "split-heads": {},
    "fold-heads": {},
    "per-head": {},
    "grouped-query": {},
    "wide": {"head_dim": HEAD_DIM},
}
"""Layers with torch's mathematics, and the settings that give them torch's sizes."""

CASES = {
    "self": {},
    "causal": {"causal": True},
    "padding": {"padding": (0, 3)},
    "cross, causal, padding": {"key_len": KEY, "causal": True, "padding": (2, 1)},
}

MASKS = {
    "boolean": (QUERY, KEY),
    "boolean per head": (BATCH * HEADS, QUERY, KEY),
    "additive": (QUERY, KEY),
    "additive per head": (BATCH * HEADS, QUERY, KEY),
}


def a_mask(kind: str) -> torch.Tensor:
    """Some keys barred and others not, in every row and for every head its own."""
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(MASKS[kind], generator=generator, dtype=torch.float64)
    barred = numbers > 0.8
    barred[..., 1] = False
    return barred if kind.startswith("boolean") else numbers.masked_fill(barred, float("-inf"))


def assert_equal(bench, name, layer, reference, inputs):
    output, weights = bench.run(name, layer, inputs)
    expected, expected_weights = bench.run("torch", reference, inputs)
    assert output.dtype == torch.float64
    assert not expected.isnan().any()
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "padding"),
    [("boolean", ()), ("boolean per head", (0, 2)), ("additive", (0, 2)), ("additive per head", ())],
)
@pytest.mark.parametrize("name", SAME)
def test_any_mask_means_what_it_means_to_torch(bench, name, kind, padding):
    reference, layer = bench.build("torch"), bench.build(name, **SAME[name])
    weights = canonical_weights(bench.spec())
    load_weights(reference, weights)
    load_weights(layer, weights)
    assert_equal(bench, name, layer, reference, bench.inputs(mask=a_mask(kind), key_len=KEY, padding=padding))


@pytest.mark.parametrize("case", ["self", "cross, causal, padding"])
@pytest.mark.parametrize("name", ["bert", "narrow"])
def test_less_than_torch_is_torch_with_the_identity_or_zeros_in_its_place(bench, name, case):
    """The identity for bert's W_o, and zeros outside of the blocks of narrow."""
    layer, reference = bench.build(name), bench.build("torch")
    load_weights(reference, read_weights(layer))
    assert_equal(bench, name, layer, reference, bench.inputs(**CASES[case]))


@pytest.mark.parametrize("name", ["fold-heads", "grouped-query"])
def test_dropout_drops_weights_in_training_and_not_after(bench, name):
    inputs = bench.inputs()
    layer = bench.build(name, dropout=0.5, training=True)
    torch.manual_seed(3)
    first, second = bench.run(name, layer, inputs)[0], bench.run(name, layer, inputs)[0]
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(bench.run(name, layer, inputs)[0], bench.run(name, layer, inputs)[0])
    assert torch.equal(bench.run(name, layer, inputs)[0], bench.run(name, bench.build(name), inputs)[0])
