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


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("asked", [{}, {"grad": True}, {"need_weights": False}], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_becomes_of_them_is_what_comes_out(layer: str, training: bool, asked: dict[str, bool]) -> None:
    if "need_weights" in asked and "need_weights" not in LAYERS[layer].takes:
        pytest.skip("the layer has no such argument")
    spec, run = LAYERS[layer].spec(**SIZES, training=training), RunSpec(**asked)
    forward = load_layer(spec, PADDED, run, layer)
    weights = read_weights(forward.module)
    with torch.set_grad_enabled(run.grad):
        rows = (forward.plain()[0] if spec.batch_first else forward.plain()[0].transpose(0, 1))[1].detach()
    nothing = torch.zeros(22) if weights.b_o is None else weights.b_o.detach()
    fate = "NaN" if bool(rows.isnan().all()) else "zero" if torch.equal(rows[0], nothing) else "uniform"
    assert said(trace_layer(spec, PADDED, run, layer=layer)) == sentence("5 queries have", 0, 1, fate)


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_they_are_found_in_every_layout(unbatched: bool, batch_first: bool) -> None:
    spec = AttentionSpec(**SIZES, batch_first=batch_first)
    inputs = InputSpec(seq_len=5, padding=(5,), unbatched=True) if unbatched else PADDED
    assert f"query 0 of batch item {0 if unbatched else 1}" in said(trace_layer(spec, inputs, RunSpec()))


@pytest.mark.parametrize("layer", ["torch", "per-head", "narrow", "fold-heads"])
def test_one_head_without_keys_is_enough(layer: str, tmp_path: Path) -> None:
    mask = torch.zeros(3 * 2, 5, 5, dtype=torch.bool)
    mask[2 * 2 + 1, 3] = True  # batch row 2, the second head, query 3
    torch.save(mask, tmp_path / "mask.pt")
    inputs = InputSpec(batch=3, seq_len=5, attn_mask=tmp_path / "mask.pt")
    trace = trace_layer(AttentionSpec(**SIZES), inputs, RunSpec(), layer=layer)
    assert said(trace).startswith("1 query has every key masked out in head 1 (first: query 3 of batch item 2)")


def test_nothing_is_said_where_every_query_has_a_key() -> None:
    assert said(trace_layer(AttentionSpec(**SIZES), InputSpec(batch=3, seq_len=5, padding=(0, 4, 2)), RunSpec())) == ""


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


class Two(nn.Module):
    """Two attentions after another; the second's mask is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(), Attend(2)

    def forward(self, x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        return self.second(self.first(x, mask), other)


def test_masks_that_follow_one_another_mask_together() -> None:
    x, early = torch.randn(2, 5, 12), torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    late = early.clone()
    early[1, 0, 2, :3], late[1, 0, 2, 3:] = True, True
    module = Attend().eval()
    assert module(x, early, late).isnan().any(-1).nonzero().tolist() == [[1, 2]]
    assert said(mha_inspect.trace(module, x, early, late)) == sentence("1 query has", 2, 1, "NaN")
    assert said(mha_inspect.trace(module, x, early)) == ""


def test_left_padding_under_a_causal_mask_leaves_queries_without_a_key() -> None:
    layer, x = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12)
    padding = torch.tensor([[True, True, False, False, False], [False] * 5])
    trace = mha_inspect.trace(
        layer, x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), key_padding_mask=padding
    )
    assert said(trace) == sentence("2 queries have", 0, 0, "NaN")


def test_the_first_attention_that_has_any_is_told() -> None:
    x, none = torch.randn(2, 5, 12), torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    other = none.clone()
    other[0, 0, 4] = True
    assert said(mha_inspect.trace(Two().eval(), x, none, other)) == sentence("1 query has", 4, 0, "NaN")


def test_fates_are_told_apart() -> None:
    weights = torch.rand(1, 2, 4, 3)
    weights[0, 1, 1], weights[0, 0, 2], weights[0, 1, 3] = 1 / 3, 0.0, torch.nan
    fates = [fate_of(weights, ((0, query),)) for query in range(4)]
    assert fates == ["numbers", "uniform", "zero", "NaN"]
    assert fate_of(None, ((0, 0),)) == "numbers"
