"""Attention of libraries that others wrote, small, with what their authors say of it: heads, widths, scale and kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

SIZE = {"dim": 48, "heads": 6, "dim_head": 8}
SCALE = 8**-0.5


@dataclass(frozen=True)
class Configuration:
    """A module, its arguments, and what is true of each of its attentions; None where there is no one answer."""

    name: str
    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    count: int | None = 1
    heads: int | None = 6
    kv_heads: int | None = 6
    head_dim: int | None = 8
    kind: str | None = "self"
    scale: float | None = SCALE


def tokens() -> tuple[torch.Tensor]:
    return (torch.randint(0, 50, (2, 16)),)


def features() -> tuple[torch.Tensor]:
    return (torch.randn(2, 16, 48),)


def two() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 16, 48), torch.randn(2, 11, 48)


def longer() -> tuple[torch.Tensor]:
    return (torch.randn(2, 32, 48),)


def image(size: int = 32) -> Callable[[], tuple[torch.Tensor]]:
    return lambda: (torch.randn(2, 3, size, size),)


def _of(path: str, **settings: Any) -> Callable[[], nn.Module]:
    module, _, name = path.rpartition(".")
    return lambda: getattr(import_module(module), name)(**settings)


def _x_transformers() -> Iterator[Configuration]:
    plain: dict[str, dict[str, Any]] = {
        "plain": {},
        "flash": {"flash": True},
        "null": {"num_mem_kv": 2},
        "zero": {"add_zero_kv": True},
        "gate": {"gate_values": True},
        "gate-heads": {"gate_value_heads": True},
        "top-k": {"sparse_topk": 4},
        "head-scale": {"head_scale": True},
        "value-width": {"value_dim_head": 4},
        "soft-clamp": {"softclamp_logits": True},
        "signed": {"cog_signed": True},
    }
    attention = "x_transformers.x_transformers.Attention"
    for name, settings in plain.items():
        yield Configuration(f"x-{name}", _of(attention, **SIZE, **settings), features)
    normed: dict[str, dict[str, Any]] = {
        "qk-norm": {"qk_norm": True},
        "qk-norm-groups": {"qk_norm": True, "qk_norm_groups": 2},
        "qk-norm-dim": {"qk_norm": True, "qk_norm_dim_scale": True},
        "qk-norm-scale": {"qk_norm": True, "qk_norm_scale": 4},
        "talking": {"pre_talking_heads": True, "post_talking_heads": True},
    }
    for name, settings in normed.items():
        yield Configuration(f"x-{name}", _of(attention, **SIZE, **settings), features, scale=None)
    shaped: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
        ("causal", "self causal", 6, {"causal": True}),
        ("causal-flash", "self causal", 6, {"causal": True, "flash": True}),
        ("selective", "self causal", 6, {"causal": True, "selective": True}),
        ("two-key-heads", "self grouped", 2, {"kv_heads": 2}),
        ("one-key-head", "self grouped", 1, {"one_kv_head": True}),
    )
    for name, kind, kv, settings in shaped:
        yield Configuration(f"x-{name}", _of(attention, **SIZE, **settings), features, kv_heads=kv, kind=kind)
    for flash in (False, True):
        yield Configuration(f"x-cross-{flash}", _of(attention, **SIZE, flash=flash), two, kind="cross")
    yield from _language_models()


_FLAGS = (
    "rotary_pos_emb",
    "alibi_pos_bias",
    "rel_pos_bias",
    "dynamic_pos_bias",
    "attn_flash",
    "use_rmsnorm",
    "sandwich_norm",
    "residual_attn",
    "macaron",
    "gate_residual",
    "attn_gate_values",
    "unet_skips",
    "attn_softclamp_logits",
    "attn_laser",
    "attn_data_dependent_alibi",
    "shift_tokens",
)
"""Settings of a decoder, each tried by itself."""


def _language_models() -> Iterator[Configuration]:
    def model(layers: str, **settings: Any) -> Callable[[], nn.Module]:
        own = _of(f"x_transformers.{layers}", dim=48, depth=2, heads=6, attn_dim_head=8, **settings)
        return lambda: import_module("x_transformers").TransformerWrapper(
            num_tokens=50, max_seq_len=32, attn_layers=own()
        )

    for setting in _FLAGS:
        yield Configuration(f"x-{setting}", model("Decoder", **{setting: True}), tokens, 2, kind="self causal")
    decoders: dict[str, dict[str, Any]] = {
        "memory": {"attn_num_mem_kv": 3},
        "flash-rotary": {"attn_flash": True, "rotary_pos_emb": True},
        "latent-query": {"attn_use_latent_q": True, "attn_dim_latent_q": 24},
        "latent-key": {"attn_use_latent_kv": True, "attn_dim_latent_kv": 24},
    }
    for name, settings in decoders.items():
        yield Configuration(f"x-{name}", model("Decoder", **settings), tokens, 2, kind="self causal")
    for name, kv, own in (("2", 2, {"attn_kv_heads": 2}), ("1", 1, {"attn_one_kv_head": True})):
        grouped = model("Decoder", **own)
        yield Configuration(f"x-grouped-{name}", grouped, tokens, 2, kv_heads=kv, kind="self causal grouped")
    yield Configuration("x-norm", model("Decoder", attn_qk_norm=True), tokens, 2, kind="self causal", scale=None)
    yield Configuration("x-encoder", model("Encoder"), tokens, 2)


def _vit() -> Iterator[Configuration]:
    model = {**SIZE, "image_size": 32, "patch_size": 8, "num_classes": 10, "depth": 2, "mlp_dim": 96}
    named: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("vit.ViT", 2, {}),
        ("simple_vit.SimpleViT", 2, {}),
        ("deepvit.DeepViT", 2, {}),
        ("parallel_vit.ViT", 4, {"num_parallel_branches": 2}),
        ("vit_with_patch_dropout.ViT", 2, {}),
        ("simple_flash_attn_vit.SimpleViT", 2, {}),
        ("simple_vit_with_register_tokens.SimpleViT", 2, {}),
        ("learnable_memory_vit.ViT", 2, {}),
        ("pit.PiT", 2, {"depth": (1, 1)}),
    )
    for path, count, settings in named:
        kind = None if path.startswith("pit") else "self"
        heads = None if path.startswith("pit") else 6
        made = _of(f"vit_pytorch.{path}", **{**model, **settings})
        yield Configuration(f"vit-{path}", made, image(), count, heads, heads, kind=kind)
    for path in ("simple_vit_with_qk_norm.SimpleViT", "vit_for_small_dataset.ViT"):
        yield Configuration(f"vit-{path}", _of(f"vit_pytorch.{path}", **model), image(), 2, scale=None)
    windows = _of("vit_pytorch.max_vit.MaxViT", num_classes=10, dim=24, depth=(1, 1), dim_head=8, window_size=4)
    yield Configuration("vit-max", windows, image(64), 4, None, None)
    nested = _of(
        "vit_pytorch.nest.NesT", image_size=32, patch_size=4, dim=24, heads=3, num_hierarchies=2, block_repeats=(1, 1),
        num_classes=10,
    )  # fmt: skip
    yield Configuration("vit-nest", nested, image(), 2, None, None)


def _others() -> Iterator[Configuration]:
    local = {**SIZE, "window_size": 8}
    yield Configuration("local", _of("local_attention.LocalMHA", **local), longer)
    yield Configuration(
        "local-causal", _of("local_attention.LocalMHA", **local, causal=True), longer, kind="self causal"
    )
    linformer = "linformer.LinformerSelfAttention"
    fewer = {"dim": 48, "seq_len": 16, "heads": 6, "k": 4}
    yield Configuration("linformer", _of(linformer, **fewer), features)
    yield Configuration("linformer-shared", _of(linformer, **fewer, share_kv=True), features)
    one = _of(linformer, **fewer, one_kv_head=True)
    yield Configuration("linformer-one", one, features, kv_heads=1, kind="self grouped")
    efficient = "memory_efficient_attention_pytorch.Attention"
    yield Configuration("efficient", _of(efficient, **SIZE, causal=True), features, kind="self causal")
    slots = _of("slot_attention.SlotAttention", num_slots=5, dim=48, iters=2)
    yield Configuration("slots", slots, features, 2, 1, 1, 48, None, 48**-0.5)
    axial = _of("axial_attention.AxialAttention", dim=48, dim_index=1, heads=6, num_dimensions=2)
    yield Configuration("axial", axial, lambda: (torch.randn(2, 48, 5, 7),), 2)


def _none() -> Iterator[Configuration]:
    codes = "vector_quantize_pytorch"
    for name, path, settings in (
        ("soft-moe", "soft_moe_pytorch.SoftMoE", {"dim": 48, "num_experts": 4, "seq_len": 16}),
        ("vq", f"{codes}.VectorQuantize", {"dim": 48, "codebook_size": 16}),
        ("vq-cosine", f"{codes}.VectorQuantize", {"dim": 48, "codebook_size": 16, "use_cosine_sim": True}),
        ("vq-residual", f"{codes}.ResidualVQ", {"dim": 48, "codebook_size": 16, "num_quantizers": 2}),
        ("fsq", f"{codes}.FSQ", {"levels": [8, 5, 5], "dim": 48}),
        ("lfq", f"{codes}.LFQ", {"codebook_size": 256, "dim": 48}),
        ("sim-vq", f"{codes}.SimVQ", {"dim": 48, "codebook_size": 16}),
    ):
        yield Configuration(f"none-{name}", _of(path, **settings), features, 0)


CONFIGURATIONS = (*_x_transformers(), *_vit(), *_others(), *_none())
