"""vit-pytorch: every model of images, series and videos in it."""

from __future__ import annotations

from typing import Any

from .table import of, table

_SIZE = {"image_size": 20, "patch_size": 4, "num_classes": 10, "dim": 44, "heads": 3, "mlp_dim": 52, "dim_head": 10}
_DEEP = {**_SIZE, "depth": 2}
_VIDEO = {"image_size": 12, "image_patch_size": 4, "frames": 6, "frame_patch_size": 2, "num_classes": 10, "dim": 48}
_VIDEO = {**_VIDEO, "depth": 2, "heads": 3, "mlp_dim": 52, "dim_head": 10}
_SERIES = {"seq_len": 52, "patch_size": 4, "num_classes": 10, "dim": 44, "heads": 3, "mlp_dim": 52, "dim_head": 10}
_TRUE: dict[str, Any] = {"heads": 3, "head_dim": 10, "kind": "self", "scale": 10**-0.5, "count": 2}
_UNSCALED = {"scale": None}
_SOME: dict[str, Any] = {"heads": None, "head_dim": None, "count": None, "kind": None, "scale": None}


def _vit(path: str, **settings: Any) -> Any:
    return of(f"vit_pytorch.{path}", **{**_DEEP, **settings})


def _alone(path: str, **settings: Any) -> Any:
    return of(f"vit_pytorch.{path}", **settings)


_IMAGE = "2x3x20x20"
CONFIGURATIONS = [
    *table(
        "vit-pytorch",
        _TRUE,
        {
            "ViT": (_vit("vit.ViT"), _IMAGE),
            "ViT, mean": (_vit("vit.ViT", pool="mean"), _IMAGE),
            "ViT, one head": (_vit("vit.ViT", heads=1), _IMAGE, {"heads": 1}),
            "SimpleViT": (_vit("simple_vit.SimpleViT"), _IMAGE),
            "DeepViT": (_vit("deepvit.DeepViT"), _IMAGE),
            "parallel": (_vit("parallel_vit.ViT", num_parallel_branches=2), _IMAGE, {"count": 4}),
            "patch dropout": (_vit("vit_with_patch_dropout.ViT"), _IMAGE),
            "patch merger": (_vit("vit_with_patch_merger.ViT", patch_merge_layer=1, patch_merge_num_tokens=7), _IMAGE),
            "flash": (_vit("simple_flash_attn_vit.SimpleViT"), _IMAGE),
            "registers": (_vit("simple_vit_with_register_tokens.SimpleViT"), _IMAGE),
            "norm": (_vit("simple_vit_with_qk_norm.SimpleViT"), _IMAGE, _UNSCALED),
            "small data": (_vit("vit_for_small_dataset.ViT"), _IMAGE, _UNSCALED),
            "memory": (_vit("learnable_memory_vit.ViT"), _IMAGE),
            "value residual": (_vit("simple_vit_with_value_residual.SimpleViT"), _IMAGE),
            "hyper-connections": (_vit("simple_vit_with_hyper_connections.SimpleViT", num_residual_streams=2), _IMAGE),
            "orthogonal": (_vit("simple_vit_orthog_residual_update.SimpleViT"), _IMAGE),
            "relative": (_vit("simple_vit_with_relative_proj_pos_bias.SimpleViT"), _IMAGE),
            "sparse gating": (_vit("simple_vit_with_sparse_gating.SimpleViTWithSparseGating"), _IMAGE),
            "specialized": (_vit("simple_vit_with_specialized_cls.SimpleViT"), _IMAGE),
            "fourier": (_vit("simple_vit_with_fft.SimpleViT", freq_patch_size=4), _IMAGE),
            "attention residual": (_vit("simple_vit_attn_residual.SimpleViTAttnResidual"), _IMAGE, _SOME),
            "dca": (_vit("attn_residual_with_dca_simple_vit.SimpleViT"), _IMAGE, _SOME),
            "UViT": (_vit("simple_uvit.SimpleUViT"), _IMAGE),
            "decorrelated": (_vit("vit_with_decorr.ViT"), _IMAGE),
            "keel": (_vit("vit_with_keel_post_ln.ViT"), _IMAGE),
            "detpool": (_vit("vit_detpool.ViTDetPool"), _IMAGE, _SOME),
            "ViT 5": (_vit("vit_5.ViT", dim_head=12), _IMAGE, {"head_dim": 12, **_UNSCALED}),
            "normalized": (_vit("normalized_vit.nViT"), _IMAGE, _UNSCALED),
            "adaptive tokens": (_vit("ats_vit.ViT", max_tokens_per_depth=(19, 11)), _IMAGE),
            "jumbo": (_vit("jumbo_vit.JumboViT", num_jumbo_cls=1, jumbo_cls_k=2), _IMAGE),
            "RvT": (_vit("rvt.RvT", dim_head=12), _IMAGE, {"head_dim": 12, "scale": 12**-0.5}),
            "RvT, not rotary": (_vit("rvt.RvT", use_rotary=False, use_ds_conv=False), _IMAGE),
            "CaiT": (_vit("cait.CaiT", cls_depth=1), _IMAGE, {**_SOME, "heads": 3, "head_dim": 10, "count": 3}),
            "XCiT": (_vit("xcit.XCiT", cls_depth=1), _IMAGE, {**_SOME, "heads": 3, "count": 3}),
            "PiT": (_vit("pit.PiT", depth=(1, 1)), _IMAGE, _SOME),
            "jet": (_vit("jet_vit.JetViT", dim=40), _IMAGE, _SOME),
            "T2T": (_alone("t2t.T2TViT", **{k: v for k, v in _DEEP.items() if k != "patch_size"}, t2t_layers=((3, 2), (3, 2))), _IMAGE, _SOME),
            "nested": (
                _alone("nest.NesT", image_size=16, patch_size=4, dim=24, heads=3, num_hierarchies=2, block_repeats=(1, 1), num_classes=7),
                "2x3x16x16",
                _SOME,
            ),
            "MaxViT": (
                _alone("max_vit.MaxViT", num_classes=10, dim=20, depth=(1, 1), dim_head=10, window_size=4),
                "2x3x64x64",
                {**_SOME, "head_dim": 10, "scale": 10**-0.5, "kind": "self", "count": 4},
            ),
            "MaxViT, registers": (
                _alone("max_vit_with_registers.MaxViT", num_classes=10, dim=20, depth=(1, 1), dim_head=10, window_size=4),
                "2x3x64x64",
                {**_SOME, "head_dim": 10, "scale": 10**-0.5, "kind": "self", "count": 4},
            ),
            "MobileViT": (
                _alone("mobile_vit.MobileViT", image_size=(64, 64), dims=[24, 28, 32], channels=[4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24], num_classes=7),
                "2x3x64x64",
                {**_SOME, "kind": "self", "heads": 4, "head_dim": 8, "scale": 8**-0.5},
            ),
            "LeViT": (
                _alone("levit.LeViT", image_size=32, num_classes=10, stages=2, dim=(24, 36), depth=1, heads=(3, 6), mlp_mult=2, dim_key=5, dim_value=7),
                "2x3x32x32",
                {**_SOME, "head_dim": 5, "scale": 5**-0.5},
            ),
            "CvT": (
                _alone("cvt.CvT", num_classes=10, s1_emb_dim=12, s2_emb_dim=24, s3_emb_dim=36, s1_depth=1, s2_depth=1, s3_depth=1),
                "2x3x64x64",
                {**_SOME, "head_dim": 64, "scale": 64**-0.5},
            ),
            "CrossViT": (
                _alone(
                    "cross_vit.CrossViT",
                    image_size=24,
                    num_classes=10,
                    sm_dim=20,
                    lg_dim=28,
                    sm_patch_size=4,
                    lg_patch_size=6,
                    sm_enc_heads=3,
                    sm_enc_dim_head=10,
                    lg_enc_depth=1,
                    lg_enc_heads=3,
                    lg_enc_dim_head=10,
                    cross_attn_depth=1,
                    cross_attn_heads=3,
                    cross_attn_dim_head=10,
                    depth=1,
                ),
                "2x3x24x24",
                {**_TRUE, "kind": None, "count": None},
            ),
            "CrossFormer": (
                _alone(
                    "crossformer.CrossFormer", num_classes=7, dim=(32, 32, 64, 64), depth=(1, 1, 1, 1), global_window_size=(4, 2, 2, 1), local_window_size=2
                ),
                "2x3x64x64",
                _SOME,
            ),
            "RegionViT": (_alone("regionvit.RegionViT", num_classes=7, dim=(16, 20, 24, 28), depth=(1, 1, 1, 1), window_size=2), "2x3x64x64", _SOME),
            "ScalableViT": (
                _alone(
                    "scalable_vit.ScalableViT",
                    num_classes=7,
                    dim=24,
                    heads=(2, 4),
                    depth=(1, 1),
                    reduction_factor=(2, 2),
                    window_size=(4, 2),
                    ssa_dim_key=(5, 5),
                    ssa_dim_value=(7, 7),
                    iwsa_dim_key=(5, 5),
                    iwsa_dim_value=(7, 7),
                ),
                "2x3x32x32",
                _SOME,
            ),
            "SepViT": (_alone("sep_vit.SepViT", num_classes=7, dim=24, dim_head=10, heads=(3, 3), depth=(1, 1), window_size=4), "2x3x224x224", _SOME),
            "TwinsSVT": (
                _alone(
                    "twins_svt.TwinsSVT",
                    num_classes=7,
                    s1_emb_dim=16,
                    s2_emb_dim=20,
                    s3_emb_dim=24,
                    s4_emb_dim=28,
                    s1_local_patch_size=4,
                    s2_local_patch_size=4,
                    s3_local_patch_size=2,
                    s4_local_patch_size=2,
                    s1_global_k=4,
                    s2_global_k=4,
                    s3_global_k=2,
                    s4_global_k=2,
                    s3_depth=1,
                    s4_depth=1,
                ),
                "2x3x64x64",
                _SOME,
            ),
            "LookViT": (
                _alone(
                    "look_vit.LookViT",
                    dim=24,
                    image_size=32,
                    num_classes=7,
                    depth=1,
                    patch_size=8,
                    heads=3,
                    dim_head=10,
                    highres_patch_size=4,
                    cross_attn_heads=3,
                    cross_attn_dim_head=10,
                ),
                "2x3x32x32",
                {**_SOME, "heads": 3},
            ),
            "looped": (
                _alone(
                    "looped_vit.LoopedViT",
                    image_size=20,
                    patch_size=4,
                    num_classes=7,
                    dim=44,
                    heads=3,
                    dim_head=10,
                    mlp_dim=52,
                    pre_loop_depth=1,
                    num_looped_blocks=1,
                    post_loop_depth=1,
                    loop_depth=2,
                ),
                _IMAGE,
                {**_TRUE, "count": None, "scale": None},
            ),
            "masked": (
                _alone("mae.MAE", encoder=_vit("vit.ViT", pool="mean"), decoder_dim=40, decoder_heads=3, decoder_dim_head=10),
                _IMAGE,
                {**_TRUE, "count": 3, "batch": None},
            ),
            "series": (_alone("vit_1d.ViT", **_SERIES, depth=2), "2x3x52"),
            "simple series": (_alone("simple_vit_1d.SimpleViT", **_SERIES, depth=2), "2x3x52"),
            "video": (_alone("vit_3d.ViT", **_VIDEO), "2x3x6x12x12"),
            "simple video": (_alone("simple_vit_3d.SimpleViT", **_VIDEO), "2x3x6x12x12"),
            "flash video": (_alone("simple_flash_attn_vit_3d.SimpleViT", **_VIDEO), "2x3x6x12x12"),
            "ViViT": (_alone("vivit.ViViT", **{k: v for k, v in _VIDEO.items() if k != "depth"}, spatial_depth=1, temporal_depth=1), "2x3x6x12x12"),
            "ViViT, not flash": (
                _alone("vivit.ViViT", **{k: v for k, v in _VIDEO.items() if k != "depth"}, spatial_depth=1, temporal_depth=1, use_flash_attn=False),
                "2x3x6x12x12",
            ),
            "ViViT, factorized": (
                _alone(
                    "vivit.ViViT", **{k: v for k, v in _VIDEO.items() if k != "depth"}, spatial_depth=1, temporal_depth=1, variant="factorized_self_attention"
                ),
                "2x3x6x12x12",
            ),
            "any dimensions": (_alone("vit_nd.ViTND", **{k: v for k, v in _DEEP.items() if k != "image_size"}, ndim=2, input_shape=20), _IMAGE),
            "any dimensions, rotary": (
                _alone("vit_nd_rotary.ViTND", **{**{k: v for k, v in _DEEP.items() if k != "image_size"}, "dim_head": 12}, ndim=2, input_shape=20),
                _IMAGE,
                {"head_dim": 12, "scale": 12**-0.5},
            ),
            "any dimensions, polar": (
                _alone("vit_nd_pope.ViTND", **{**{k: v for k, v in _DEEP.items() if k != "image_size"}, "dim_head": 12}, ndim=2, input_shape=20),
                _IMAGE,
                {"head_dim": None, "scale": None},
            ),
        },
    ),
    *table(
        "vit-pytorch",
        {**_TRUE, "count": 1, "along": 1},
        {
            "attention": (_alone("vit.Attention", dim=44, heads=3, dim_head=10), "2x13x44"),
            "attention of SimpleViT": (_alone("simple_vit.Attention", dim=44, heads=3, dim_head=10), "2x13x44"),
            "attention of DeepViT": (_alone("deepvit.Attention", dim=44, heads=3, dim_head=10), "2x13x44"),
            "attention of CaiT": (_alone("cait.Attention", dim=44, heads=3, dim_head=10), "2x13x44", _UNSCALED),
            "attention of flash": (_alone("simple_flash_attn_vit.Attention", dim=44, heads=3, dim_head=10), "2x13x44"),
            "attention of small data": (_alone("vit_for_small_dataset.LSA", dim=44, heads=3, dim_head=10), "2x13x44", _UNSCALED),
            "attention of SepViT": (_alone("jumbo_vit.Attention", dim=44, heads=3, dim_head=10), "2x13x44"),
        },
    ),
]
