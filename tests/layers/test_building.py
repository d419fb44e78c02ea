"""Building without drawing, for a layer that is given its numbers afterwards."""

from __future__ import annotations

import pytest
import torch

from mha_inspect.layers.building import blank
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.settings import spec_for
from mha_inspect.record.rounding import same_bits

from ..recorded import record


@pytest.mark.parametrize("layer", LAYERS)
def test_a_blank_layer_takes_all_of_another_ones_numbers(layer):
    kind = LAYERS[layer]
    spec = spec_for(kind, embed_dim=12, num_heads=3)
    recording, drawn = record(lambda: kind.build(spec))
    assert _drawn(recording)
    with blank():
        recording, module = record(lambda: kind.build(spec))
    assert not _drawn(recording)
    module.load_state_dict(drawn.state_dict())
    assert all(map(same_bits, module.parameters(), drawn.parameters()))


def _drawn(recording):
    return [op.name for op in recording.ops if op.base_name in ("uniform_", "normal_", "uniform", "normal", "randn")]


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
