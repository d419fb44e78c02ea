"""timm: its attention layers, those of its models, whole models, and layers and models that do not attend."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .table import of, table

_TRUE: dict[str, Any] = {"heads": 3, "head_dim": 14, "kind": "self", "scale": 14**-0.5, "count": 1}
_RAW = {**_TRUE, "along": 1}
_SOME: dict[str, Any] = {"heads": None, "head_dim": None, "kind": None, "scale": None}
_UNSCALED = {"scale": None}
_NONE: dict[str, Any] = {"count": 0, "parts": ()}
_HERE = {"dim": 42, "num_heads": 3}


def _layer(name: str, **settings: Any) -> Any:
    return of(f"timm.layers.{name}", **settings)


def _inner(name: str, **settings: Any) -> Any:
    return of(f"timm.models.{name}", **settings)


def _model(name: str, **settings: Any) -> Any:
    return of("timm.create_model", name, num_classes=7, **settings)


def _made(**settings: Any) -> Any:
    return of(
        "timm.models.vision_transformer.VisionTransformer",
        **{"img_size": 20, "patch_size": 4, "embed_dim": 42, "depth": 2, "num_heads": 3, "num_classes": 7, **settings},
    )


CONFIGURATIONS = [
    *table(
        "timm",
        _RAW,
        {
            "Attention": (_layer("Attention", **_HERE), "2x13x42"),
            "Attention, bias": (_layer("Attention", **_HERE, qkv_bias=True), "2x13x42"),
            "Attention, own width": (_layer("Attention", **_HERE, attn_head_dim=10), "2x13x42", {"head_dim": 10, "scale": 10**-0.5}),
            "Attention, wider": (_layer("Attention", **_HERE, dim_out=51), "2x13x42"),
            "Attention, norm": (_layer("Attention", **_HERE, qk_norm=True, norm_layer=nn.LayerNorm), "2x13x42", _UNSCALED),
            "Attention, gated": (_layer("Attention", **_HERE, gated=True), "2x13x42"),
            "AttentionRope": (_layer("AttentionRope", **_HERE), "2x13x42"),
            "AttentionRope, apart": (_layer("AttentionRope", **_HERE, qkv_fused=False), "2x13x42"),
            "AttentionRope, grouped": (
                _layer("AttentionRope", dim=42, num_heads=6, num_kv_heads=2, qkv_fused=False),
                "2x13x42",
                {"heads": 6, "kv_heads": 2, "head_dim": 7, "scale": 7**-0.5, "kind": "self grouped"},
            ),
            "AttentionRope, one key head": (
                _layer("AttentionRope", dim=42, num_heads=6, num_kv_heads=1, qkv_fused=False),
                "2x13x42",
                {"heads": 6, "kv_heads": 1, "head_dim": 7, "scale": 7**-0.5, "kind": "self grouped"},
            ),
            "AttentionRope, gated": (_layer("AttentionRope", **_HERE, gated=True), "2x13x42"),
            "DiffAttention": (_layer("DiffAttention", **_HERE), "2x13x42", {**_SOME, "count": None}),
            "BEiT": (_inner("beit.Attention", **_HERE), "2x13x42"),
            "BEiT, window": (_inner("beit.Attention", **_HERE, window_size=(3, 4)), "2x13x42"),
            "CaiT": (_inner("cait.TalkingHeadAttn", **_HERE), "2x13x42", _UNSCALED),
            "CaiT, class": (_inner("cait.ClassAttn", **_HERE), "2x13x42", {"kind": None, "along": None}),
            "XCiT": (_inner("xcit.XCA", **_HERE), "2x13x42", {**_SOME, "heads": 3, "along": None}),
            "ConViT": (_inner("convit.MHSA", **_HERE), "2x13x42"),
            "ConViT, gated": (_inner("convit.GPSA", **_HERE), "2x16x42", {"along": None, "count": 1}),
            "CrossViT": (_inner("crossvit.CrossAttention", **_HERE), "2x13x42", {"kind": None, "along": None}),
            "DaViT, channels": (_inner("davit.ChannelAttention", **_HERE), "2x13x42", {**_SOME, "along": None}),
            "DaViT, window": (_inner("davit.WindowAttention", **_HERE, window_size=(3, 4)), "2x12x42"),
            "EVA": (_inner("eva.EvaAttention", **_HERE, scale_norm=False), "2x13x42"),
            "EVA, apart": (_inner("eva.EvaAttention", **_HERE, scale_norm=False, qkv_fused=False), "2x13x42"),
            "Swin": (_inner("swin_transformer.WindowAttention", **_HERE, window_size=4), "2x16x42"),
            "Swin 2": (_inner("swin_transformer_v2.WindowAttention", **_HERE, window_size=(4, 4)), "2x16x42", _UNSCALED),
            "Swin 2 CR": (_inner("swin_transformer_v2_cr.WindowMultiHeadAttention", **_HERE, window_size=(4, 4)), "2x16x42", _UNSCALED),
            "Hiera": (_inner("hiera.MaskUnitAttention", dim=42, dim_out=42, heads=3), "2x12x42"),
            "Hiera, pooled": (
                _inner("hiera.MaskUnitAttention", dim=21, dim_out=42, heads=3, q_stride=4, window_size=3, use_mask_unit_attn=True),
                "2x36x21",
                {"along": None},
            ),
            "LeViT": (_inner("levit.Attention", dim=42, key_dim=5, num_heads=3, attn_ratio=2, resolution=4), "2x16x42", {"head_dim": 5, "scale": 5**-0.5}),
            "LeViT, convolution": (
                _inner("levit.Attention", dim=42, key_dim=5, num_heads=3, attn_ratio=2, resolution=4, use_conv=True),
                "2x42x4x4",
                {"head_dim": 5, "scale": 5**-0.5, "along": None},
            ),
            "LeViT, smaller": (
                _inner("levit.AttentionDownsample", in_dim=42, out_dim=50, key_dim=5, num_heads=3, resolution=4),
                "2x16x42",
                {"head_dim": 5, "scale": 5**-0.5, "along": None},
            ),
            "MViT": (
                _inner("mvitv2.MultiScaleAttention", dim=42, dim_out=42, feat_size=(4, 4), num_heads=3, kernel_kv=(3, 3), stride_kv=(2, 2)),
                lambda: (torch.randn(2, 17, 42), [4, 4]),
                {"along": None},
            ),
            "NesT": (_inner("nest.Attention", **_HERE), "2x5x13x42", {"along": None}),
            "PVT 2": (_inner("pvt_v2.Attention", **_HERE, sr_ratio=2), lambda: (torch.randn(2, 16, 42), [4, 4]), {"along": None}),
            "PVT 2, whole": (_inner("pvt_v2.Attention", **_HERE), lambda: (torch.randn(2, 16, 42), [4, 4])),
            "TinyViT": (
                _inner("tiny_vit.Attention", dim=42, key_dim=5, num_heads=3, attn_ratio=2, resolution=(4, 4)),
                "2x16x42",
                {"head_dim": 5, "scale": 5**-0.5},
            ),
            "TNT": (_inner("tnt.Attention", dim=42, hidden_dim=30, num_heads=3), "2x13x42", {"head_dim": 10, "scale": 10**-0.5}),
            "Twins, global": (_inner("twins.GlobalSubSampleAttn", **_HERE, sr_ratio=2), lambda: (torch.randn(2, 16, 42), [4, 4]), {"along": None}),
            "Twins, local": (_inner("twins.LocallyGroupedAttn", **_HERE, ws=2), lambda: (torch.randn(2, 24, 42), [4, 6]), {"along": None}),
            "relative": (_inner("vision_transformer_relpos.RelPosAttention", **_HERE), "2x13x42"),
            "SAM": (_inner("vision_transformer_sam.Attention", **_HERE), "2x4x5x42", {"along": None}),
            "SAM, positions": (_inner("vision_transformer_sam.Attention", **_HERE, use_rel_pos=True, input_size=(4, 5)), "2x4x5x42", {"along": None}),
            "VOLO": (_inner("volo.Attention", **_HERE), "2x4x5x42", {"along": None}),
            "VOLO, class": (_inner("volo.ClassAttention", **_HERE), "2x13x42", {"kind": None, "along": None}),
            "MaxViT, last": (_inner("maxxvit.AttentionCl", dim=42, dim_head=14), "2x4x5x42", {"along": None}),
            "MaxViT, first": (_inner("maxxvit.Attention2d", dim=42, dim_head=14), "2x42x4x5", {"along": None}),
            "metaformer": (_inner("metaformer.Attention", dim=42, head_dim=14), "2x20x42"),
            "EfficientFormer": (
                _inner("efficientformer.Attention", dim=42, key_dim=5, num_heads=3, attn_ratio=2, resolution=4),
                "2x16x42",
                {"head_dim": 5, "scale": 5**-0.5},
            ),
            "EfficientFormer 2": (
                _inner("efficientformer_v2.Attention2d", dim=42, key_dim=5, num_heads=3, attn_ratio=2, resolution=4),
                "2x42x4x4",
                {"head_dim": 5, "scale": None, "along": None},
            ),
            "EdgeNeXt": (_inner("edgenext.CrossCovarianceAttn", **_HERE), "2x13x42", {**_SOME, "heads": 3, "along": None}),
            "FastViT": (_inner("fastvit.Attention", dim=42, head_dim=14), "2x42x4x5", {"along": None}),
            "Visformer": (_inner("visformer.Attention", **_HERE), "2x42x4x5", {"along": None}),
            "SHViT": (_inner("shvit.SHSA", dim=40, qk_dim=6, pdim=10), "2x40x4x5", {"heads": 1, "head_dim": 6, "scale": 6**-0.5, "along": None}),
            "CascadedGroup": (
                _inner("efficientvit_msra.CascadedGroupAttention", dim=42, key_dim=5, num_heads=3, resolution=4, attn_ratio=2.8, kernels=(3, 3, 3)),
                "2x42x4x4",
                {"head_dim": 5, "scale": 5**-0.5, "along": None},
            ),
            "Attention2d": (_layer("Attention2d", **_HERE), "2x42x4x5", {"along": None}),
            "MultiQueryAttention2d": (
                _layer("MultiQueryAttention2d", dim=42, num_heads=3, key_dim=5, value_dim=7),
                "2x42x4x5",
                {"kv_heads": 1, "head_dim": 5, "scale": 5**-0.5, "kind": "self grouped", "along": None},
            ),
            "MultiQueryAttention2d, strided": (
                _layer("MultiQueryAttention2d", dim=42, num_heads=3, key_dim=5, value_dim=5, kv_stride=2),
                "2x42x4x6",
                {"kv_heads": 1, "head_dim": 5, "scale": 5**-0.5, "kind": None, "along": None},
            ),
            "MultiQueryAttentionV2": (
                _layer("MultiQueryAttentionV2", dim=42, num_heads=3, key_dim=5, value_dim=7),
                "2x42x4x5",
                {"kv_heads": 1, "head_dim": 5, "scale": None, "kind": "self grouped", "along": None},
            ),
            "AttentionPool2d": (
                _layer("AttentionPool2d", in_features=42, feat_size=(4, 5), num_heads=3, head_dim=None),
                "2x42x4x5",
                {"kind": None, "along": None},
            ),
            "RotAttentionPool2d": (
                _layer("RotAttentionPool2d", in_features=48, ref_feat_size=4, num_heads=3, head_dim=16),
                "2x48x4x4",
                {"kind": None, "head_dim": 16, "scale": 0.25, "along": None},
            ),
            "AttentionPoolLatent": (_layer("AttentionPoolLatent", in_features=42, num_heads=3), "2x13x42", {"kind": "cross", "along": None}),
            "AttentionPoolPrr": (_layer("AttentionPoolPrr", **_HERE), "2x13x42", {**_SOME, "parts": (), "along": None}),
            "NonLocal": (_layer("NonLocalAttn", in_channels=42, rd_channels=10), "2x42x4x5", {"heads": 1, "head_dim": 10, "scale": 42**-0.5, "along": None}),
            "parallel block": (_inner("vision_transformer.ParallelScalingBlock", **_HERE), "2x13x42"),
        },
    ),
    *table(
        "timm",
        {**_TRUE, "count": 2},
        {
            "ViT": (_made(), "2x3x20x20"),
            "ViT, registers": (_made(reg_tokens=3), "2x3x20x20"),
            "ViT, mean": (_made(global_pool="avg", class_token=False), "2x3x20x20"),
            "ViT, pooled by attention": (_made(global_pool="map", class_token=False), "2x3x20x20", {"count": 3, "kind": None}),
            "ViT, norm": (_made(qk_norm=True), "2x3x20x20", _UNSCALED),
        },
    ),
    *table(
        "timm",
        _SOME,
        {
            "swin_tiny": (
                _model("swin_tiny_patch4_window7_224", img_size=56, embed_dim=24, depths=(2, 2), num_heads=(2, 4), window_size=7),
                "2x3x56x56",
                {"head_dim": 12, "scale": 12**-0.5, "kind": "self", "count": 4},
            ),
            "swinv2_tiny": (
                _model("swinv2_tiny_window8_256", img_size=64, embed_dim=24, depths=(2, 2), num_heads=(2, 4), window_size=8),
                "2x3x64x64",
                {"head_dim": 12, "kind": "self", "count": 4},
            ),
            "gcvit": (_model("gcvit_xxtiny", img_size=128), "2x3x128x128"),
            "davit": (_model("davit_tiny", embed_dims=(24, 24, 48, 48), depths=(1, 1, 1, 1), num_heads=(2, 2, 4, 4)), "2x3x64x64"),
            "cait": (_model("cait_xxs24_224", img_size=64, depth=2), "2x3x64x64", {"heads": 4, "head_dim": 48}),
            "xcit": (_model("xcit_nano_12_p16_224", img_size=64, depth=2), "2x3x64x64"),
            "coat": (_model("coat_lite_tiny", img_size=64), "2x3x64x64", _NONE),
            "convit": (_model("convit_tiny", img_size=64, depth=3, local_up_to_layer=2), "2x3x64x64", {"heads": 4, "count": 3}),
            "crossvit": (_model("crossvit_tiny_240", depth=([1, 1, 0],)), "1x3x240x240", {"heads": 3, "batch": None}),
            "eva02": (_model("eva02_tiny_patch14_224", img_size=56, depth=2), "2x3x56x56", {"heads": 3, "head_dim": 64, "scale": 0.125}),
            "beit": (
                _model("beit_base_patch16_224", img_size=64, depth=2, embed_dim=48, num_heads=3),
                "2x3x64x64",
                {"heads": 3, "head_dim": 16, "scale": 0.25},
            ),
            "deit3": (_model("deit3_small_patch16_224", img_size=64, depth=2), "2x3x64x64", {"heads": 6, "head_dim": 64}),
            "levit": (_model("levit_128s", img_size=64), "2x3x64x64", {"head_dim": 16, "scale": 0.25}),
            "mvitv2": (_model("mvitv2_tiny", img_size=64), "2x3x64x64"),
            "nest": (_model("nest_tiny", img_size=64), "2x3x64x64", {"head_dim": 32}),
            "pit": (_model("pit_ti_224", img_size=64), "2x3x64x64", {"head_dim": 32, "kind": "self"}),
            "pvt_v2": (_model("pvt_v2_b0", depths=(1, 1, 1, 1)), "2x3x64x64", {"head_dim": 32}),
            "tiny_vit": (_model("tiny_vit_5m_224"), "2x3x64x64", {"head_dim": 32}),
            "tnt": (_model("tnt_s_legacy_patch16_224", img_size=64, depth=1), "2x3x64x64", {"count": 2}),
            "twins": (_model("twins_svt_small", img_size=64, depths=(1, 1, 1, 1)), "2x3x64x64"),
            "visformer": (_model("visformer_tiny", img_size=64), "2x3x64x64"),
            "volo": (_model("volo_d1_224", img_size=64), "2x3x64x64", {"count": 16}),
            "maxvit": (_model("maxvit_rmlp_pico_rw_256", img_size=64), "2x3x64x64", {"head_dim": 32}),
            "coatnet": (_model("coatnet_nano_rw_224", img_size=64), "2x3x64x64", {"head_dim": 32}),
            "mobilevit": (_model("mobilevit_xxs"), "2x3x64x64", {"heads": 4}),
            "mobilevitv2": (_model("mobilevitv2_050"), "2x3x64x64", _NONE),
            "edgenext": (_model("edgenext_xx_small"), "2x3x64x64"),
            "efficientformer": (_model("efficientformer_l1"), "2x3x224x224", {"heads": 8, "head_dim": 32, "count": 1}),
            "efficientformerv2": (_model("efficientformerv2_s0"), "2x3x224x224", {"batch": None}),
            "fastvit": (_model("fastvit_sa12", layers=(1, 1, 1, 1)), "2x3x64x64", {"head_dim": 32, "count": 1}),
            "poolformer, attention": (_model("caformer_s18"), "2x3x64x64", {"head_dim": 32, "count": 12}),
            "nextvit": (_model("nextvit_small"), "2x3x64x64"),
            "hiera": (_model("hiera_tiny_224", img_size=64, stages=(1, 1, 1, 1)), "2x3x64x64"),
            "mobilenetv4": (_model("mobilenetv4_hybrid_medium"), "2x3x64x64"),
            "vit_sam": (_model("samvit_base_patch16", img_size=64, depth=2, embed_dim=48, num_heads=3), "2x3x64x64", {"heads": 3}),
            "relpos": (_model("vit_relpos_small_patch16_224", img_size=64, depth=2), "2x3x64x64", {"heads": 6, "head_dim": 64}),
            "sequencer": (_model("sequencer2d_s", layers=(1, 1, 1, 1)), "2x3x64x64", _NONE),
            "shvit": (_model("shvit_s1"), "2x3x128x128", {"heads": 1}),
            "swiftformer": (_model("swiftformer_xs"), "2x3x64x64", {"count": None}),
            "efficientvit": (_model("efficientvit_b0"), "2x3x64x64", _NONE),
            "resnet": (_model("resnet18"), "2x3x64x64", _NONE),
            "convnext": (_model("convnext_atto"), "2x3x64x64", _NONE),
            "mixer": (_model("mixer_s32_224", img_size=64), "2x3x64x64", _NONE),
            "gmlp": (_model("gmlp_ti16_224", img_size=64), "2x3x64x64", _NONE),
            "resnest": (_model("resnest14d"), "2x3x64x64", _NONE),
            "sknet": (_model("skresnet18"), "2x3x64x64", _NONE),
            "senet": (_model("seresnet18"), "2x3x64x64", _NONE),
            "eca": (_model("ecaresnet26t"), "2x3x64x64", _NONE),
            "focalnet": (_model("focalnet_tiny_srf"), "2x3x64x64", _NONE),
            "poolformer": (_model("poolformer_s12"), "2x3x64x64", _NONE),
            "mambaout": (_model("mambaout_femto"), "2x3x64x64", _NONE),
            "ghostnet": (_model("ghostnet_100"), "2x3x64x64", _NONE),
            "gcresnet": (_model("gcresnet33ts"), "2x3x64x64", _NONE),
            "lambda": (_model("lambda_resnet26t"), "2x3x64x64", _NONE),
            "halonet": (_model("halonet26t"), "2x3x256x256", {"count": None}),
            "botnet": (_model("botnet26t_256", img_size=64), "2x3x64x64"),
        },
    ),
]
