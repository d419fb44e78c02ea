"""Sizes of Hugging Face models that are built in a test: two layers or as many as show each kind, and few features."""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "vocab_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "num_key_value_heads": 4}
_GPT = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128}

_SIZES: dict[str, dict[str, Any]] = {
    "bamba": {**_GROUPED, "mamba_n_heads": 8, "attn_layer_indices": [1]},
    "bart": {"encoder_layers": 2, "decoder_layers": 2, "d_model": 64, "vocab_size": 128},
    "bert": _TEXT,
    "dac": {"encoder_hidden_size": 4, "decoder_hidden_size": 96},
    "deberta-v2": _TEXT,
    "deepseek_v3": {**_TEXT, **_ROUTED, **_LATENT, "num_hidden_layers": 4},
    "gemma4_vision": {**_TEXT, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": None},
    "gpt2": _GPT,
    "hiera": {"image_size": [64, 64]},
    "jamba": {**_GROUPED, "num_hidden_layers": 5, "num_experts": 4},
    "llama": _TEXT,
    "openai-gpt": _GPT,
    "opt": {**_TEXT, "intermediate_size": None, "word_embed_proj_dim": 64, "ffn_dim": 96},
    "qwen3_next": {
        **_GROUPED,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 32,
        "head_dim": 16,
    },
    "t5": {"num_layers": 2, "d_model": 64, "d_ff": 96, "vocab_size": 128},
    "xlnet": {"n_layer": 2, "d_model": 64, "d_inner": 96, "vocab_size": 128, "n_head": 4, "d_head": 16},
}


def settings_of(kind: str) -> dict[str, str]:
    """The settings of a small model of this type, as --set gives them."""
    return {name: str(size) for name, size in _SIZES[kind].items() if size is not None}


def flags_of(kind: str) -> list[str]:
    """The same as words of a command line."""
    return [word for name, size in settings_of(kind).items() for word in ("--set", f"{name}={size}")]
