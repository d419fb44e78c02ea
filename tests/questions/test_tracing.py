"""Every stage of every layer under any setting holds what the textbook's formulas give, in the axes that it says."""

from __future__ import annotations

import math
from math import prod

import pytest
import torch
from hypothesis import given, settings

from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec, Show
from mha_inspect.naming.canonical import canonical
from mha_inspect.naming.pattern import STAGES
from mha_inspect.reports.trace import OpLine, Trace

from ..built import trace_layer
from ..drawn import Case, Setting, dims_of, settings_of, sizes_of


@settings(max_examples=12, deadline=None, derandomize=True)
@given(settings_of())
def test_stages_hold_what_the_formulas_give_in_the_axes_that_they_say(setting: Setting) -> None:
    case = Case(setting)
    assert len(case.seen.attentions) == 1
    recorded, names = case.seen.attentions[0]
    spec = case.forward.spec
    assert (names.num_heads, names.num_kv_heads, names.head_dim) == (spec.num_heads, spec.kv_heads, spec.head_dim)
    patterns = case.axes.stages[0]
    assert list(patterns) == list(recorded.stages) == [stage for stage in STAGES if stage in recorded.stages]
    for stage, pattern in patterns.items():
        value, sizes = case.value(stage), case.sizes_in(stage)
        assert value.shape == recorded.stages[stage].shape
        assert [prod(sizes[name] for name in dim) for dim in dims_of(pattern)] == list(value.shape), (stage, pattern)
        content = canonical(value, stage, pattern, sizes_of(case.forward))
        assert content is not None, (stage, pattern)
        expected = case.expected(stage)
        if case.drops and stage in ("context", "concat", "output"):
            assert content.shape == expected.shape
            continue
        if stage == "masked_scores":  # what is barred is -inf, or a large negative number: the weights tell
            barred = case.barred[:, : content.shape[1]].expand(content.shape)
            assert bool((content[barred] < -1e8).all())
            content, expected = content.masked_fill(barred, 0), expected.masked_fill(barred, 0)
        torch.testing.assert_close(content, expected, rtol=1e-9, atol=1e-9, msg=lambda text, at=stage: f"{at}: {text}")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(settings_of(("float32", "bfloat16", "float64")))
def test_the_report_of_any_setting_is_proved(setting: Setting) -> None:
    forward = setting.build()
    trace = trace_layer(forward.spec, InputSpec(**setting.inputs), forward.run, layer=setting.layer)
    assert trace.proof.agrees is True
    (attention,) = trace.attentions
    keys = forward.inputs.key_len or forward.inputs.seq_len
    one_number = forward.inputs.seq_len * (keys + forward.spec.add_bias_kv + forward.spec.add_zero_attn) == 1
    if not one_number:
        rel = 1e-2 if forward.spec.dtype == "bfloat16" else 1e-6
        assert attention.scale == pytest.approx(1 / math.sqrt(forward.spec.head_dim), rel=rel)
    for stage in attention.stages:
        assert stage.nbytes == prod(stage.shape) * torch.finfo(getattr(torch, stage.dtype)).bits // 8
        assert (stage.op is None) == (stage.name in ("query", "key", "value") and stage.memory == "input")
    assert [returned.name for returned in trace.returns] == ["output", "weights"][: len(trace.returns)]


SPEC, INPUTS = AttentionSpec(embed_dim=22, num_heads=2), InputSpec(batch=3, seq_len=5, causal=True)


def test_what_is_not_asked_for_is_not_there() -> None:
    trace = trace_layer(SPEC, INPUTS, RunSpec())
    assert trace.ops is None
    stages = trace.attentions[0].stages
    assert all(thing.stats is None and thing.values is None for thing in (*stages, *trace.returns))


def test_statistics_and_values_are_those_of_the_tensors() -> None:
    trace = trace_layer(SPEC, INPUTS, RunSpec(), Show(stats=True, values=True, full_values=True))
    weights = next(stage for stage in trace.attentions[0].stages if stage.name == "weights")
    assert weights.values is not None
    assert weights.stats is not None
    data = torch.tensor(weights.values.data)
    torch.testing.assert_close(data.sum(-1), torch.ones(3, 2, 5))
    assert bool((data.triu(1) == 0).all())
    assert weights.stats.max == pytest.approx(1)
    masked = next(stage for stage in trace.attentions[0].stages if stage.name == "masked_scores")
    assert masked.stats is not None
    assert (masked.stats.masked, masked.stats.inf, masked.stats.nan) == (6 * 10, 0, 0)
    output = trace.returns[0]
    assert output.stats is not None
    assert output.values is not None
    assert output.stats.mean == pytest.approx(float(torch.tensor(output.values.data).mean()), rel=1e-4)


def completing(trace: Trace) -> dict[str, OpLine]:
    """Return the operation of each stage that an operation completes."""
    made = {}
    for op in trace.ops or ():
        made.update(dict.fromkeys(op.stage.split(", "), op))
    made.pop("", None)
    return made


def test_operations_name_the_stages_that_they_complete() -> None:
    trace = trace_layer(SPEC, INPUTS, RunSpec(), Show(ops=True))
    stages = {stage.name: stage for stage in trace.attentions[0].stages if stage.op is not None}
    completed = completing(trace)
    assert completed.keys() == stages.keys()
    for name, op in completed.items():
        stage = stages[name]
        assert stage.op is not None
        assert (op.index, op.name, op.source) == (stage.op.index, stage.op.name, stage.op.source)
        assert (stage.shape, stage.axes) in [(out.shape, out.axes) for out in op.outputs]


def test_an_operation_has_its_settings_and_the_axes_of_its_operands() -> None:
    trace = trace_layer(SPEC, INPUTS, RunSpec(), Show(ops=True))
    assert trace.ops is not None
    assert [op.index for op in trace.ops] == list(range(len(trace.ops)))
    softmax = completing(trace)["weights"]
    assert (softmax.name, softmax.settings) == ("aten._softmax.default", "3, False")
    assert [operand.axes for operand in softmax.inputs] == ["batch heads query key"]


def test_meta_says_what_the_cpu_says_and_takes_no_memory() -> None:
    for layer, extra in (("torch", {}), ("torch", {"batch_first": False}), ("split-heads", {}), ("grouped-query", {})):
        spec = AttentionSpec(**{"embed_dim": 22, "num_heads": 2, **extra})
        # With gradients: the fast path, which lays stages out otherwise, is not taken on meta.
        cpu = trace_layer(spec, INPUTS, RunSpec(grad=True), layer=layer)
        meta = trace_layer(spec, INPUTS, RunSpec(device="meta", grad=True), layer=layer)

        def table(trace: object) -> list[tuple[object, ...]]:
            return [
                (s.name, s.shape, s.axes, s.formula, s.dtype, s.nbytes, s.flops, s.memory)
                for s in trace.attentions[0].stages  # type: ignore[attr-defined]
            ]

        assert table(cpu) == table(meta)
        assert [(r.name, r.shape, r.axes) for r in cpu.returns] == [(r.name, r.shape, r.axes) for r in meta.returns]
        assert meta.proof.agrees is None
    big = trace_layer(
        AttentionSpec(embed_dim=16384, num_heads=128), InputSpec(batch=4, seq_len=131072), RunSpec(device="meta")
    )
    scores = next(stage for stage in big.attentions[0].stages if stage.name == "scores")
    assert scores.shape == (4 * 128, 131072, 131072)
    assert scores.axes == "(batch heads) query key"
    assert scores.nbytes == 4 * 4 * 128 * 131072**2
    assert scores.flops == 2 * 4 * 128 * 131072**2 * 128
