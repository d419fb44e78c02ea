"""What cannot be recorded is said, with what to do; what can be, is not refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from mha_inspect.errors import RecordingError
from mha_inspect.record.recorder import Recorder, record

from .built import trace_module


@pytest.fixture
def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU())


X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))


def test_a_compiled_module(layer):
    with pytest.raises(RecordingError, match=r"the module is compiled .* Record its \._orig_mod"):
        record(torch.compile(layer, backend="eager"), X)
    assert len(record(torch.compile(layer, backend="eager")._orig_mod, X)[0].ops) > 0


def test_a_compiled_part(layer):
    layer[0].compile(backend="eager")
    with pytest.raises(RecordingError, match=r"module 0 is compiled .* before \.compile\(\)"):
        record(layer, X)


def test_a_scripted_module(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(layer)
    with pytest.raises(RecordingError, match="is scripted"):
        record(scripted, X)


def test_flex_attention_is_opened_where_it_runs():
    class Flex(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.nn.attention.flex_attention import flex_attention

            heads = x.unflatten(-1, (2, 16)).transpose(1, 2)
            return flex_attention(heads, heads, heads)

    x = torch.randn(2, 128, 32, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = Flex()(x)
        recording, returned = record(Flex(), x)
        trace = trace_module(Flex(), x)
    assert torch.equal(returned, expected)
    assert [op.base_name for op in recording.ops].count("flex_attention") == 1
    assert "flex attention: one kernel" in trace.path.plain
    (attention,) = trace.attentions
    weights = next(stage for stage in attention.stages if stage.name == "weights")
    assert weights.opened
    assert weights.shape == (2, 2, 128, 128)


def test_a_lazy_module_can_be_built_and_run_inside_of_a_recording():
    with Recorder() as recorder:
        module = torch.nn.LazyLinear(5)
        output = module(torch.ones(2, 3))
    assert output.shape == (2, 5)
    assert module.weight.shape == (5, 3)
    (product,) = [op for op in recorder.finish(output).ops if op.base_name == "addmm"]
    assert product.output.shape == (2, 5)


@pytest.mark.parametrize("keep", [False, True])
def test_a_module_that_is_lazy_is_built_while_it_is_recorded(keep):
    module = torch.nn.Sequential(torch.nn.LazyLinear(5), torch.nn.LazyBatchNorm1d())
    recording, output = record(module, torch.ones(2, 3), keep=keep)
    assert output.shape == (2, 5)
    assert "addmm" in [op.base_name for op in recording.ops]
