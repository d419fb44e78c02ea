"""Reports made by hand, one of each kind, and the same with everything that can be asked for."""

from __future__ import annotations

import math
from dataclasses import replace

from mha_inspect.reports.check import CheckReport, Fact, Finding, PassedCheck, SkippedCheck
from mha_inspect.reports.compare_heads import (
    CompareHeadsReport,
    Focus,
    HeadCount,
    HeadFocus,
    HeadsFocus,
    HeadTime,
    HeadTraining,
    PartTraining,
    StageFlops,
    StageShapes,
    Timing,
    Training,
)
from mha_inspect.reports.params import HeadCountColumn, HeadSlice, Parameter, ParametersTotal, ParamsReport

from .checkpoint_samples import CHECKPOINT, CHECKPOINT_DIFF
from .diff_samples import DIFF, LAYERS, MASKED_DIFF, SAME_DIFF
from .trace_samples import EMPTY_TRACE, ENVIRONMENT, FULL_TRACE, META_TRACE, MODEL_TRACE, STATS, TRACE, VALUES, layer


def _slices(num_heads: int) -> dict[str, tuple[HeadSlice, ...]]:
    size = 512 // num_heads
    parts = [(f"{kind}_{p}", 512 * i) for kind in "Wb" for i, p in enumerate("qkv")]
    owned = {"in_proj_weight": [], "in_proj_bias": [], "out_proj.weight": []}
    for part, start in parts:
        for head in range(num_heads):
            rows = (start + head * size, start + (head + 1) * size)
            name = "in_proj_weight" if part[0] == "W" else "in_proj_bias"
            owned[name].append(HeadSlice(head, part, rows, (0, 512) if part[0] == "W" else None))
    owned["out_proj.weight"] = [HeadSlice(h, "W_o", (0, 512), (h * size, (h + 1) * size)) for h in range(num_heads)]
    return {name: tuple(slices) for name, slices in owned.items()}


def _parameter(name: str, shape: tuple[int, ...], axes: str, role: str) -> Parameter:
    numel = math.prod(shape)
    return Parameter(name, shape, axes, "float32", numel, 4 * numel, numel / 1050624, role)


PARAMS = ParamsReport(
    environment=ENVIRONMENT,
    layer=layer(),
    parameters=(
        _parameter(
            "in_proj_weight",
            (1536, 512),
            "(3 heads head_dim) embed",
            "W_q, W_k, W_v stacked: rows 0–511, 512–1023, 1024–1535",
        ),
        _parameter(
            "in_proj_bias",
            (1536,),
            "(3 heads head_dim)",
            "b_q, b_k, b_v one behind the other: 0–511, 512–1023, 1024–1535",
        ),
        _parameter("out_proj.weight", (512, 512), "embed (heads head_dim)", "W_o: mixes the heads"),
        _parameter("out_proj.bias", (512,), "embed", "b_o"),
    ),
    total=ParametersTotal(1050624, 4202496, "4E² + 4E", 1050624),
)

FULL_PARAMS = replace(
    PARAMS,
    parameters=tuple(
        replace(
            p,
            heads=_slices(2).get(p.name),
            stats=STATS,
            values=VALUES if p.name == "in_proj_weight" else None,
        )
        for p in PARAMS.parameters
    ),
    total=replace(PARAMS.total, formula_numel=1050625),
    side_by_side=tuple(
        HeadCountColumn(
            n,
            512 // n,
            1050624,
            {p.name: p.shape for p in PARAMS.parameters},
            {k: (v[0], *v[n::n]) for k, v in _slices(n).items()},
        )
        for n in (1, 2, 4, 8)
    ),
    changes="Nothing but the slices: every parameter keeps its shape, and each head owns 512 / num_heads of its rows.",
    notes=(
        "What they are for is read off a run, and there is none: forward needs mask. Give it: --input-shape mask=2x10.",
    ),
)


def _count(n: int, difference: float, relative: float, noise: float, verdict, stage, reason: str) -> HeadCount:
    times = difference / noise if noise else (math.nan if not difference else math.inf)
    return HeadCount(
        num_heads=n,
        head_dim=512 // n,
        numel=1050624,
        same_parameters=True,
        output_shape=(1, 12, 512),
        max_abs_difference=difference,
        relative_difference=relative,
        noise_floor=noise,
        times_noise=times,
        verdict=verdict,
        first_differing_stage=stage,
        reason=reason,
    )


_REASON = "Softmax is taken over {n} score tables of 12 × 12, each from {d} features, and not over 1 from 512."

COMPARE = CompareHeadsReport(
    environment=ENVIRONMENT,
    layer=layer(1),
    baseline=1,
    counts=(
        _count(1, 0.0, 0.0, 2.41e-07, "same", None, "The baseline."),
        *(
            _count(n, d, r, 2.41e-07, "differs", "scores", _REASON.format(n=n, d=512 // n))
            for n, d, r in ((2, 0.0731, 0.168), (4, 0.1093, 0.2417), (8, 0.1409, 0.3011), (16, 0.1621, 0.3408))
        ),
    ),
    stages=(
        StageShapes("query", "batch query embed", ((1, 12, 512),) * 5),
        StageShapes("weights", "batch heads query key", tuple((1, n, 12, 12) for n in (1, 2, 4, 8, 16))),
    ),
    outcome="differs",
    answer=(
        "Yes: with the same weights and the same input the output differs for 2, 4, 8 and 16 heads, "
        "by up to 672,614 times the noise floor.",
        "No: the parameters are the same 1,050,624 numbers for every head count; only which of them belong to which "
        "head changes.",
    ),
)

ONE_KEY_COMPARE = replace(
    COMPARE,
    counts=(
        _count(1, 0.0, 0.0, 0.0, "same", None, ""),
        replace(_count(2, 1.2e-07, 3.1e-07, 2.4e-07, "inconclusive", None, "One key."), same_parameters=False),
        _count(4, 0.5, 0.25, 0.0, "differs", "scores", "One key."),
    ),
    stages=(StageShapes("scores", "batch heads query key", ((1, 1, 12, 1), None, (1, 4, 12, 1))),),
    outcome="inconclusive",
)

_PARTS = ("W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o")
_ROUNDED = PartTraining(1e-9, 1.66, 7e-10, 1.4, "same", part="b_k", moved=7e-11)


def _parts(relative: float) -> tuple[PartTraining, ...]:
    difference = 1e-3 * relative, relative, 1e-9, 1e6 * relative, "differs" if relative else "same"
    return tuple(PartTraining(*difference, part=part, moved=0.0749) for part in _PARTS)


_NOT_COMPARED = tuple(PartTraining(None, None, None, None, None, part=part, moved=0.05) for part in _PARTS)


LEARNING_COMPARE = replace(
    COMPARE,
    training=Training(
        5,
        "SGD, learning rate 0.1",
        "from the input to a target",
        (
            HeadTraining(1, 0.9544, 0.9349, 0.0993, 0.0, 0.0, 2.9e-8, 0.0, "same", _parts(0.0)),
            HeadTraining(
                *(2, 0.9531, 0.9354, 0.0943, 0.0022, 0.474, 1.8e-10, 5786315.2, "differs"),
                (*_parts(0.701)[:5], _ROUNDED, *_parts(0.1)[6:]),
            ),
            HeadTraining(4, 0.9531, 0.9354, 0.0943, None, None, None, None, None, _NOT_COMPARED),
        ),
        "After the same steps from the same start the weights have moved apart.",
    ),
    focus=Focus(
        (
            HeadsFocus(1, (HeadFocus(0, 2, 0.36, 10.758, 3.8814),)),
            HeadsFocus(2, (HeadFocus(0, 11, 0.0912, 11.053, 4.0934), HeadFocus(1, 1, 1.0, 1.0, 0.0))),
        ),
        "Of 2 heads each looks at 1 to 11.1 keys in effect.",
    ),
    timing=Timing(
        (
            HeadTime(1, 1.25, 1.2, 1.5, 11, (StageFlops("q_proj", 2880), StageFlops("scores", 1200))),
            HeadTime(2, 12.5, 11.75, 13.0, 11, (StageFlops("q_proj", 2880), StageFlops("scores", 1200))),
        ),
        2,
        "The products are as many operations for every head count; 2 heads took 1000.0 % of the time of 1 head.",
    ),
)

CHECK = CheckReport(
    environment=ENVIRONMENT,
    layer=layer(2),
    intent={"causal": True, "window": 4},
    findings=(
        Finding(
            "heads",
            "The heads are merged without transposing: the context of one query is spread over 2 tokens of concat.",
            "The context of the query at [0, 0] was changed in all heads, and concat moved at [0, 0], [0, 6].",
            source="model.py:24",
            module="blocks.0.attn",
            fix="transpose(1, 2) before the heads are put side by side.",
        ),
        Finding(
            "parameters", "blocks.0.attn.k.weight is read by nothing.", "No operation of the run reads it.", sure=False
        ),
    ),
    facts=(
        Fact("scale", "0.0625 = 1/√head_dim (head_dim 256)"),
        Fact("who sees whom", "causal", ("■··", "■■·", "■■■")),
        Fact("mask", "attention_mask: 1 keeps a key, 0 ignores it"),
    ),
    passed=(PassedCheck("batch", "a row of the batch moves no other row"),),
    left_out=(SkippedCheck("cache", "not declared: cache"),),
    runs=9,
    notes=("x was drawn from the seed.",),
)

RIGHT_CHECK = replace(CHECK, intent={}, findings=(), facts=(), left_out=(), notes=())

REPORTS = {
    "check": CHECK,
    "check-right": RIGHT_CHECK,
    "trace": TRACE,
    "trace-full": FULL_TRACE,
    "trace-meta": META_TRACE,
    "trace-model": MODEL_TRACE,
    "trace-empty": EMPTY_TRACE,
    "params": PARAMS,
    "params-full": FULL_PARAMS,
    "compare-heads": COMPARE,
    "compare-heads-one-key": ONE_KEY_COMPARE,
    "compare-heads-learning": LEARNING_COMPARE,
    "diff": DIFF,
    "diff-masked": MASKED_DIFF,
    "diff-same": SAME_DIFF,
    "layers": LAYERS,
    "params-checkpoint": CHECKPOINT,
    "diff-checkpoints": CHECKPOINT_DIFF,
}
