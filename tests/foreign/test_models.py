"""Models of a library, from shrunken configs with random weights. The weights that they return are the oracle."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from mha_inspect.answers.params import params
from mha_inspect.naming.pattern import STAGES
from mha_inspect.running.subject import Subject
from tests.corpus.test_parameters import cut

from .truth import Shown, assert_true, attentions

transformers = pytest.importorskip("transformers")

TEXT = {"vocab_size": 97, "num_hidden_layers": 2, "pad_token_id": 0}
WIDE = {"hidden_size": 30, "num_attention_heads": 3, "intermediate_size": 32}
SPLIT = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 32, "head_dim": 10}
CODED = {
    "d_model": 30,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
IMAGE = {"image_size": 24, "patch_size": 4}
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
    "bert": {**TEXT, **WIDE},
    "gpt2": {"n_embd": 30, "n_head": 3, "n_layer": 2, "vocab_size": 97, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {**TEXT, **SPLIT},
    "qwen3": {**TEXT, **SPLIT},
    "t5": {"d_model": 48, "d_kv": 10, "num_heads": 3, "num_layers": 2, "d_ff": 32, "vocab_size": 97, **SPECIAL},
    "bart": {**CODED, **SPECIAL},
    "vit": {**WIDE, **IMAGE, "num_hidden_layers": 2},
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
    "whisper": {**CODED, **SPECIAL, "num_mel_bins": 13, "max_source_positions": 11, "suppress_tokens": None},
    "clip": {
        "text_config": {**TEXT, **WIDE, "eos_token_id": 2, "bos_token_id": 1},
        "vision_config": {**WIDE, **IMAGE, "num_hidden_layers": 2},
        "projection_dim": 20,
    },
    "deepseek_v3": {**TEXT, **SPLIT, "num_attention_heads": 3, **LATENT, "num_key_value_heads": 3},
    "gemma2": {**TEXT, **SPLIT, "query_pre_attn_scalar": 24},
}
HEADS = dict.fromkeys(CONFIGS, (3, 3, 10)) | {
    **dict.fromkeys(("llama", "qwen3", "gemma2"), (6, 3, 10)),
    "falcon": (3, 1, 10),
    "swin": None,
}
SCALES = {"t5": 1.0, "deberta-v2": 30**-0.5, "gemma2": 24**-0.5, "swin": 4**-0.5}
COUNTS = {"t5": 6, "bart": 6, "whisper": 6, "clip": 4}


@cache
def model(kind: str, kernel: str = "eager") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **CONFIGS[kind])
    made = transformers.AutoModel.from_config(config, attn_implementation=kernel)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return made.eval()


def inputs(kind: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tokens = {"input_ids": torch.randint(5, 90, (batch, length))}
    pixels = {"pixel_values": torch.randn(batch, 3, 24, 24)}
    decoder = {"decoder_input_ids": torch.randint(5, 90, (batch, length - 2))}
    return {
        "vit": pixels,
        "swin": pixels,
        "clip": {**tokens, **pixels},
        "t5": {**tokens, **decoder},
        "bart": {**tokens, **decoder},
        "whisper": {"input_features": torch.randn(batch, 13, 22), **decoder},
    }.get(kind, tokens)


def run(kind: str, batch: int, length: int) -> tuple[list[Shown], list[torch.Tensor]]:
    """The attentions of an eager run, and the weights that it returns."""
    given = {**inputs(kind, batch, length), "output_attentions": True}
    found = attentions(model(kind), **given)
    with torch.no_grad():
        return found, list(weights_in(model(kind)(**given)))


def weights_in(returned: Any) -> Any:
    for name, value in returned.items():
        if "attentions" in name:
            yield from value
        elif hasattr(value, "items"):
            yield from weights_in(value)


@pytest.mark.parametrize(("batch", "length"), [(2, 7), (5, 11)])
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_weights_are_those_that_the_model_returns(kind: str, batch: int, length: int) -> None:
    found, returned = run(kind, batch, length)
    assert len(found) == len(returned) == COUNTS.get(kind, 2)
    left = list(returned)
    for attention in found:
        assert_true(attention)
        weights = attention.canonical("weights", "batch heads query key")
        match = next(
            (one for one in left if one.shape == weights.shape and torch.allclose(one.double(), weights)), None
        )
        assert match is not None, (attention.found.module, weights.shape)
        left = [one for one in left if one is not match]
        assert weights.shape[0] % batch == 0
        assert {*STAGES} - {*attention.found.stages} <= {"masked_scores", "scores"}
        if "scores" not in attention.found.stages:
            assert kind == "bloom"  # baddbmm adds the bias within the product


@pytest.mark.parametrize("kind", CONFIGS)
def test_heads_and_scale_are_those_of_the_config(kind: str) -> None:
    for place, attention in enumerate(run(kind, 2, 7)[0]):
        names, found = attention.names, attention.found
        heads = HEADS[kind] or (3 * (place + 1), 3 * (place + 1), 4)
        assert (names.num_heads, names.num_kv_heads, names.head_dim) == heads
        assert found.scale == pytest.approx(SCALES.get(kind, names.head_dim**-0.5), rel=1e-5)
        assert (("tanh", None) in found.scoring) == (kind == "gemma2")
        assert bool(found.earlier) == (kind == "deepseek_v3")


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "gpt_neox", "bloom", "falcon"])
def test_the_rows_of_a_head_change_the_weights_of_that_head_alone(kind: str) -> None:
    module, given = model(kind), {**inputs(kind, 2, 7)}
    report = params(Subject(module, (), given), per_head=True)
    heads, shared, _ = HEADS[kind] or (1, 1, 0)
    group = heads // shared

    def weights() -> torch.Tensor:
        with torch.no_grad():
            returned = module(**given, output_attentions=True)
        first: torch.Tensor = returned["encoder_attentions" if kind == "t5" else "attentions"][0]
        return first

    before, parameters = weights(), dict(module.named_parameters())
    seen = set()
    for row in report.parameters:
        for piece in row.heads or ():
            first_layer = ".1." not in row.name and "decoder" not in row.name
            if piece.part not in ("W_q", "W_k") or not first_layer:
                continue
            seen.add(piece.part)
            with torch.no_grad():
                kept = parameters[row.name].clone()
                cut(parameters[row.name], piece).add_(1)
                after = weights()
                parameters[row.name].copy_(kept)
            changed = [head for head in range(before.shape[1]) if not torch.equal(before[:, head], after[:, head])]
            own = [piece.head] if piece.part == "W_q" else [piece.head * group + n for n in range(group)]
            assert changed == own, (row.name, piece)
    assert seen == {"W_q", "W_k"}
