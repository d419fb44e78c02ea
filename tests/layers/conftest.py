"""Sizes that are different primes, so that swapped axes cannot cancel, and layers in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.call.call import Call
from mha_inspect.call.load import layer_called
from mha_inspect.call.part import call_with, layer_inputs, with_the_same
from mha_inspect.layers.catalog import find_layer
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.running.subject import Subject

BATCH, QUERY, KEY, HEADS, HEAD_DIM, KDIM, VDIM = 2, 7, 5, 3, 11, 13, 17


@dataclass(frozen=True)
class Inputs:
    """What goes into several layers."""

    spec: AttentionSpec
    asked: InputSpec
    tensors: tuple[Tensor, Tensor, Tensor]

    def into(self, name: str, layer: nn.Module, **run: Any) -> Subject:
        subject = layer_called(layer, self.spec, self.asked, RunSpec(**run), name)
        drawn = call_with(layer, subject.args, subject.kwargs, "drawn from the seed")
        given = Call((), dict(zip(("query", "key", "value"), self.tensors, strict=True)), "")
        same = with_the_same(drawn, layer, replace(given, batch_first=drawn.batch_first), layer)
        return replace(subject, args=same.args, kwargs=same.kwargs)


@dataclass(frozen=True)
class Bench:
    """Builds and runs layers by name."""

    folder: Path

    def spec(self, name: str = "torch", **settings: Any) -> AttentionSpec:
        settings = {"embed_dim": HEADS * HEAD_DIM, "num_heads": HEADS, "dtype": "float64", **settings}
        return find_layer(name).spec(**settings)

    def build(self, name: str, **settings: Any) -> nn.Module:
        return find_layer(name).build(self.spec(name, **settings))

    def inputs(self, spec: AttentionSpec | None = None, mask: Tensor | None = None, **settings: Any) -> Inputs:
        batch = {} if settings.get("unbatched") else {"batch": BATCH}
        asked = InputSpec(**{"seq_len": QUERY, **batch, **settings})
        if mask is not None:
            torch.save(mask, self.folder / "mask.pt")
            asked = replace(asked, attn_mask=self.folder / "mask.pt", causal=False)
        spec = spec or self.spec()
        torchs = find_layer("torch").build(replace(spec, num_kv_heads=None, rope=False))
        subject = layer_called(torchs, spec, asked, RunSpec(), "torch")
        return Inputs(spec, asked, layer_inputs(torchs, Call(subject.args, subject.kwargs, "")))

    def run(self, name: str, layer: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Output and weights of every head."""
        with torch.no_grad():
            output, weights = replace(inputs.into(name, layer, average_weights=False), seed=None).plain()
        return output, weights


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
