"""Larger libraries: their attention, some of their models, and what in them does not attend."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn

from .table import of, table

_TRUE: dict[str, Any] = {"heads": 3, "head_dim": 14, "kind": "self", "scale": 14**-0.5, "count": 1}
_RAW = {**_TRUE, "along": 1}
_CROSS = {"kind": "cross"}
_CAUSAL = {"kind": "self causal"}
_SOME: dict[str, Any] = {"heads": None, "head_dim": None, "kind": None, "scale": None, "count": None}
_NONE: dict[str, Any] = {"count": 0, "parts": ()}
_X, _Y = "2x13x42", "2x11x42"


class Called(nn.Module):
    """Calls a module with arguments of another order, or with some that are always the same."""

    def __init__(self, inner: Any, call: Any) -> None:
        super().__init__()
        self.inner, self.call = inner(), call

    def forward(self, *given: torch.Tensor) -> Any:
        return self.call(self.inner, *given)


def _called(inner: Any, call: Any) -> Any:
    return lambda: Called(inner, call)


def _thrice(layer: Any, x: torch.Tensor) -> Any:
    return layer(x, x, x)


def _lengths(layer: Any, x: torch.Tensor) -> Any:
    return layer(x, torch.full((len(x),), x.shape[1]))


def _diffusers() -> list[Any]:
    heads = {"query_dim": 42, "heads": 3, "dim_head": 14}
    inner = "diffusers.models.attention_processor.Attention"
    block = {"dim": 42, "num_attention_heads": 3, "attention_head_dim": 14}
    basic = "diffusers.models.attention.BasicTransformerBlock"

    def sliced(size: int) -> Any:
        def make() -> nn.Module:
            made = of(inner, **heads)()
            made.set_attention_slice(size)
            return made

        return make

    def of_processor(name: str, **settings: Any) -> Any:
        def make() -> nn.Module:
            processor = getattr(import_module("diffusers.models.attention_processor"), name)()
            made: nn.Module = of(inner, **{**heads, **settings}, processor=processor)()
            return made

        return make

    unet = {
        "sample_size": 8,
        "in_channels": 3,
        "out_channels": 3,
        "layers_per_block": 1,
        "block_out_channels": (12, 24),
        "norm_num_groups": 6,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 10,
        "attention_head_dim": 8,
    }
    return table(
        "diffusers",
        _RAW,
        {
            "attention": (of(inner, **heads), _X),
            "attention, bias": (of(inner, **heads, bias=True), _X),
            "attention, plain": (of_processor("AttnProcessor"), _X),
            "attention, fused": (of_processor("AttnProcessor2_0"), _X),
            "attention, sliced": (sliced(1), _X, {"along": None}),
            "attention, norm": (of(inner, **heads, qk_norm="layer_norm"), _X, {"scale": None}),
            "attention, rms": (of(inner, **heads, qk_norm="rms_norm"), _X, {"scale": None}),
            "attention, unscaled": (of(inner, **heads, scale_qk=False), _X, {"scale": 1.0}),
            "attention, cross": (of(inner, **heads, cross_attention_dim=31), "2x13x42 2x11x31", _CROSS),
            "attention, cross, plain": (of_processor("AttnProcessor", cross_attention_dim=31), "2x13x42 2x11x31", _CROSS),
            "attention, images": (of(inner, **heads, norm_num_groups=6, residual_connection=True), "2x42x4x5", {"along": None}),
            "block": (of(basic, **block), _X),
            "block, twice": (of(basic, **block, double_self_attention=True), _X, {"count": 2, "along": None}),
            "block, cross": (
                _called(of(basic, **block, cross_attention_dim=31), lambda layer, x, y: layer(x, encoder_hidden_states=y)),
                "2x13x42 2x11x31",
                {"count": 2, "kind": None, "along": None},
            ),
            "transformer": (
                _called(
                    of(
                        "diffusers.models.Transformer2DModel",
                        num_attention_heads=3,
                        attention_head_dim=14,
                        in_channels=12,
                        norm_num_groups=6,
                        cross_attention_dim=31,
                    ),
                    lambda layer, x, y: layer(x, encoder_hidden_states=y, return_dict=False),
                ),
                "2x12x4x5 2x11x31",
                {"count": 2, "kind": None, "along": None},
            ),
            "UNet": (
                _called(of("diffusers.models.UNet2DConditionModel", **unet), lambda layer, x, y: layer(x, 3, y, return_dict=False)),
                "2x3x8x8 2x7x10",
                {**_SOME, "along": None},
            ),
            "autoencoder": (
                _called(of("diffusers.models.AutoencoderKL", block_out_channels=(12,), norm_num_groups=6), lambda layer, x: layer(x, return_dict=False)),
                "2x3x8x8",
                {"count": 2, "heads": 1, "head_dim": 12, "scale": 12**-0.5, "along": None},
            ),
            "DiT": (
                _called(
                    of(
                        "diffusers.models.DiTTransformer2DModel",
                        num_attention_heads=3,
                        attention_head_dim=16,
                        in_channels=4,
                        num_layers=2,
                        sample_size=8,
                        patch_size=2,
                        norm_num_groups=6,
                    ),
                    lambda layer, x: layer(x, torch.tensor([3, 3]), torch.tensor([1, 2]), return_dict=False),
                ),
                "2x4x8x8",
                {"count": 2, "head_dim": 16, "scale": 0.25, "along": None},
            ),
            "SD3": (
                _called(
                    of(
                        "diffusers.models.SD3Transformer2DModel",
                        sample_size=8,
                        patch_size=2,
                        in_channels=4,
                        num_layers=2,
                        attention_head_dim=16,
                        num_attention_heads=3,
                        joint_attention_dim=31,
                        caption_projection_dim=48,
                        pooled_projection_dim=20,
                        out_channels=4,
                        pos_embed_max_size=8,
                    ),
                    lambda layer, x, y, pooled: layer(x, y, pooled, torch.tensor([3, 3]), return_dict=False),
                ),
                "2x4x8x8 2x11x31 2x20",
                {"count": 2, "head_dim": 16, "scale": 0.25, "kind": None, "along": None, "parts": ()},
            ),
            "ResNet block": (
                _called(of("diffusers.models.resnet.ResnetBlock2D", in_channels=12, temb_channels=None, groups=6), lambda layer, x: layer(x, None)),
                "2x12x4x5",
                {**_NONE, "along": None},
            ),
        },
    )


def _monai() -> list[Any]:
    block, cross = "monai.networks.blocks.SABlock", "monai.networks.blocks.CrossAttentionBlock"
    here = {"hidden_size": 42, "num_heads": 3}
    return table(
        "monai",
        _RAW,
        {
            "SABlock": (of(block, **here), _X),
            "SABlock, apart": (of(block, **here, use_combined_linear=False), _X),
            "SABlock, bias": (of(block, **here, qkv_bias=True), _X),
            "SABlock, width": (of(block, **here, dim_head=10), _X, {"head_dim": 10, "scale": 10**-0.5}),
            "SABlock, saved": (of(block, **here, save_attn=True), _X),
            "SABlock, flash": (of(block, **here, use_flash_attention=True), _X),
            "SABlock, causal": (of(block, **here, causal=True, sequence_length=13), _X, _CAUSAL),
            "SABlock, causal, flash": (of(block, **here, causal=True, sequence_length=13, use_flash_attention=True), _X, _CAUSAL),
            "SABlock, without output": (of(block, **here, include_fc=False), _X),
            "SABlock, positions": (of(block, **here, rel_pos_embedding="decomposed", input_size=(3, 4)), "2x12x42"),
            "cross": (of(cross, **here), f"{_X} {_Y}", _CROSS),
            "cross, flash": (of(cross, **here, use_flash_attention=True), f"{_X} {_Y}", _CROSS),
            "cross, widths": (of(cross, **here, context_input_size=31), "2x13x42 2x11x31", _CROSS),
            "block": (of("monai.networks.blocks.TransformerBlock", **here, mlp_dim=50), _X),
            "block, cross": (
                _called(of("monai.networks.blocks.TransformerBlock", **here, mlp_dim=50, with_cross_attention=True), lambda layer, x, y: layer(x, context=y)),
                f"{_X} {_Y}",
                {"count": 2, "kind": None, "along": None},
            ),
            "spatial": (
                of("monai.networks.blocks.SpatialAttentionBlock", spatial_dims=2, num_channels=42, num_head_channels=14, norm_num_groups=6),
                "2x42x4x5",
                {"along": None},
            ),
            "ViT": (
                of("monai.networks.nets.ViT", in_channels=1, img_size=(8, 8, 8), patch_size=(4, 4, 4), hidden_size=42, mlp_dim=50, num_layers=2, num_heads=3),
                "2x1x8x8x8",
                {"count": 2, "along": None},
            ),
            "window": (
                _called(of("monai.networks.nets.swin_unetr.WindowAttention", dim=42, num_heads=3, window_size=(2, 3)), lambda layer, x: layer(x, None)),
                "2x6x42",
            ),
            "SwinUNETR": (
                of(
                    "monai.networks.nets.SwinUNETR", in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(3, 3, 6, 6), spatial_dims=2
                ),
                "1x1x64x64",
                {**_SOME, "batch": None, "along": None, "parts": ()},
            ),
            "UNETR": (
                of(
                    "monai.networks.nets.UNETR",
                    in_channels=1,
                    out_channels=2,
                    img_size=(32, 32),
                    feature_size=4,
                    hidden_size=42,
                    mlp_dim=50,
                    num_heads=3,
                    spatial_dims=2,
                ),
                "1x1x32x32",
                {"count": 12, "batch": None, "along": None},
            ),
            "SE": (of("monai.networks.blocks.ChannelSELayer", spatial_dims=2, in_channels=12), "2x12x4x5", {**_NONE, "along": None}),
            "gate": (
                of("monai.networks.nets.attentionunet.AttentionBlock", spatial_dims=2, f_int=5, f_g=6, f_l=7),
                "2x6x4x5 2x7x4x5",
                {**_NONE, "along": None},
            ),
            "UNet": (
                of("monai.networks.nets.UNet", spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,)),
                "2x1x8x8",
                {**_NONE, "along": None},
            ),
        },
    )


def _vision() -> list[Any]:
    swin = {"dim": 42, "window_size": [4, 4], "num_heads": 3}
    model = "torchvision.models.{}"
    vit = "torchvision.models.vision_transformer.{}"
    return table(
        "torchvision",
        {**_TRUE, "kind": "self"},
        {
            "encoder block": (of(vit.format("EncoderBlock"), 3, 42, 50, 0.0, 0.0), _X, _RAW),
            "ViT": (of(vit.format("VisionTransformer"), 20, 4, 2, 3, 42, 50, num_classes=7), "2x3x20x20", {"count": 2}),
            "shifted": (of("torchvision.models.swin_transformer.ShiftedWindowAttention", **swin, shift_size=[2, 2]), "2x8x8x42"),
            "not shifted": (of("torchvision.models.swin_transformer.ShiftedWindowAttention", **swin, shift_size=[0, 0]), "2x8x8x42"),
            "shifted, 2": (of("torchvision.models.swin_transformer.ShiftedWindowAttentionV2", **swin, shift_size=[2, 2]), "2x8x8x42", {"scale": None}),
            "Swin": (
                of("torchvision.models.swin_transformer.SwinTransformer", [4, 4], 12, [2, 2], [2, 4], [4, 4], num_classes=7),
                "2x3x64x64",
                {"count": 4, "heads": None, "head_dim": 6, "scale": 6**-0.5},
            ),
            "MaxViT attention": (of("torchvision.models.maxvit.RelativePositionalMultiHeadAttention", 42, 14, 16), "2x5x16x42", {"scale": 42**-0.5}),
            "resnet18": (of(model.format("resnet18"), num_classes=7), "2x3x64x64", _NONE),
            "mobilenet": (of(model.format("mobilenet_v3_small"), num_classes=7), "2x3x64x64", _NONE),
            "convnext": (of(model.format("convnext_tiny"), num_classes=7), "1x3x32x32", {**_NONE, "batch": None}),
            "efficientnet": (of(model.format("efficientnet_b0"), num_classes=7), "1x3x32x32", {**_NONE, "batch": None}),
        },
    )


def _sound() -> list[Any]:
    wav = {
        "extractor_mode": "group_norm",
        "extractor_conv_layer_config": [(12, 10, 5), (12, 3, 2)],
        "extractor_conv_bias": False,
        "encoder_embed_dim": 42,
        "encoder_projection_dropout": 0.0,
        "encoder_pos_conv_kernel": 3,
        "encoder_pos_conv_groups": 2,
        "encoder_num_layers": 2,
        "encoder_num_heads": 3,
        "encoder_attention_dropout": 0.0,
        "encoder_ff_interm_features": 50,
        "encoder_ff_interm_dropout": 0.0,
        "encoder_dropout": 0.0,
        "encoder_layer_norm_first": False,
        "encoder_layer_drop": 0.0,
        "aux_num_out": None,
    }
    return table(
        "torchaudio",
        {**_TRUE},
        {
            "conformer": (_called(of("torchaudio.models.Conformer", 42, 3, 50, 2, 5), _lengths), _X, {"count": 2, "parts": ()}),
            "emformer": (_called(of("torchaudio.models.Emformer", 42, 3, 50, 1, 4, right_context_length=1), _lengths), _X, {"kind": None}),
            "wav2vec2": (of("torchaudio.models.wav2vec2_model", **wav), "2x400", {"count": 2}),
            "DeepSpeech": (of("torchaudio.models.DeepSpeech", 12, 20, 7), "2x1x13x12", _NONE),
            "Wav2Letter": (of("torchaudio.models.Wav2Letter", 7, "mfcc", 12), "2x12x50", _NONE),
        },
    )


def _clip() -> list[Any]:
    inner = "open_clip.transformer.Attention"
    here = {"dim": 42, "num_heads": 3}
    return table(
        "open_clip",
        _RAW,
        {
            "attention": (of(inner, **here), _X),
            "attention, norm": (of(inner, **here, qk_norm=True), _X, {"scale": None}),
            "attention, head scale": (of(inner, **here, scale_heads=True), _X),
            "attention, inner norm": (of(inner, **here, inner_norm=True), _X),
            "block": (of("open_clip.transformer.CustomResidualAttentionBlock", 42, 3), _X),
            "residual block": (of("open_clip.transformer.ResidualAttentionBlock", 42, 3), _X),
            "pooler": (of("open_clip.transformer.AttentionalPooler", 42, 31, n_head=3, n_queries=5), "2x11x31", {**_CROSS, "along": None}),
            "vision": (of("open_clip.transformer.VisionTransformer", 20, 4, 42, 2, 3, 2.0, output_dim=17), "2x3x20x20", {"count": 2, "along": None}),
            "text": (
                of("open_clip.transformer.TextTransformer", context_length=13, vocab_size=50, width=42, heads=3, layers=2, output_dim=17),
                "i2x13",
                {"count": 2, **_CAUSAL, "along": None},
            ),
        },
    )


def _speech() -> list[Any]:
    positions = lambda layer, x: layer(x, x, x, torch.randn(1, 2 * x.shape[1] - 1, 42))  # noqa: E731
    lengths = lambda layer, x, y: layer(x, torch.ones(len(x)), y)  # noqa: E731
    added = {"count": 1, "heads": 1, "head_dim": 17, "kind": "cross", "parts": (), "along": None}
    return table(
        "speechbrain",
        _RAW,
        {
            "heads": (_called(of("speechbrain.nnet.attention.MultiheadAttention", 3, 42), _thrice), _X),
            "relative": (_called(of("speechbrain.nnet.attention.RelPosMHAXL", 42, 3), positions), _X, {"scale": 42**-0.5}),
            "rotary": (_called(of("speechbrain.nnet.attention.RoPEMHA", 42, 3), _thrice), _X, {"scale": 42**-0.5}),
            "content": (_called(of("speechbrain.nnet.attention.ContentBasedAttention", 31, 20, 17, 11), lengths), "2x13x31 2x20", added),
            "location": (_called(of("speechbrain.nnet.attention.LocationAwareAttention", 31, 20, 17, 11, 4, 3), lengths), "2x13x31 2x20", added),
            "CRDNN": (of("speechbrain.nnet.RNN.GRU", 7, input_size=42), _X, {**_NONE, "along": None}),
            "encoder": (
                _called(of("speechbrain.lobes.models.transformer.Transformer.TransformerEncoder", 2, 3, 50, d_model=42), lambda layer, x: layer(x)),
                _X,
                {"count": 2, "along": None},
            ),
        },
    )


def _litgpt() -> list[Any]:
    def model(**settings: Any) -> Any:
        def make() -> nn.Module:
            config = import_module("litgpt").Config(
                **{
                    "block_size": 32,
                    "n_layer": 2,
                    "n_embd": 42,
                    "vocab_size": 50,
                    "padded_vocab_size": 50,
                    "n_head": 3,
                    "rotary_percentage": 1.0,
                    "intermediate_size": 50,
                    **settings,
                }
            )
            made: nn.Module = import_module("litgpt.model").GPT(config)
            return made

        return make

    split = {"n_head": 6, "head_size": 14}
    return table(
        "litgpt",
        {**_TRUE, **_CAUSAL, "count": 2},
        {
            "GPT": (model(), "i2x13"),
            "GPT, sequential": (model(parallel_residual=False), "i2x13"),
            "GPT, part": (model(rotary_percentage=0.5, head_size=12), "i2x13", {"head_dim": 12, "scale": 12**-0.5}),
            "GPT, grouped": (model(**split, n_query_groups=2), "i2x13", {"heads": 6, "kv_heads": 2, "kind": "self causal grouped"}),
            "GPT, one key head": (model(**split, n_query_groups=1), "i2x13", {"heads": 6, "kv_heads": 1, "kind": "self causal grouped"}),
            "GPT, RMS": (model(norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", bias=False), "i2x13"),
            "GPT, norm": (model(norm_qk=True, norm_class_name="RMSNorm"), "i2x13", {"scale": None}),
            "GPT, capped": (model(attention_logit_softcapping=20.0), "i2x13"),
            "GPT, scalar": (model(attention_scores_scalar=20), "i2x13", {"scale": 20**-0.5}),
            "GPT, window": (model(sliding_window_size=4), "i2x13"),
            "GPT, experts": (model(mlp_class_name="LLaMAMoE", moe_intermediate_size=20, n_expert=4, n_expert_per_token=2, bias=False), "i2x13"),
        },
    )


def _graphs() -> list[Any]:
    edges = lambda: (torch.randn(9, 42), torch.randint(0, 9, (2, 30)))  # noqa: E731
    conv = "torch_geometric.nn.{}"
    none = {**_NONE, "batch": None}
    return table(
        "torch_geometric",
        {},
        {
            "TransformerConv": (of(conv.format("TransformerConv"), 42, 14, heads=3), edges, none),
            "GAT": (of(conv.format("GATConv"), 42, 14, heads=3), edges, none),
            "GAT 2": (of(conv.format("GATv2Conv"), 42, 14, heads=3), edges, none),
            "GCN": (of(conv.format("GCNConv"), 42, 14), edges, none),
            "SuperGAT": (of(conv.format("SuperGATConv"), 42, 14, heads=3), edges, none),
            "RGAT": (
                _called(of(conv.format("RGATConv"), 42, 14, num_relations=2), lambda layer, x, e: layer(x, e, torch.zeros(30, dtype=torch.long))),
                edges,
                none,
            ),
            "GPS": (_called(of(conv.format("GPSConv"), 42, None, heads=3), lambda layer, x, e: layer(x, e)), edges, {**_TRUE, "batch": None}),
            "set": (
                of("torch_geometric.nn.aggr.SetTransformerAggregation", 42, heads=3),
                lambda: (torch.randn(9, 42), torch.tensor([0] * 4 + [1] * 5)),
                {**_SOME, "batch": None, "parts": ()},
            ),
            "pool": (of("torch_geometric.nn.aggr.SoftmaxAggregation"), lambda: (torch.randn(9, 42), torch.tensor([0] * 4 + [1] * 5)), none),
            "DMoN": (of("torch_geometric.nn.DMoNPooling", 42, 5), lambda: (torch.randn(2, 9, 42), torch.ones(2, 9, 9)), {**_NONE}),
        },
    )


def _matching() -> list[Any]:
    return table(
        "kornia",
        _RAW,
        {
            "heads": (of("kornia.models.vit.MultiHeadAttention", 42, 3, 0.0, 0.0), _X),
            "linear": (of("kornia.feature.loftr.loftr_module.transformer.LoFTREncoderLayer", 42, 3), f"{_X} {_Y}", {**_NONE, "along": None}),
            "LightGlue, self": (
                _called(of("kornia.feature.lightglue.SelfBlock", 42, 3), lambda layer, x: layer(x, torch.ones(2, 1, 1, 13, 14))),
                _X,
                {"along": None},
            ),
            "LightGlue, cross": (of("kornia.feature.lightglue.CrossBlock", 42, 3), f"{_X} {_Y}", {**_CROSS, "count": 2, "along": None}),
        },
    )


def _own() -> list[Any]:
    here = {"embed_dim": 42, "num_heads": 3, "batch_first": True}
    layer = {"d_model": 42, "nhead": 3, "dim_feedforward": 50, "batch_first": True}
    return table(
        "torch",
        _RAW,
        {
            "heads": (_called(of("torch.nn.MultiheadAttention", **here), _thrice), _X),
            "heads, averaged": (_called(of("torch.nn.MultiheadAttention", **here), lambda layer, x: layer(x, x, x, average_attn_weights=True)), _X),
            "heads, without weights": (_called(of("torch.nn.MultiheadAttention", **here), lambda layer, x: layer(x, x, x, need_weights=False)), _X),
            "heads, bias": (_called(of("torch.nn.MultiheadAttention", **here, add_bias_kv=True, add_zero_attn=True), _thrice), _X),
            "heads, widths": (
                _called(of("torch.nn.MultiheadAttention", **here, kdim=31, vdim=29), lambda layer, *given: layer(*given)),
                "2x13x42 2x11x31 2x11x29",
                {**_CROSS},
            ),
            "encoder layer": (of("torch.nn.TransformerEncoderLayer", **layer), _X),
            "encoder layer, norm first": (of("torch.nn.TransformerEncoderLayer", **layer, norm_first=True), _X),
            "decoder layer": (of("torch.nn.TransformerDecoderLayer", **layer), f"{_X} {_Y}", {"count": 2, "kind": None, "along": None}),
            "transformer": (of("torch.nn.Transformer", 42, 3, 1, 1, 50, batch_first=True), f"{_Y} {_X}", {"count": 3, "kind": None, "along": None}),
            "GLU": (of("torch.nn.GLU"), _X, {**_NONE, "along": None}),
            "adaptive softmax": (
                _called(of("torch.nn.AdaptiveLogSoftmaxWithLoss", 42, 20, [5, 10]), lambda layer, x: layer.log_prob(x.flatten(0, 1))),
                _X,
                {**_NONE, "along": None},
            ),
            "bilinear": (of("torch.nn.Bilinear", 42, 42, 7), f"{_X} {_X}", {**_NONE, "along": None}),
            "cosine": (of("torch.nn.CosineSimilarity"), f"{_X} {_X}", {**_NONE, "along": None}),
            "LSTM": (of("torch.nn.LSTM", 42, 7, batch_first=True), _X, {**_NONE, "along": None}),
            "softmax": (of("torch.nn.Softmax", dim=-1), _X, {**_NONE, "along": None}),
        },
    )


CONFIGURATIONS = [*_own(), *_diffusers(), *_monai(), *_vision(), *_sound(), *_clip(), *_speech(), *_litgpt(), *_graphs(), *_matching()]
