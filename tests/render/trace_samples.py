"""Traces made by hand: what `trace` answers for a layer of 512 features, 2 heads, batch 1 and 12 positions."""

from __future__ import annotations

import math
from dataclasses import replace

from mha_inspect.reports.common import Environment, LayerInfo, Stats, Values
from mha_inspect.reports.trace import AttentionReport, OpLine, OpRef, OpTensor, Path, Proof, Returned, Stage, Trace

ENVIRONMENT = Environment(torch="2.13.0", device="cpu", dtype="float32", seed=0)


def layer(num_heads: int = 2, **settings: object) -> LayerInfo:
    spec = {
        "embed_dim": 512,
        "num_heads": num_heads,
        "kdim": None,
        "vdim": None,
        "bias": True,
        "add_bias_kv": False,
        "dropout": 0.0,
        "batch_first": True,
        "training": False,
        "dtype": "float32",
        "seed": 0,
        "head_dim": 512 // num_heads,
    }
    return LayerInfo("torch", {**spec, **settings})


def _stage(name, shape, axes, formula, memory, op=None, flops=0, opened=True):
    ref = None if op is None else OpRef(op[0], op[1], f"torch/nn/functional.py:{op[2]}")
    return Stage(
        name=name,
        shape=shape,
        axes=axes,
        formula=formula,
        dtype="float32",
        nbytes=4 * math.prod(shape),
        flops=flops,
        memory=memory,
        opened=opened and op is not None,
        op=ref,
    )


_PROJECTED = "query batch (heads head_dim)"
_KEYS_PROJECTED = "key batch (heads head_dim)"
_SPLIT = "(batch heads) query head_dim"
_KEYS_SPLIT = "(batch heads) key head_dim"
_BIG = 2 * 12 * 512 * 512
_SMALL = 2 * 2 * 12 * 12 * 256

STAGES = (
    _stage("query", (1, 12, 512), "batch query embed", "input", "input"),
    _stage("key", (1, 12, 512), "batch key embed", "input, the same as query", "input"),
    _stage("value", (1, 12, 512), "batch key embed", "input, the same as query", "input"),
    _stage("q_proj", (12, 1, 512), _PROJECTED, "query · W_qᵀ + b_q", "view", (10, "aten.select.int", 6401), _BIG),
    _stage("k_proj", (12, 1, 512), _KEYS_PROJECTED, "key · W_kᵀ + b_k", "view", (11, "aten.select.int", 6401), _BIG),
    _stage("v_proj", (12, 1, 512), _KEYS_PROJECTED, "value · W_vᵀ + b_v", "view", (12, "aten.select.int", 6401), _BIG),
    _stage(
        "q_heads", (2, 12, 256), _SPLIT, "q_proj split into 2 heads of 256", "view", (14, "aten.transpose.int", 6470)
    ),
    _stage(
        "k_heads",
        (2, 12, 256),
        _KEYS_SPLIT,
        "k_proj split into 2 heads of 256",
        "view",
        (16, "aten.transpose.int", 6472),
    ),
    _stage(
        "v_heads",
        (2, 12, 256),
        _KEYS_SPLIT,
        "v_proj split into 2 heads of 256",
        "view",
        (18, "aten.transpose.int", 6476),
    ),
    _stage(
        "scores",
        (2, 12, 12),
        "(batch heads) query key",
        "q_heads · k_headsᵀ / √256",
        "new",
        (21, "aten.bmm.default", 6531),
        _SMALL,
    ),
    _stage(
        "weights", (2, 12, 12), "(batch heads) query key", "softmax(scores)", "new", (22, "aten._softmax.default", 6532)
    ),
    _stage("context", (2, 12, 256), _SPLIT, "weights · v_heads", "new", (23, "aten.bmm.default", 6536), _SMALL),
    _stage(
        "concat",
        (12, 512),
        "(query batch) (heads head_dim)",
        "context, heads side by side",
        "copy",
        (26, "aten._unsafe_view.default", 6539),
    ),
    _stage(
        "output",
        (1, 12, 512),
        "batch query embed",
        "concat · W_oᵀ + b_o",
        "view",
        (32, "aten.transpose.int", 6541),
        _BIG,
    ),
)

ATTENTION = AttentionReport(module="", num_heads=2, num_kv_heads=2, head_dim=256, scale=0.0625, stages=STAGES)

RETURNS = (
    Returned("output", (1, 12, 512), "batch query embed", "float32"),
    Returned("weights", (1, 12, 12), "batch query key", "float32"),
)

TRACE = Trace(
    environment=ENVIRONMENT,
    layer=layer(),
    path=Path(
        "one fused kernel for the whole layer: aten._native_multi_head_attention",
        None,
        ("aten._native_multi_head_attention.default",),
    ),
    attentions=(ATTENTION,),
    returns=RETURNS,
    proof=Proof(max_abs_difference=1.19e-07, noise_floor=2.43e-07, agrees=True),
)

STATS = Stats(mean=0.083333, std=0.00412, min=0.0, max=0.25, nan=0, inf=0, masked=0)
MASKED_STATS = Stats(mean=-0.01234, std=0.98765, min=-3.2109, max=2.7182e-05, nan=12, inf=0, masked=132)
VALUES = Values(
    "tensor([[[ 0.1023, -0.2210,  0.0513,  ..., -0.1102,  0.3310,     nan],\n"
    "         [-0.0417,  0.1913,    -inf,  ...,  0.2711, -0.0190,  0.1127]],\n"
    "\n"
    "        [[ 0.0071,  0.0933, -0.4402,  ...,  0.1007,  0.0019, -0.2308],\n"
    "         [ 0.1190, -0.0031,  0.2107,  ..., -0.3113,  0.0701,  0.1009]]])",
    [[[0.1023, float("nan")], [float("-inf"), float("inf")]]],
)


def _with_more(stage: Stage) -> Stage:
    stats = {"scores": MASKED_STATS, "weights": STATS}.get(stage.name)
    return replace(stage, stats=stats, values=VALUES if stage.name == "scores" else None)


def _operand(number: int, *shape: int, axes: str = "") -> OpTensor:
    return OpTensor(number, shape, "float32", axes)


_OPS = (
    OpLine(
        0,
        "aten.transpose.int",
        "",
        "torch/nn/modules/activation.py:1464",
        (_operand(0, 1, 12, 512, axes="batch query embed"),),
        (_operand(1, 12, 1, 512, axes="query batch embed"),),
        "1, 0",
        "view",
        "",
    ),
    OpLine(
        3,
        "aten.addmm.default",
        "",
        "torch/nn/functional.py:5904",
        (_operand(4, 1536), _operand(2, 12, 512), _operand(6, 512, 1536)),
        (_operand(7, 12, 1536),),
        "",
        "new",
        "",
    ),
    OpLine(
        14,
        "aten.transpose.int",
        "",
        "torch/nn/functional.py:6470",
        (_operand(18, 12, 2, 256, axes="query (batch heads) head_dim"),),
        (_operand(19, 2, 12, 256, axes="(batch heads) query head_dim"),),
        "0, 1",
        "view",
        "q_heads",
    ),
    OpLine(
        21,
        "aten.bmm.default",
        "",
        "torch/nn/functional.py:6531",
        (_operand(24, 2, 12, 256), _operand(25, 2, 256, 12)),
        (_operand(26, 2, 12, 12, axes="(batch heads) query key"),),
        "",
        "new",
        "scores",
    ),
    OpLine(
        25,
        "aten.clone.default",
        "",
        "torch/nn/functional.py:6539",
        (_operand(29, 12, 2, 256),),
        (_operand(30, 12, 2, 256),),
        "memory_format=contiguous",
        "copy",
        "",
    ),
)

FULL_TRACE = replace(
    TRACE,
    path=Path(
        "the slow path of nn.MultiheadAttention with a fused kernel: aten._scaled_dot_product_flash_attention_for_cpu",
        "self.training is True, so the inference fast path is not taken",
        ("aten._scaled_dot_product_flash_attention_for_cpu.default",),
    ),
    layer=layer(dropout=0.1, training=True, batch_first=False),
    attentions=(
        replace(
            ATTENTION,
            stages=tuple(
                map(
                    _with_more,
                    (
                        *STAGES[:10],
                        replace(STAGES[9], name="masked_scores", formula="scores + mask", dtype="bfloat16", flops=0),
                        *STAGES[10:],
                    ),
                )
            ),
            notes=("The scale is applied to q_heads before the product: scores are not scaled again.",),
        ),
    ),
    returns=tuple(replace(r, stats=STATS, values=VALUES) for r in RETURNS),
    notes=("The mask of 12 rows was given as booleans: True is not allowed to be looked at.",),
    ops=_OPS,
    proof=Proof(0.0312, 2.43e-07, False, "fully masked rows are left out"),
)

META_TRACE = replace(
    TRACE,
    environment=replace(ENVIRONMENT, device="meta", seed=None),
    attentions=(
        replace(
            ATTENTION,
            num_heads=128,
            num_kv_heads=8,
            head_dim=128,
            scale=128**-0.5,
            stages=(
                replace(STAGES[6], shape=(512, 131072, 128), nbytes=34359738368),
                replace(STAGES[9], shape=(512, 131072, 131072), nbytes=35184372088832, flops=2251799813685248),
            ),
        ),
    ),
    returns=(),
    proof=Proof(None, None, None, "there are no numbers on device meta"),
)

MODEL_TRACE = replace(
    TRACE,
    layer=LayerInfo("BertModel", {}),
    attentions=tuple(
        replace(
            ATTENTION,
            module=f"encoder.layer.{number}.attention.self",
            num_heads=11,
            num_kv_heads=11,
            head_dim=29,
            scale=29**-0.5,
            stages=(
                replace(STAGES[6], shape=(3, 11, 7, 29), axes="batch heads query head_dim"),
                replace(
                    STAGES[9], shape=(3, 11, 7, 7), axes="batch heads query key", formula="q_heads · k_headsᵀ / √29"
                ),
                replace(STAGES[10], shape=(3, 11, 7, 7), axes="batch heads query key"),
            ),
            notes=() if number else ("Relative positions are added to the scores.",),
        )
        for number in range(3)
    ),
)

EMPTY_TRACE = replace(TRACE, attentions=(), layer=LayerInfo("Linear", {}))
