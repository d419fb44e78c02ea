"""x-transformers: its attention with every setting, and language models of it."""

from __future__ import annotations

from typing import Any

from .table import of, table

_SIZE = {"dim": 44, "heads": 3, "dim_head": 10}
_TRUE = {"heads": 3, "head_dim": 10, "kind": "self", "scale": 10**-0.5}
_RAW = {**_TRUE, "along": 1}
_CAUSAL = {"kind": "self causal"}
_GROUPED = {"kind": "self grouped", "kv_heads": 1}
_UNSCALED = {"scale": None}


def _attention(**settings: Any) -> Any:
    return of("x_transformers.x_transformers.Attention", **{**_SIZE, **settings})


_FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"flash": True},
    "head scale": {"head_scale": True},
    "top k": {"sparse_topk": 4},
    "memory": {"num_mem_kv": 2},
    "memory, flash": {"num_mem_kv": 2, "flash": True},
    "on attention": {"on_attn": True},
    "gate heads": {"gate_value_heads": True},
    "swiglu": {"swiglu_values": True},
    "gate": {"gate_values": True},
    "gate rank": {"gate_values": True, "gate_values_rank": 4},
    "gate by head": {"gate_values": True, "gate_values_headwise": True},
    "output gate": {"output_gate": True},
    "value width": {"value_dim_head": 7},
    "value norm": {"value_rmsnorm": True},
    "output width": {"dim_out": 51},
    "output deep": {"output_proj_depth": 2},
    "zero key": {"add_zero_kv": True},
    "zero key, flash": {"add_zero_kv": True, "flash": True},
    "sink": {"head_learned_sink": True},
    "clamp": {"softclamp_logits": True},
    "signed": {"cog_signed": True},
    "laser": {"laser": True},
    "orthogonal": {"orthog_projected_values": True},
    "orthogonal by head": {"orthog_projected_values_per_head": True},
    "latent query": {"use_latent_q": True, "dim_latent_q": 17},
    "latent key": {"use_latent_kv": True, "dim_latent_kv": 17},
    "latent both": {"use_latent_q": True, "dim_latent_q": 17, "use_latent_kv": True, "dim_latent_kv": 19},
    "latent, flash": {"use_latent_kv": True, "dim_latent_kv": 17, "flash": True},
    "zero output": {"zero_init_output": True},
    "onnx": {"onnxable": True},
}
_NORMED: dict[str, dict[str, Any]] = {
    "norm": {"qk_norm": True},
    "norm, flash": {"qk_norm": True, "flash": True},
    "norm in groups": {"qk_norm": True, "qk_norm_groups": 2},
    "norm with gain": {"qk_norm": True, "qk_norm_dim_scale": True},
    "norm scaled": {"qk_norm": True, "qk_norm_scale": 4},
    "rms": {"qk_rmsnorm": True},
    "rms of keys": {"k_rmsnorm": True},
    "talking": {"pre_talking_heads": True, "post_talking_heads": True},
    "talking before": {"pre_talking_heads": True},
    "talking after": {"post_talking_heads": True},
    "talking before the scale": {"pre_scale_post_talking_heads": True},
}
_SHAPED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"causal": True}, _CAUSAL),
    "causal, flash": ({"causal": True, "flash": True}, _CAUSAL),
    "selective": ({"causal": True, "selective": True}, _CAUSAL),
    "causal, memory": ({"causal": True, "num_mem_kv": 2}, _CAUSAL),
    "causal, memory, flash": ({"causal": True, "num_mem_kv": 2, "flash": True}, _CAUSAL),
    "causal, zero key": ({"causal": True, "add_zero_kv": True}, _CAUSAL),
    "causal, past": ({"causal": True, "max_attend_past": 3}, _CAUSAL),
    "causal, clamp": ({"causal": True, "softclamp_logits": True}, _CAUSAL),
    "causal, top k": ({"causal": True, "sparse_topk": 3}, _CAUSAL),
    "causal, sink": ({"causal": True, "head_learned_sink": True}, _CAUSAL),
    "causal, alibi of data": ({"causal": True, "data_dependent_alibi": True}, _CAUSAL),
    "causal, alibi by row": ({"causal": True, "data_dependent_alibi": True, "data_dependent_alibi_per_row": True}, _CAUSAL),
    "causal, cope": ({"causal": True, "use_cope": True}, _CAUSAL),
    "causal, talking": ({"causal": True, "pre_talking_heads": True, "post_talking_heads": True}, {**_CAUSAL, **_UNSCALED}),
    "causal, distances": ({"causal": True, "use_rel_proj_pos_bias": True}, _CAUSAL),
    "one key head": ({"one_kv_head": True}, _GROUPED),
    "one key head, flash": ({"one_kv_head": True, "flash": True}, _GROUPED),
    "one key head, causal": ({"one_kv_head": True, "causal": True}, {**_GROUPED, "kind": "self causal grouped"}),
    "two key heads": ({"heads": 6, "kv_heads": 2}, {**_GROUPED, "heads": 6, "kv_heads": 2}),
    "two key heads, flash": ({"heads": 6, "kv_heads": 2, "flash": True}, {**_GROUPED, "heads": 6, "kv_heads": 2}),
    "two key heads, memory": ({"heads": 6, "kv_heads": 2, "num_mem_kv": 3}, {**_GROUPED, "heads": 6, "kv_heads": 2}),
    "three key heads, values": ({"heads": 6, "kv_heads": 3, "value_dim_head": 7}, {**_GROUPED, "heads": 6, "kv_heads": 3}),
    "one head": ({"heads": 1}, {"heads": 1}),
    "sigmoid": ({"sigmoid": True}, {"count": 1}),
}
_CROSS: dict[str, dict[str, Any]] = {
    "plain": {},
    "flash": {"flash": True},
    "other width": {"dim_context": 31},
    "other width, flash": {"dim_context": 31, "flash": True},
    "memory": {"num_mem_kv": 2},
    "values": {"value_dim_head": 7},
    "norm of keys": {"k_rmsnorm": True},
}
_DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "rotary": ({"rotary_pos_emb": True, "attn_dim_head": 32}, {"head_dim": 32, "scale": 32**-0.5}),
    "rotary, part": ({"rotary_pos_emb": True, "attn_dim_head": 64}, {"head_dim": 64, "scale": 64**-0.5}),
    "rotary, flash": ({"rotary_pos_emb": True, "attn_dim_head": 32, "attn_flash": True}, {"head_dim": 32, "scale": 32**-0.5}),
    "rotary xpos": ({"rotary_pos_emb": True, "rotary_xpos": True, "attn_dim_head": 32}, {"head_dim": 32, "scale": 32**-0.5}),
    "polar": ({"polar_pos_emb": True, "attn_dim_head": 32}, {"head_dim": 64, "scale": 32**-0.5}),
    "alibi": ({"alibi_pos_bias": True}, {}),
    "alibi, flash": ({"alibi_pos_bias": True, "attn_flash": True}, {}),
    "alibi of some heads": ({"alibi_pos_bias": True, "alibi_num_heads": 2}, {}),
    "t5 bias": ({"rel_pos_bias": True}, {}),
    "dynamic bias": ({"dynamic_pos_bias": True}, {}),
    "flash": ({"attn_flash": True}, {}),
    "rms": ({"use_rmsnorm": True}, {}),
    "simple rms": ({"use_simple_rmsnorm": True}, {}),
    "tanh": ({"use_dynamic_tanh": True}, {}),
    "scale norm": ({"use_scalenorm": True}, {}),
    "post norm": ({"pre_norm": False}, {}),
    "sandwich": ({"sandwich_norm": True}, {}),
    "residual attention": ({"residual_attn": True}, {}),
    "macaron": ({"macaron": True}, {}),
    "gated residual": ({"gate_residual": True}, {}),
    "scaled residual": ({"scale_residual": True}, {}),
    "shifted": ({"shift_tokens": 1}, {}),
    "unet": ({"unet_skips": True}, {}),
    "integrated": ({"integrate_layers": True}, {}),
    "streams": ({"num_residual_streams": 2}, {}),
    "value residual": ({"add_value_residual": True}, {}),
    "reinject": ({"reinject_input": True}, {}),
    "layer scale": ({"use_layerscale": True}, {}),
    "gate values": ({"attn_gate_values": True}, {}),
    "clamp": ({"attn_softclamp_logits": True}, {}),
    "laser": ({"attn_laser": True}, {}),
    "alibi of data": ({"attn_data_dependent_alibi": True}, {}),
    "memory": ({"attn_num_mem_kv": 3}, {}),
    "latent query": ({"attn_use_latent_q": True, "attn_dim_latent_q": 24}, {}),
    "latent key": ({"attn_use_latent_kv": True, "attn_dim_latent_kv": 24}, {}),
    "one key head": ({"attn_one_kv_head": True}, {"kv_heads": 1, "kind": "self causal grouped"}),
    "norm": ({"attn_qk_norm": True}, _UNSCALED),
    "differential residuals": ({"qkv_receive_diff_residuals": True, "num_residual_streams": 2}, {}),
    "tied": ({"weight_tie_layers": True}, {}),
}


def _model(layers: str = "Decoder", **settings: Any) -> Any:
    own = of(f"x_transformers.{layers}", **{"dim": 44, "depth": 2, "heads": 3, "attn_dim_head": 10, **settings})
    return of("x_transformers.TransformerWrapper", num_tokens=50, max_seq_len=32, attn_layers=own)


CONFIGURATIONS = [
    *table("x-transformers", _RAW, {name: (_attention(**own), "2x13x44") for name, own in _FLAGS.items()}),
    *table("x-transformers", {**_RAW, **_UNSCALED}, {name: (_attention(**own), "2x13x44") for name, own in _NORMED.items()}),
    *table("x-transformers", _RAW, {name: (_attention(**own), "2x13x44", true) for name, (own, true) in _SHAPED.items()}),
    *table(
        "x-transformers",
        {**_RAW, "kind": "cross"},
        {f"cross, {name}": (_attention(**own), f"2x13x44 2x11x{own.get('dim_context', 44)}") for name, own in _CROSS.items()},
    ),
    *table("x-transformers", {**_TRUE, **_CAUSAL, "count": 2}, {f"decoder, {name}": (_model(**own), "i2x13", true) for name, (own, true) in _DECODERS.items()}),
    *table(
        "x-transformers",
        _TRUE,
        {
            "encoder": (_model("Encoder"), "i2x13", {"count": 2}),
            "encoder, memory tokens": (
                of(
                    "x_transformers.TransformerWrapper",
                    num_tokens=50,
                    max_seq_len=32,
                    num_memory_tokens=3,
                    attn_layers=of("x_transformers.Encoder", dim=44, depth=1, heads=3, attn_dim_head=10),
                ),
                "i2x13",
                {"count": 1},
            ),
            "continuous": (
                of(
                    "x_transformers.ContinuousTransformerWrapper",
                    dim_in=7,
                    dim_out=5,
                    max_seq_len=32,
                    attn_layers=of("x_transformers.Encoder", dim=44, depth=1, heads=3, attn_dim_head=10),
                ),
                "2x13x7",
                {"count": 1},
            ),
            "images": (
                of(
                    "x_transformers.ViTransformerWrapper",
                    image_size=20,
                    patch_size=4,
                    num_classes=10,
                    attn_layers=of("x_transformers.Encoder", dim=44, depth=1, heads=3, attn_dim_head=10),
                ),
                "2x3x20x20",
                {"count": 1},
            ),
            "cross attender": (
                of("x_transformers.CrossAttender", dim=44, depth=1, heads=3, attn_dim_head=10),
                "2x13x44 2x11x44",
                {"count": 1, "kind": "cross"},
            ),
        },
    ),
]
