"""Sizes that are different primes, so that swapped axes cannot cancel, and layers in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.layers.catalog import find_layer
from mha_inspect.layers.settings import spec_for
from mha_inspect.targets.layer_inputs import Inputs, arguments_of, make_inputs
from mha_inspect.targets.spec import AttentionSpec, InputSpec, RunSpec

BATCH, QUERY, KEY, HEADS, HEAD_DIM, KDIM, VDIM = 2, 7, 5, 3, 11, 13, 17


@dataclass(frozen=True)
class Bench:
    """Builds and runs layers by name."""

    def spec(self, name: str = "torch", **settings: Any) -> AttentionSpec:
        settings = {"embed_dim": HEADS * HEAD_DIM, "num_heads": HEADS, "dtype": "float64", **settings}
        return spec_for(find_layer(name), **settings)

    def build(self, name: str, **settings: Any) -> nn.Module:
        return find_layer(name).load().build(self.spec(name, **settings))

    def inputs(self, spec: AttentionSpec | None = None, mask: Tensor | None = None, **settings: Any) -> Inputs:
        batch = {} if settings.get("unbatched") else {"batch": BATCH}
        asked = InputSpec(**{"seq_len": QUERY, **batch, **settings})
        made = make_inputs(spec or self.spec(), asked, RunSpec())
        return made if mask is None else replace(made, attn_mask=mask)

    def run(self, name: str, layer: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and weights of every head."""
        args, kwargs = arguments_of(layer, name, inputs, RunSpec(average_weights=False))
        with torch.no_grad():
            output, weights = layer(*args, **kwargs)
        return output, weights


@pytest.fixture
def bench() -> Bench:
    return Bench()
