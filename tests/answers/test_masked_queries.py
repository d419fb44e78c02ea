"""What a trace says of queries whose every key is masked, beside what really comes out of the module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.answers.run_report import fate_of
from mha_inspect.call.load import load_layer
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec

from ..built import trace_layer
from ..layers.declared import read_weights

SIZES = {"embed_dim": 22, "num_heads": 2}
PADDED = InputSpec(batch=3, seq_len=5, padding=(0, 5, 2))


def said(trace: object) -> str:
    return " ".join(note for note in trace.notes if "every key masked out" in note)  # type: ignore[attr-defined]


def sentence(count: str, query: int, row: int, fate: str) -> str:
    return f"{count} every key masked out (first: query {query} of batch item {row}): their weights are {fate}."


@pytest.mark.parametrize("layer", LAYERS)
def test_what_becomes_of_them_is_what_comes_out(layer: str) -> None:
    spec, run = LAYERS[layer].spec(**SIZES), RunSpec()
    forward = load_layer(spec, PADDED, run, layer)
    weights = read_weights(forward.module)
    with torch.no_grad():
        rows = (forward.plain()[0] if spec.batch_first else forward.plain()[0].transpose(0, 1))[1].detach()
    nothing = torch.zeros(22) if weights.b_o is None else weights.b_o.detach()
    fate = "NaN" if bool(rows.isnan().all()) else "zero" if torch.equal(rows[0], nothing) else "uniform"
    assert said(trace_layer(spec, PADDED, run, layer=layer)) == sentence("5 queries have", 0, 1, fate)


def test_one_head_without_keys_is_enough(tmp_path: Path) -> None:
    mask = torch.zeros(3 * 2, 5, 5, dtype=torch.bool)
    mask[2 * 2 + 1, 3] = True  # batch row 2, the second head, query 3
    torch.save(mask, tmp_path / "mask.pt")
    inputs = InputSpec(batch=3, seq_len=5, attn_mask=tmp_path / "mask.pt")
    trace = trace_layer(AttentionSpec(**SIZES), inputs, RunSpec(), layer="per-head")
    assert said(trace).startswith("1 query has every key masked out in head 1 (first: query 3 of batch item 2)")


class Attend(nn.Module):
    """Masks its scores with each mask that it is given."""

    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor, *masks: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / 2
        for mask in masks:
            scores = scores + torch.zeros_like(scores).masked_fill(mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_masks_that_follow_one_another_mask_together() -> None:
    x, early = torch.randn(2, 5, 12), torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    late = early.clone()
    early[1, 0, 2, :3], late[1, 0, 2, 3:] = True, True
    module = Attend().eval()
    assert module(x, early, late).isnan().any(-1).nonzero().tolist() == [[1, 2]]
    assert said(mha_inspect.trace(module, x, early, late)) == sentence("1 query has", 2, 1, "NaN")
    assert said(mha_inspect.trace(module, x, early)) == ""


def test_fates_are_told_apart() -> None:
    weights = torch.rand(1, 2, 4, 3)
    weights[0, 1, 1], weights[0, 0, 2], weights[0, 1, 3] = 1 / 3, 0.0, torch.nan
    fates = [fate_of(weights, ((0, query),)) for query in range(4)]
    assert fates == ["numbers", "uniform", "zero", "NaN"]
    assert fate_of(None, ((0, 0),)) == "numbers"
