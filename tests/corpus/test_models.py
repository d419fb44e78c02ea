"""Models of a library, from shrunken configs with random weights. The weights that they return are the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.naming.pattern import STAGES
from mha_inspect.questions.params import params
from mha_inspect.reports.params import HeadSlice, ParamsReport
from mha_inspect.running.subject import Subject

from .entry import Truth
from .runs import Numbers
from .test_parameters import cut

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 97, "num_hidden_layers": 2, "pad_token_id": 0}
WIDE = {"hidden_size": 30, "num_attention_heads": 3, "intermediate_size": 32}
SPLIT = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 32, "head_dim": 10}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
LATENT = {
    "q_lora_rank": 14,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 7,
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 30, "n_head": 3, "n_layer": 2, "vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {**TEXT, **SPLIT},
    "t5": {"d_model": 48, "d_kv": 10, "num_heads": 3, "num_layers": 2, "d_ff": 32, "vocab_size": 97, **SPECIAL},
    "swin": {
        "embed_dim": 12,
        "depths": [1, 1],
        "num_heads": [3, 6],
        "window_size": 3,
        "image_size": 24,
        "patch_size": 2,
    },
    "deberta-v2": {**TEXT, **WIDE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "gpt_neox": {**TEXT, **WIDE},
    "bloom": {"vocab_size": 97, "hidden_size": 30, "n_head": 3, "n_layer": 2},
    "falcon": {**TEXT, "hidden_size": 30, "num_attention_heads": 3, "multi_query": True},
    "deepseek_v3": {**TEXT, **SPLIT, "num_attention_heads": 3, **LATENT, "num_key_value_heads": 3},
    "gemma2": {**TEXT, **SPLIT, "query_pre_attn_scalar": 24},
}
HEADS = {"llama": (6, 3, 10), "gemma2": (6, 3, 10), "falcon": (3, 1, 10)}
"""Heads, key heads and features of a head, where they are not 3, 3 and 10."""
SCALES = {"t5": 1.0, "deberta-v2": 30**-0.5, "gemma2": 24**-0.5, "swin": 4**-0.5}


@cache
def model(kind: str) -> nn.Module:
    return drawn(kind, CONFIGS[kind])


def drawn(kind: str, options: dict[str, Any]) -> nn.Module:
    """Return a model with weights that are large enough to tell heads apart."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    module = transformers.AutoModel.from_config(config, attn_implementation="eager")
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return module.eval()


def inputs(kind: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    if kind == "swin":
        return {"pixel_values": torch.randn(batch, 3, 24, 24)}
    tokens = {"input_ids": torch.randint(5, 90, (batch, length))}
    if kind == "t5":
        tokens["decoder_input_ids"] = torch.randint(5, 90, (batch, length - 2))
    return tokens


def weights_in(returned: Any) -> Any:
    for name, value in returned.items():
        if "attentions" in name:
            yield from value


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_heads_and_scale_are_those_of_the_model(kind: str) -> None:
    given = {**inputs(kind, 5, 11), "output_attentions": True}
    with torch.no_grad():
        told = mha_inspect.trace(model(kind), **given, keep=True).attentions
        left = list(weights_in(model(kind)(**given)))
    assert len(told) == len(left) == (6 if kind == "t5" else 2)
    for place, attention in enumerate(told):
        heads = (3 * (place + 1), 3 * (place + 1), 4) if kind == "swin" else HEADS.get(kind, (3, 3, 10))
        assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == heads
        assert attention.scale == pytest.approx(SCALES.get(kind, attention.head_dim**-0.5), rel=1e-5)
        weights = Numbers(attention, Truth(*heads, lengths={"batch": 5})).of("weights")
        alike = [at for at, value in enumerate(left) if is_close(value, weights)]
        assert alike, (attention.module, weights.shape)
        del left[alike[0]]
        # bloom's baddbmm adds the bias within the product: there are no scores before it
        absent = {"masked_scores", "scores"} if kind == "bloom" else {"masked_scores"}
        assert {*STAGES} - {stage.name for stage in attention.stages} <= absent


def is_close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left.double(), right.double())


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox", "falcon"])
def test_the_rows_of_a_head_change_the_weights_of_that_head_alone(kind: str) -> None:
    module, given = model(kind), inputs(kind, 2, 7)
    report = params(Subject(module, (), given), per_head=True)
    heads, shared, _ = HEADS.get(kind, (3, 3, 10))
    before, parameters = first_weights(module, given), dict(module.named_parameters())
    seen = set()
    for row, piece in pieces_of_first_layer(report):
        seen.add(piece.part)
        with torch.no_grad():
            kept = parameters[row].clone()
            cut(parameters[row], piece).add_(1)
            after = first_weights(module, given)
            parameters[row].copy_(kept)
        changed = [head for head in range(before.shape[1]) if not torch.equal(before[:, head], after[:, head])]
        group = 1 if piece.part == "W_q" else heads // shared
        assert changed == list(range(piece.head * group, piece.head * group + group)), (row, piece)
    assert seen == {"W_q", "W_k"}


def first_weights(module: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        weights: torch.Tensor = module(**given, output_attentions=True)["attentions"][0]
    return weights


def pieces_of_first_layer(report: ParamsReport) -> Iterator[tuple[str, HeadSlice]]:
    for row in report.parameters:
        for piece in row.heads or ():
            if piece.part in ("W_q", "W_k") and ".1." not in row.name:
                yield row.name, piece


def test_windows_that_overlap() -> None:
    """Weights are `batch heads query window`, without the padding to whole windows."""
    given = {"input_ids": torch.randint(5, 90, (2, 13), generator=torch.Generator().manual_seed(0))}
    module = drawn("longformer", {**TEXT, **WIDE, "max_position_embeddings": 64, "attention_window": 8})
    with torch.no_grad():
        returned = module(**given, output_attentions=True)["attentions"][0]
        attention = mha_inspect.trace(module, **given, keep=True).attentions[0]
    stages = {stage.name: stage for stage in attention.stages}
    torch.testing.assert_close(stages["weights"].tensor[:, :13].transpose(1, 2), returned)
    torch.testing.assert_close(stages["masked_scores"].tensor.softmax(-1)[:, :13], stages["weights"].tensor[:, :13])
    assert (stages["query"].axes, stages["q_heads"].axes) == (
        "positions batch embed",
        "(batch heads) windows query head_dim",
    )
    assert (attention.num_heads, attention.head_dim) == (3, 10)
