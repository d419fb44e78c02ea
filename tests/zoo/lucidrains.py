"""Small libraries of one kind of attention each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .table import of, table

_SIZE = {"dim": 44, "heads": 3, "dim_head": 10}
_TRUE: dict[str, Any] = {"heads": 3, "head_dim": 10, "kind": "self", "scale": 10**-0.5, "count": 1}
_RAW = {**_TRUE, "along": 1}
_SOME: dict[str, Any] = {"heads": None, "head_dim": None, "kind": None, "scale": None, "count": None}
_NONE: dict[str, Any] = {"count": 0, "parts": ()}
_CAUSAL = {"kind": "self causal"}
_CROSS = {"kind": "cross"}
_UNSCALED = {"scale": None}


def _media() -> tuple[Any, ...]:
    where = torch.zeros(2, 13, dtype=torch.bool)
    where[:, 0] = where[:, 7] = True
    return torch.randn(2, 13, 44), torch.randn(2, 2, 5, 44), where


_ONE = {
    "local": (of("local_attention.LocalMHA", **_SIZE, window_size=8), "2x32x44", _TRUE),
    "local, causal": (of("local_attention.LocalMHA", **_SIZE, window_size=8, causal=True), "2x32x44", {**_TRUE, **_CAUSAL}),
    "local, exact": (of("local_attention.LocalMHA", **_SIZE, window_size=8, causal=True, exact_windowsize=True), "2x32x44", {**_TRUE, **_CAUSAL}),
    "local, norm": (of("local_attention.LocalMHA", **_SIZE, window_size=8, qk_rmsnorm=True), "2x32x44", {**_TRUE, **_UNSCALED}),
    "local, gates": (of("local_attention.LocalMHA", **_SIZE, window_size=8, gate_values_per_head=True), "2x32x44", _TRUE),
    "local, xpos": (of("local_attention.LocalMHA", **_SIZE, window_size=8, causal=True, use_xpos=True), "2x32x44", {**_TRUE, **_CAUSAL}),
    "local transformer": (
        of("local_attention.LocalTransformer", num_tokens=50, max_seq_len=32, dim=44, depth=2, heads=3, dim_head=10, local_attn_window_size=8),
        "i2x32",
        {**_TRUE, **_CAUSAL, "count": 2},
    ),
    "linformer": (of("linformer.LinformerSelfAttention", dim=42, seq_len=13, heads=3, k=5), "2x13x42", {**_TRUE, "head_dim": 14, "scale": 14**-0.5}),
    "linformer, width": (of("linformer.LinformerSelfAttention", dim=42, seq_len=13, heads=3, k=5, dim_head=10), "2x13x42", _TRUE),
    "linformer, shared": (
        of("linformer.LinformerSelfAttention", dim=42, seq_len=13, heads=3, k=5, dim_head=10, share_kv=True),
        "2x13x42",
        {**_TRUE, "parts": ("W_q", "W_k")},
    ),
    "linformer, one key head": (
        of("linformer.LinformerSelfAttention", dim=42, seq_len=13, heads=3, k=5, dim_head=10, one_kv_head=True),
        "2x13x42",
        {**_TRUE, "kind": "self grouped", "kv_heads": 1},
    ),
    "linformer, two layers": (of("linformer.Linformer", dim=42, seq_len=13, depth=2, heads=3, k=5, dim_head=10), "2x13x42", {**_TRUE, "count": 2}),
    "axial": (
        of("axial_attention.AxialAttention", dim=42, dim_index=1, heads=3, num_dimensions=2),
        "2x42x5x7",
        {**_TRUE, "head_dim": 14, "scale": 14**-0.5, "count": 2},
    ),
    "axial, one after the other": (
        of("axial_attention.AxialAttention", dim=42, dim_index=1, heads=3, dim_heads=10, num_dimensions=2, sum_axial_out=False),
        "2x42x5x7",
        {**_TRUE, "count": 2},
    ),
    "axial, video": (of("axial_attention.AxialAttention", dim=42, heads=3, dim_heads=10, num_dimensions=3), "2x4x5x7x42", {**_TRUE, "count": 3}),
    "axial transformer": (
        of("axial_attention.AxialImageTransformer", dim=42, depth=1, heads=3, dim_heads=10, reversible=False),
        "2x42x5x7",
        {**_TRUE, "count": 2},
    ),
    "linear attention": (of("linear_attention_transformer.linear_attention_transformer.SelfAttention", dim=42, heads=3), "2x13x42", _NONE),
    "linear attention, local": (
        of("linear_attention_transformer.linear_attention_transformer.SelfAttention", dim=42, heads=3, n_local_attn_heads=3, local_attn_window_size=4),
        "2x12x42",
        {**_TRUE, "head_dim": 14, "scale": 14**-0.5},
    ),
    "performer": (of("performer_pytorch.SelfAttention", dim=42, heads=3, dim_head=10, nb_features=17), "2x13x42", _NONE),
    "performer, generalized": (
        of("performer_pytorch.SelfAttention", dim=42, heads=3, dim_head=10, nb_features=17, generalized_attention=True),
        "2x13x42",
        _NONE,
    ),
    "performer, local": (of("performer_pytorch.SelfAttention", dim=42, heads=3, dim_head=10, local_heads=3, local_window_size=4), "2x12x42", _TRUE),
    "reformer": (
        of("reformer_pytorch.LSHSelfAttention", dim=42, heads=3, bucket_size=4, n_hashes=2),
        "2x24x42",
        {**_SOME, "count": 1, "batch": None, "parts": ()},
    ),
    "reformer, whole": (of("reformer_pytorch.LSHSelfAttention", dim=42, heads=3, bucket_size=4, use_full_attn=True), "2x24x42", {**_SOME, "count": 1}),
    "perceiver attention": (of("perceiver_pytorch.perceiver_pytorch.Attention", 44, 31, heads=3, dim_head=10), "2x13x44 2x11x31", {**_RAW, **_CROSS}),
    "perceiver attention, self": (of("perceiver_pytorch.perceiver_pytorch.Attention", 44, heads=3, dim_head=10), "2x13x44", _RAW),
    "perceiver": (
        of(
            "perceiver_pytorch.Perceiver",
            num_freq_bands=2,
            depth=1,
            max_freq=5,
            num_latents=7,
            latent_dim=44,
            cross_heads=1,
            latent_heads=3,
            cross_dim_head=10,
            latent_dim_head=10,
            num_classes=5,
            self_per_cross_attn=1,
        ),
        "2x4x5x3",
        {**_SOME, "head_dim": 10, "scale": 10**-0.5, "count": 2},
    ),
    "perceiver io": (
        of(
            "perceiver_pytorch.PerceiverIO",
            depth=1,
            dim=31,
            queries_dim=29,
            num_latents=7,
            latent_dim=44,
            cross_heads=1,
            latent_heads=3,
            cross_dim_head=10,
            latent_dim_head=10,
        ),
        lambda: (torch.randn(2, 13, 31), None, torch.randn(2, 5, 29)),
        {**_SOME, "head_dim": 10, "scale": 10**-0.5, "count": 3},
    ),
    "nystrom": (of("nystrom_attention.NystromAttention", **_SIZE, num_landmarks=4, residual=False), "2x12x44", {**_SOME, "count": 2, "batch": None}),
    "nystrom, residual": (of("nystrom_attention.NystromAttention", **_SIZE, num_landmarks=4), "2x12x44", {**_SOME, "count": 2, "batch": None}),
    "tables": (
        of("tab_transformer_pytorch.TabTransformer", categories=(7, 5, 3), num_continuous=4, dim=44, depth=2, heads=3, dim_head=10, mlp_act=nn.ReLU()),
        lambda: (torch.randint(0, 3, (2, 3)), torch.randn(2, 4)),
        {**_TRUE, "count": 2},
    ),
    "tables, FT": (
        of("tab_transformer_pytorch.FTTransformer", categories=(7, 5, 3), num_continuous=4, dim=44, depth=2, heads=3, dim_head=10),
        lambda: (torch.randint(0, 3, (2, 3)), torch.randn(2, 4)),
        {**_TRUE, "count": 2},
    ),
    "tables, attention": (of("tab_transformer_pytorch.ft_transformer.Attention", **_SIZE), "2x13x44", _RAW),
    "conformer attention": (of("conformer.conformer.Attention", **_SIZE), "2x13x44", _RAW),
    "conformer": (of("conformer.Conformer", dim=44, depth=2, heads=3, dim_head=10, conv_kernel_size=5), "2x13x44", {**_TRUE, "count": 2}),
    "ring": (of("ring_attention_pytorch.RingAttention", **_SIZE, force_regular_attn=True), "2x13x44", _RAW),
    "ring, causal": (of("ring_attention_pytorch.RingAttention", **_SIZE, force_regular_attn=True, causal=True), "2x13x44", {**_RAW, **_CAUSAL}),
    "ring, grouped": (
        of("ring_attention_pytorch.RingAttention", dim=44, heads=6, dim_head=10, num_grouped_query_heads=3, force_regular_attn=True),
        "2x13x44",
        {**_RAW, "heads": 6, "kv_heads": 2, "kind": "self grouped"},
    ),
    "ring, in buckets": (of("ring_attention_pytorch.RingAttention", **_SIZE, bucket_size=4), "2x12x44", {**_SOME}),
    "ring, rotary": (of("ring_attention_pytorch.RingAttention", **_SIZE, force_regular_attn=True, rotary_embed=True), "2x13x44", _RAW),
    "CoCa": (
        of(
            "coca_pytorch.CoCa",
            dim=44,
            num_tokens=50,
            unimodal_depth=1,
            multimodal_depth=1,
            heads=3,
            dim_head=10,
            image_dim=42,
            num_img_queries=5,
            img_encoder=of(
                "vit_pytorch.simple_vit_with_patch_dropout.SimpleViT", image_size=20, patch_size=4, num_classes=7, dim=42, depth=1, heads=3, mlp_dim=20
            ),
        ),
        lambda: (torch.randint(1, 50, (2, 13)), None, torch.randn(2, 11, 42)),
        {**_SOME},
    ),
    "CoCa, parallel": (of("coca_pytorch.coca_pytorch.ParallelTransformerBlock", **_SIZE), "2x13x44", {**_RAW, "kv_heads": 1, "kind": "self causal grouped"}),
    "CoCa, cross": (
        of("coca_pytorch.coca_pytorch.CrossAttention", 44, context_dim=31, heads=3, dim_head=10),
        "2x13x44 2x11x31",
        {**_RAW, "kv_heads": 1, "kind": "cross grouped"},
    ),
    "CoCa, cross, parallel": (
        of("coca_pytorch.coca_pytorch.CrossAttention", 44, context_dim=31, heads=3, dim_head=10, parallel_ff=True, norm_context=True),
        "2x13x44 2x11x31",
        {**_RAW, "kv_heads": 1, "kind": "cross grouped"},
    ),
    "flamingo, resampler": (of("flamingo_pytorch.PerceiverResampler", **_SIZE, depth=1, num_latents=5), "2x3x7x44", {**_TRUE, "kind": "cross"}),
    "flamingo, cross": (of("flamingo_pytorch.flamingo_pytorch.MaskedCrossAttention", **_SIZE), _media, {**_TRUE, **_CROSS}),
    "flamingo, gated": (of("flamingo_pytorch.GatedCrossAttentionBlock", **_SIZE), _media, {**_TRUE, **_CROSS}),
    "muse": (of("muse_maskgit_pytorch.muse_maskgit_pytorch.Attention", 44, heads=3, dim_head=10), "2x13x44", {**_RAW, **_UNSCALED}),
    "muse, cross": (
        of("muse_maskgit_pytorch.muse_maskgit_pytorch.Attention", 44, heads=3, dim_head=10, cross_attend=True),
        "2x13x44 2x11x44",
        {**_RAW, **_UNSCALED, **_CROSS},
    ),
    "sinkhorn": (
        of("sinkhorn_transformer.sinkhorn_transformer.SinkhornSelfAttention", dim=42, heads=3, bucket_size=4, max_seq_len=12),
        "2x12x42",
        {**_SOME, "count": 1, "batch": None},
    ),
    "point transformer": (
        of("point_transformer_pytorch.PointTransformerLayer", dim=44, pos_mlp_hidden_dim=7, attn_mlp_hidden_mult=2),
        "2x11x44 2x11x3",
        {**_SOME, "count": 0, "parts": ()},
    ),
    "points": (of("egnn_pytorch.EGNN", dim=44), "2x11x44 2x11x3", _NONE),
    "points, global": (
        of("egnn_pytorch.EGNN_Network", depth=1, dim=44, num_tokens=50, global_linear_attn_every=1, global_linear_attn_heads=3, global_linear_attn_dim_head=10),
        "i2x11 2x11x3",
        {**_SOME, "count": 2},
    ),
    "gMLP": (of("g_mlp_pytorch.gMLP", num_tokens=50, dim=44, depth=2, seq_len=13), "i2x13", _NONE),
    "aMLP": (of("g_mlp_pytorch.gMLP", num_tokens=50, dim=44, depth=1, seq_len=13, attn_dim=10), "i2x13", {**_TRUE, "heads": 1}),
    "aMLP, causal": (of("g_mlp_pytorch.gMLP", num_tokens=50, dim=44, depth=1, seq_len=13, attn_dim=10, causal=True), "i2x13", {**_TRUE, "heads": 1, **_CAUSAL}),
    "mixer": (of("mlp_mixer_pytorch.MLPMixer", image_size=20, channels=3, patch_size=4, dim=44, depth=2, num_classes=7), "2x3x20x20", _NONE),
    "graph transformer": (of("graph_transformer_pytorch.GraphTransformer", dim=44, depth=1, heads=3, dim_head=10, edge_dim=7), "2x11x44 2x11x11x7", {**_TRUE}),
    "graph transformer, rotary": (
        of("graph_transformer_pytorch.GraphTransformer", dim=44, depth=1, heads=3, dim_head=10, rel_pos_emb=True, edge_dim=7),
        "2x11x44 2x11x11x7",
        {**_TRUE},
    ),
    "uniformer": (
        of("uniformer_pytorch.Uniformer", num_classes=7, dims=(16, 20, 24, 30), depths=(1, 1, 1, 1), dim_head=10),
        "1x3x4x64x64",
        {**_SOME, "head_dim": 64, "count": 2, "batch": None},
    ),
    "timesformer": (
        of("timesformer_pytorch.TimeSformer", dim=44, num_frames=3, num_classes=7, image_size=20, patch_size=10, depth=1, heads=3, dim_head=10),
        "2x3x3x20x20",
        {**_SOME, "head_dim": 10, "heads": 3},
    ),
    "halo": (of("halonet_pytorch.HaloAttention", dim=44, block_size=4, halo_size=2, dim_head=10, heads=3), "2x44x8x12", {**_TRUE}),
    "lambda": (of("lambda_networks.LambdaLayer", 44, dim_k=5, n=16, heads=4), "2x44x16x16", _NONE),
    "bottleneck": (
        of("bottleneck_transformer_pytorch.BottleStack", dim=24, fmap_size=4, dim_out=40, num_layers=1, heads=3, dim_head=10, downsample=False),
        "2x24x4x4",
        {**_TRUE},
    ),
    "bottleneck, relative": (
        of(
            "bottleneck_transformer_pytorch.BottleStack",
            dim=24,
            fmap_size=4,
            dim_out=40,
            num_layers=1,
            heads=3,
            dim_head=10,
            downsample=False,
            rel_pos_emb=True,
        ),
        "2x24x4x4",
        {**_TRUE},
    ),
    "efficient": (of("memory_efficient_attention_pytorch.Attention", **_SIZE), "2x13x44", _RAW),
    "efficient, causal": (of("memory_efficient_attention_pytorch.Attention", **_SIZE, causal=True), "2x13x44", {**_RAW, **_CAUSAL}),
    "efficient, in buckets": (
        of("memory_efficient_attention_pytorch.Attention", **_SIZE, memory_efficient=True, q_bucket_size=4, k_bucket_size=4),
        "2x12x44",
        {**_SOME, "count": 1, "parts": ()},
    ),
    "efficient, cosine": (
        of("memory_efficient_attention_pytorch.memory_efficient_cosine_sim_attention.CosineSimAttention", **_SIZE, seq_len=13),
        "2x13x44",
        {**_RAW, **_UNSCALED},
    ),
    "slots": (
        of("slot_attention.SlotAttention", num_slots=5, dim=44, iters=2),
        "2x13x44",
        {**_SOME, "count": 2, "heads": 1, "head_dim": 44, "scale": 44**-0.5},
    ),
    "slots, heads": (
        of("slot_attention.MultiHeadSlotAttention", num_slots=5, dim=44, heads=3, dim_head=10, iters=2),
        "2x13x44",
        {**_SOME, "count": 2, "heads": 3, "head_dim": 10, "scale": 10**-0.5},
    ),
    "soft mixture": (of("soft_moe_pytorch.SoftMoE", dim=44, num_experts=4, seq_len=13), "2x13x44", _NONE),
    "soft mixture, dynamic": (of("soft_moe_pytorch.DynamicSlotsSoftMoE", dim=44, num_experts=4), "2x13x44", _NONE),
    "codes": (of("vector_quantize_pytorch.VectorQuantize", dim=44, codebook_size=16), "2x13x44", _NONE),
    "codes, cosine": (of("vector_quantize_pytorch.VectorQuantize", dim=44, codebook_size=16, use_cosine_sim=True), "2x13x44", _NONE),
    "codes, orthogonal": (of("vector_quantize_pytorch.VectorQuantize", dim=44, codebook_size=16, heads=2, separate_codebook_per_head=True), "2x13x44", _NONE),
    "codes, gumbel": (
        of("vector_quantize_pytorch.VectorQuantize", dim=44, codebook_size=16, stochastic_sample_codes=True, sample_codebook_temp=1.0),
        "2x13x44",
        _NONE,
    ),
    "codes, residual": (of("vector_quantize_pytorch.ResidualVQ", dim=44, codebook_size=16, num_quantizers=2), "2x13x44", _NONE),
    "codes, grouped": (of("vector_quantize_pytorch.GroupedResidualVQ", dim=44, codebook_size=16, num_quantizers=2, groups=2), "2x13x44", _NONE),
    "codes, finite": (of("vector_quantize_pytorch.FSQ", levels=[8, 5, 5], dim=44), "2x13x44", _NONE),
    "codes, free": (of("vector_quantize_pytorch.LFQ", codebook_size=256, dim=44), "2x13x44", _NONE),
    "codes, simple": (of("vector_quantize_pytorch.SimVQ", dim=44, codebook_size=16), "2x13x44", _NONE),
    "codes, random": (of("vector_quantize_pytorch.RandomProjectionQuantizer", dim=44, num_codebooks=2, codebook_dim=7, codebook_size=16), "2x13x44", _NONE),
    "codes, latent": (of("vector_quantize_pytorch.LatentQuantize", levels=[5, 5, 8], dim=44), "2x44x13", _NONE),
    "codes, binary": (of("vector_quantize_pytorch.BinaryMapper", bits=4), "2x13x4", _NONE),
    "agents": (
        of("agent_attention_pytorch.AgentSelfAttention", 44, num_agent_tokens=5, heads=3, dim_head=10),
        "2x13x44",
        {**_SOME, "heads": 3, "head_dim": 10, "count": 2},
    ),
    "agents, plain": (
        of("agent_attention_pytorch.AgentSelfAttention", 44, num_agent_tokens=5, heads=3, dim_head=10, talking_heads=False, gate=False),
        "2x13x44",
        {**_SOME, "heads": 3, "head_dim": 10, "scale": 10**-0.5, "count": 2},
    ),
    "infini": (
        of("infini_transformer_pytorch.InfiniTransformer", num_tokens=50, dim=44, depth=2, heads=3, dim_head=10),
        "i2x13",
        {**_TRUE, **_CAUSAL, "count": 2},
    ),
    "titans, segments": (of("titans_pytorch.mac_transformer.SegmentedAttention", 44, 4, heads=3, dim_head=10), "2x12x44", {**_TRUE, **_CAUSAL}),
    "titans, memory": (of("titans_pytorch.NeuralMemory", 44, chunk_size=4), "2x12x44", {**_NONE, "batch": None}),
    "sparse": (
        of(
            "native_sparse_attention_pytorch.SparseAttention",
            dim=44,
            dim_head=10,
            heads=3,
            sliding_window_size=4,
            compress_block_size=4,
            compress_block_sliding_stride=2,
            selection_block_size=4,
            num_selected_blocks=2,
        ),
        "2x16x44",
        {**_SOME, "head_dim": 10, "scale": 10**-0.5, "count": 3},
    ),
    "enformer": (of("enformer_pytorch.modeling_enformer.Attention", 44, num_rel_pos_features=12, heads=3, dim_key=10, dim_value=7), "2x13x44", _RAW),
    "colt5": (of("colt5_attention.transformer_block.Attention", 44, heads=3, dim_head=10), "2x13x44", {**_TRUE}),
    "colt5, routed": (
        of(
            "colt5_attention.ConditionalRoutedAttention",
            44,
            num_heavy_tokens_q=5,
            num_heavy_tokens_kv=7,
            light_dim_head=10,
            light_heads=3,
            light_window_size=4,
            heavy_dim_head=10,
            heavy_heads=3,
        ),
        "2x16x44",
        {**_SOME, "head_dim": 10, "heads": 3, "scale": 10**-0.5},
    ),
    "colt5, routed feedforward": (of("colt5_attention.ConditionalRoutedFeedForward", 44, num_heavy_tokens=5), "2x16x44", _NONE),
    "colt5, router": (of("colt5_attention.CoordinateDescentRouter", 44), lambda: (torch.randn(2, 16, 44),), {**_NONE, "kwargs": lambda: {"num_tokens": 5}}),
    "key-value bottleneck": (of("discrete_key_value_bottleneck_pytorch.DiscreteKeyValueBottleneck", 44, num_memories=16, dim_memory=10), "2x13x44", _NONE),
    "points, several heads": (of("point_transformer_pytorch.MultiheadPointTransformerLayer", dim=44, heads=3, dim_head=10), "2x11x44 2x11x3", _NONE),
    "geometric": (
        of("se3_transformer_pytorch.SE3Transformer", dim=12, heads=2, dim_head=6, depth=1, num_degrees=1, output_degrees=1, num_neighbors=4),
        "2x8x12 2x8x3",
        {**_SOME, "parts": ()},
    ),
}

CONFIGURATIONS = table("small libraries", {}, _ONE)
