"""Reports of checkpoints, made by hand."""

from __future__ import annotations

from mha_inspect.reports.common import Environment, LayerInfo
from mha_inspect.reports.diff import CheckpointDiffReport, CheckpointSide, PartPair, TensorPair
from mha_inspect.reports.params import LikeModule, Parameter, ParametersTotal, ParamsReport, StoredAttention, StoredName

_ROLE = "W_q: rows are the heads stacked, 8 each"
CHECKPOINT = ParamsReport(
    environment=Environment("", "", "bfloat16", None),
    layer=LayerInfo("model.safetensors", {"model_type": "llama", "num_attention_heads": 6}),
    parameters=tuple(
        Parameter(
            f"layers.{layer}.self_attn.q_proj.weight",
            (48, 48),
            "(heads head_dim) embed",
            "bfloat16",
            2304,
            4608,
            0.5,
            _ROLE,
        )
        for layer in range(2)
    ),
    total=ParametersTotal(4608, 9216, "", None),
    notes=("What the tensors are for is read off a run of Llama.",),
    stored_attentions=tuple(
        StoredAttention(f"layers.{layer}.self_attn", (f"layers.{layer}.self_attn.q_proj.weight",), 6, 2, 8, (2, 6))
        for layer in range(2)
    ),
    like=LikeModule(
        "Llama",
        "model.",
        2,
        (StoredName("norm.weight", (48,)),),
        (StoredName("model.layers.0.extra", (3,)), StoredName("model.layers.1.extra", (3,))),
        (StoredName("model.embed.weight", (50, 48), (60, 48)),),
    ),
)


def _pair(name: str, verdict: str, largest: float | None, note: str = "") -> TensorPair:
    relative = None if largest is None else largest / 10
    sizes = ((48, 48), (48, 48), "float32", "bfloat16")
    return TensorPair(name, name, *sizes, verdict, largest, relative, note)  # type: ignore[arg-type]


CHECKPOINT_DIFF = CheckpointDiffReport(
    CheckpointSide("before", 5, 11520, 46080, ("float32",)),
    CheckpointSide("after", 5, 11520, 23040, ("bfloat16", "float32")),
    (
        _pair("layers.0.self_attn.k_proj.weight", "same within rounding", 1.5e-4),
        _pair("layers.0.self_attn.q_proj.weight", "differs", 0.25),
        _pair("layers.1.self_attn.k_proj.weight", "same within rounding", 2.5e-4),
        _pair("layers.1.self_attn.q_proj.weight", "same, permuted", None),
    ),
    (StoredName("norm.weight", (48,)),),
    (StoredName("layers.0.norm.weight", (48,)), StoredName("layers.1.norm.weight", (48,))),
    (
        PartPair("layers.0.self_attn", "layers.0.attention", "W_q", "differs", (0.0, 0.25, 0.5)),
        PartPair("layers.1.self_attn", "layers.1.attention", "W_q", "same within rounding", ()),
        PartPair("layers.1.self_attn", "layers.1.attention", "W_k", "other shape", ()),
    ),
    "differs",
    ("The left: The tensors lie in 2 files.",),
    ("No: 4 tensors on both sides.", "Heads that changed most: head 2 of W_q in layers.0.self_attn (50.0 %)."),
)
