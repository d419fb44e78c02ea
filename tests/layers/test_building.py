"""Building a layer for another number of heads, and numbers that are the same bit for bit."""

from __future__ import annotations

import pytest
import torch

from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.settings import spec_for
from mha_inspect.layers.spec import InputSpec, RunSpec
from mha_inspect.record.rounding import same_bits
from mha_inspect.targets.head_counts import layers_with_heads


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_of_another_head_count_takes_all_of_the_numbers(layer):
    spec = spec_for(LAYERS[layer], embed_dim=12, num_heads=3)
    (_, base), (_, other) = layers_with_heads(spec, (3, 2), InputSpec(), RunSpec(), layer)
    if shapes_of(other.module) == shapes_of(base.module):
        other.module.load_state_dict(base.module.state_dict())
        assert all(map(same_bits, other.module.parameters(), base.module.parameters()))
    else:  # it has numbers of its own, as the same seed gives them
        alone = LAYERS[layer].build(other.spec)
        assert all(map(same_bits, other.module.parameters(), alone.parameters()))


def shapes_of(module):
    return {name: held.shape for name, held in module.state_dict().items()}


def test_same_bits_tells_zeros_apart_and_not_nan():
    zero, nan = torch.zeros(7), torch.full((7,), torch.nan)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())
    wide = torch.tensor([1 + 2j, 3 - 0j], dtype=torch.complex128)
    assert same_bits(wide[0], wide[0].clone())
    assert not same_bits(wide, wide + 1e-15)
    assert same_bits(torch.arange(12.0).view(3, 4).t(), torch.arange(12.0).view(3, 4).t().contiguous())
    late = torch.arange(40_000.0)
    other = late.clone()
    other[-1] += 1
    assert not same_bits(late, other)
    assert same_bits(zero.to("meta"), zero.to("meta"))
    assert not same_bits(zero.to("meta"), zero)
