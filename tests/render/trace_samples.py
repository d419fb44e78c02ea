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


_BIG = 2 * 12 * 512 * 512
_SMALL = 2 * 2 * 12 * 12 * 256
_STAGES = """
query   | 1 12 512 | batch query embed | input | input
key     | 1 12 512 | batch key embed | input, the same as query | input
value   | 1 12 512 | batch key embed | input, the same as query | input
q_proj  | 12 1 512 | query batch (heads head_dim) | query · W_qᵀ + b_q | view | 10 aten.select.int 6401
k_proj  | 12 1 512 | key batch (heads head_dim) | key · W_kᵀ + b_k | view | 11 aten.select.int 6401
v_proj  | 12 1 512 | key batch (heads head_dim) | value · W_vᵀ + b_v | view | 12 aten.select.int 6401
q_heads | 2 12 256 | (batch heads) query head_dim | q_proj split into 2 heads of 256 | view | 14 aten.transpose.int 6470
k_heads | 2 12 256 | (batch heads) key head_dim | k_proj split into 2 heads of 256 | view | 16 aten.transpose.int 6472
v_heads | 2 12 256 | (batch heads) key head_dim | v_proj split into 2 heads of 256 | view | 18 aten.transpose.int 6476
scores  | 2 12 12  | (batch heads) query key | q_heads · k_headsᵀ / √256 | new | 21 aten.bmm.default 6531
weights | 2 12 12  | (batch heads) query key | softmax(scores) | new | 22 aten._softmax.default 6532
context | 2 12 256 | (batch heads) query head_dim | weights · v_heads | new | 23 aten.bmm.default 6536
concat  | 12 512   | (query batch) (heads head_dim) | context, heads side by side | copy | 26 aten.clone.default 6539
output  | 1 12 512 | batch query embed | concat · W_oᵀ + b_o | view | 32 aten.transpose.int 6541
"""
_FLOPS = dict.fromkeys(("q_proj", "k_proj", "v_proj", "output"), _BIG) | dict.fromkeys(("scores", "context"), _SMALL)


def _stage(line: str) -> Stage:
    name, sizes, axes, formula, memory, *op = (part.strip() for part in line.split("|"))
    shape = tuple(map(int, sizes.split()))
    ref = None
    if op:
        index, operation, source = op[0].split()
        ref = OpRef(int(index), operation, f"torch/nn/functional.py:{source}")
    sized = (shape, axes, formula, "float32", 4 * math.prod(shape), _FLOPS.get(name, 0))
    return Stage(name, *sized, memory, ref is not None, ref)  # type: ignore[arg-type]


STAGES = tuple(map(_stage, _STAGES.strip().splitlines()))
ATTENTION = AttentionReport(
    module="",
    num_heads=2,
    num_kv_heads=2,
    head_dim=256,
    scale=0.0625,
    stages=STAGES,
    position=None,
    qk_norm=None,
    cache=None,
    window=None,
)

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


def _op(index: int, name: str, line: int, *tensors: tuple[OpTensor, ...], **more: str) -> OpLine:
    source = f"torch/nn/functional.py:{line}"
    settings, memory, stage = more.get("settings", ""), more.get("memory", "new"), more.get("stage", "")
    return OpLine(index, f"aten.{name}", "", source, *tensors, settings, memory, stage)  # type: ignore[arg-type]


def _tensor(number: int, *shape: int, axes: str = "") -> OpTensor:
    return OpTensor(number, shape, "float32", axes)


_QUERY = (_tensor(0, 1, 12, 512, axes="batch query embed"),), (_tensor(1, 12, 1, 512, axes="query batch embed"),)
_PACKED = (_tensor(4, 1536), _tensor(2, 12, 512), _tensor(6, 512, 1536)), (_tensor(7, 12, 1536),)
_BY_HEAD = (
    (_tensor(18, 12, 2, 256, axes="query (batch heads) head_dim"),),
    (_tensor(19, 2, 12, 256, axes="(batch heads) query head_dim"),),
)
_PRODUCT = (_tensor(24, 2, 12, 256), _tensor(25, 2, 256, 12)), (_tensor(26, 2, 12, 12, axes="(batch heads) query key"),)
_CLONED = (_tensor(29, 12, 2, 256),), (_tensor(30, 12, 2, 256),)
_OPS = (
    _op(0, "transpose.int", 6464, *_QUERY, settings="1, 0", memory="view"),
    _op(3, "addmm.default", 5904, *_PACKED),
    _op(14, "transpose.int", 6470, *_BY_HEAD, settings="0, 1", memory="view", stage="q_heads"),
    _op(21, "bmm.default", 6531, *_PRODUCT, stage="scores"),
    _op(25, "clone.default", 6539, *_CLONED, settings="memory_format=contiguous", memory="copy"),
)

_MASKED = replace(STAGES[9], name="masked_scores", formula="scores + mask", dtype="bfloat16", flops=0)
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
            stages=tuple(map(_with_more, (*STAGES[:10], _MASKED, *STAGES[10:]))),
            notes=("The scale is applied to q_heads before the product: scores are not scaled again.",),
        ),
    ),
    returns=tuple(replace(r, stats=STATS, values=VALUES) for r in RETURNS),
    notes=("The mask of 12 rows was given as booleans: True is not allowed to be looked at.",),
    ops=_OPS,
    proof=Proof(0.0312, 2.43e-07, False, "fully masked rows are left out"),
)

_LONG = (
    replace(STAGES[6], shape=(512, 131072, 128), nbytes=34359738368),
    replace(STAGES[9], shape=(512, 131072, 131072), nbytes=35184372088832, flops=2251799813685248),
)
META_TRACE = replace(
    TRACE,
    environment=replace(ENVIRONMENT, device="meta", seed=None),
    attentions=(replace(ATTENTION, num_heads=128, num_kv_heads=8, head_dim=128, scale=128**-0.5, stages=_LONG),),
    returns=(),
    proof=Proof(None, None, None, "there are no numbers on device meta"),
)

_SMALL_STAGES = (
    replace(STAGES[6], shape=(3, 11, 7, 29), axes="batch heads query head_dim"),
    replace(STAGES[9], shape=(3, 11, 7, 7), axes="batch heads query key", formula="q_heads · k_headsᵀ / √29"),
    replace(STAGES[10], shape=(3, 11, 7, 7), axes="batch heads query key"),
)
_IN_MODEL = replace(ATTENTION, num_heads=11, num_kv_heads=11, head_dim=29, scale=29**-0.5, stages=_SMALL_STAGES)
MODEL_TRACE = replace(
    TRACE,
    layer=LayerInfo("BertModel", {}),
    attentions=tuple(
        replace(
            _IN_MODEL,
            module=f"encoder.layer.{number}.attention.self",
            notes=() if number else ("Relative positions are added to the scores.",),
        )
        for number in range(3)
    ),
)

EMPTY_TRACE = replace(TRACE, attentions=(), layer=LayerInfo("Linear", {}))
