"""Models that cut sequences into windows, or put several widths into one matrix: a name is true, or it is a number."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from .truth import Shown, assert_true, attentions

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 97, "num_hidden_layers": 1, "pad_token_id": 0, "intermediate_size": 32}
LATENT = {
    **TEXT,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}


def run(kind: str, **config: Any) -> tuple[list[Shown], list[torch.Tensor]]:
    torch.manual_seed(0)
    made = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(kind, **config), attn_implementation="eager"
    ).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    given = {"input_ids": torch.randint(5, 90, (2, 13))}
    if kind == "longt5":
        given["decoder_input_ids"] = torch.randint(5, 90, (2, 7))
    with torch.no_grad():
        returned = made(**given, output_attentions=True)
    weights = returned["encoder_attentions" if kind == "longt5" else "attentions"]
    return attentions(made, **given), [one for one in weights if one is not None]


def assert_one_size_a_name(attention: Shown) -> None:
    sizes: dict[str, int] = {}
    for stage, pattern in attention.axes().items():
        dims = re.findall(r"\([^)]*\)|\S+", pattern)
        for dim, size in zip(dims, attention.found.stages[stage].shape, strict=True):
            if dim.isidentifier():
                assert sizes.setdefault(dim, size) == size, (stage, pattern)
            elif dim.isdigit():
                assert int(dim) == size, (stage, pattern)


@pytest.mark.parametrize(("nope", "value", "named"), [(6, 7, "packed"), (8, 8, "packed")])
def test_keys_without_positions_as_wide_as_values(nope: int, value: int, named: str) -> None:
    """Of the published latent attentions both are 128 wide: the piece of a matrix for keys is no half of it."""
    found, returned = run("deepseek_v3", **LATENT, qk_nope_head_dim=nope, v_head_dim=value)
    attention = found[0]
    assert_true(attention)
    torch.testing.assert_close(attention.value("weights"), returned[0])
    assert attention.axes()["k_proj"] == f"batch 1 key (heads {named})"
    assert (attention.names.num_heads, attention.names.head_dim) == (3, nope + 4)


def test_as_many_features_with_positions_as_without_come_to_an_end() -> None:
    """Rotated in pairs and in halves: one axis in two orders."""
    found, returned = run("deepseek_v3", **{**LATENT, "qk_rope_head_dim": 8}, qk_nope_head_dim=8, v_head_dim=8)
    torch.testing.assert_close(found[0].value("weights"), returned[0])
    assert (found[0].names.num_heads, found[0].names.head_dim) == (3, 16)


def test_windows_that_overlap() -> None:
    config = {**TEXT, "hidden_size": 30, "num_attention_heads": 3, "max_position_embeddings": 64}
    found, returned = run("longformer", **config, attention_window=8)
    assert_one_size_a_name(run("longformer", **config, attention_window=16)[0][0])
    attention = found[0]
    assert_one_size_a_name(attention)
    # batch heads query window, without the padding to whole windows
    weights = attention.value("weights")
    torch.testing.assert_close(weights[:, :13].transpose(1, 2), returned[0])
    assert weights.shape == (2, 16, 3, 9)
    for stage in ("scores", "masked_scores"):
        assert attention.found.stages[stage].shape == weights.shape
    torch.testing.assert_close(attention.value("masked_scores").softmax(-1)[:, :13], weights[:, :13])
    axes = attention.axes()
    assert (axes["query"], axes["q_heads"]) == ("positions batch embed", "(batch heads) windows query head_dim")
    assert (attention.names.num_heads, attention.names.head_dim) == (3, 10)


@pytest.mark.parametrize("radius", [3, 16])
def test_a_sequence_that_is_padded_to_whole_windows(radius: int) -> None:
    config = {"d_model": 30, "num_heads": 3, "d_kv": 10, "num_layers": 1, "num_decoder_layers": 1, "d_ff": 32}
    found, returned = run(
        "longt5", **config, vocab_size=97, local_radius=radius, decoder_start_token_id=1, pad_token_id=0
    )
    attention = found[0]
    assert_one_size_a_name(attention)
    axes = attention.axes()
    windows = "windows" if radius < 13 else "1"
    assert (axes["query"], axes["weights"]) == ("batch positions embed", f"batch {windows} heads query key")
    torch.testing.assert_close(attention.value("weights"), returned[0])
    q, k, weights = (attention.value(stage) for stage in ("q_heads", "k_heads", "scores"))
    torch.testing.assert_close(torch.einsum("bwqhd,bwkhd->bwhqk", q, k), weights)


def test_heads_of_experts_share_keys() -> None:
    """Each token has the query heads of the experts that it is sent to, before the keys of all."""
    config = {**TEXT, "hidden_size": 30, "num_key_value_heads": 3, "kv_channels": 10, "num_local_experts": 4}
    found, returned = run("jetmoe", **config, num_experts_per_tok=2)
    attention = found[0]
    torch.testing.assert_close(attention.value("weights"), returned[0])
    assert attention.axes()["weights"] == "batch heads query key"
    assert (attention.names.num_heads, attention.names.num_kv_heads, attention.names.head_dim) == (6, 3, 10)
