"""The layer built from a spec is torch's own, and building it leaves no trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mha_inspect.call.load import layer_called
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec

TORCH = LAYERS["torch"]
SPEC = AttentionSpec(embed_dim=12, num_heads=2, seed=5)


def test_is_what_torch_builds_under_the_same_seed() -> None:
    torch.manual_seed(5)
    expected = nn.MultiheadAttention(12, 2, batch_first=True).state_dict()
    built = TORCH.build(SPEC).state_dict()
    assert list(built) == list(expected)
    assert all(torch.equal(built[name], expected[name]) for name in expected)


def test_global_state_is_left_alone() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        state = torch.get_rng_state()
        built = TORCH.build(SPEC)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(built.in_proj_weight, TORCH.build(SPEC).in_proj_weight)


@pytest.mark.parametrize("additive", [False, True])
def test_padding_beside_a_mask_gives_what_torch_gives_for_both_in_one(
    additive: bool, recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    both = causal | padding[:, None, :]
    inputs = InputSpec(batch=3, seq_len=5, causal=True, padding=(0, 2, 1))
    if additive:
        torch.save(torch.zeros(5, 5).masked_fill(causal, float("-inf")), tmp_path / "mask.pt")
        inputs = replace(inputs, causal=False, attn_mask=tmp_path / "mask.pt")
    layer = TORCH.build(SPEC)
    subject = layer_called(layer, SPEC, inputs, RunSpec(average_weights=False), "torch")
    output, weights = subject.plain()
    expected, expected_weights = layer(
        *(subject.kwargs[name] for name in ("query", "key", "value")),
        attn_mask=both.repeat_interleave(2, 0),
        average_attn_weights=False,
    )
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert weights.shape == (3, 2, 5, 5)
    assert [str(warning.message) for warning in recwarn] == [], "torch deprecates masks of two kinds"
