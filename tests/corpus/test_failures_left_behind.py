"""The trace of a forward that raises: the issue's own example, what is left behind, and the ways it is handed over."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mha_inspect
from mha_inspect.errors import ForwardError, InputError
from mha_inspect.reports.trace import Failure, Trace
from tests.built import trace_module
from tests.schemas import load_schema

from .breaking import Block, Breaks

MODULE = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, embed_dim=512, num_heads=8):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(embed_dim, embed_dim)
        self.W_k = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        batch, length, width = x.shape
        q = self.W_q(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
        k = self.W_k(x).view(batch, length, self.num_heads, -1)
        scores = q @ k.transpose(-2, -1)
        return scores.softmax(-1)
"""
X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))
SPLIT, PRODUCT = (n for n, line in enumerate(MODULE.splitlines(), 1) if " k = " in line or "@" in line)


@pytest.fixture
def attention_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "attention.py"
    path.write_text(MODULE)
    return path


def failed(module: nn.Module, *args: Any, **kwargs: Any) -> Trace:
    with pytest.raises(ForwardError) as caught:
        trace_module(module, *args, **kwargs)
    return caught.value.trace


def failure_of(module: nn.Module, *args: Any, **kwargs: Any) -> Failure:
    failure = failed(module, *args, **kwargs).failure
    assert failure is not None
    return failure


def view_badly(heads: torch.Tensor) -> torch.Tensor:
    return heads.view(2, 5, -1)


def test_the_example_of_the_issue(attention_file: Path, invoke: Callable[..., Any]):
    answer = invoke("trace", "attention.py:Attention", "--input-shape", "x=2x5x512", "--json")
    assert answer.code == 1
    assert answer.err == ""
    data = json.loads(answer.out)
    jsonschema.validate(data, load_schema("trace"))
    failure = data["failure"]
    assert failure["source"] == f"attention.py:{PRODUCT}"
    assert failure["line"] == "scores = q @ k.transpose(-2, -1)"
    assert [(o["name"], o["shape"], o["axes"]) for o in failure["operands"]] == [
        ("q", [2, 8, 5, 64], "batch heads query head_dim"),
        ("k.transpose(-2, -1)", [2, 5, 64, 8], "batch key head_dim heads"),
    ]
    assert failure["cause"]["name"] == "heads_not_transposed"
    assert failure["cause"]["explanation"] == (
        f"k was split but not transposed (attention.py:{SPLIT}). Heads must come before key."
    )
    assert [(s["name"], s["variable"], s["axes"]) for s in failure["completed"]] == [
        ("query", "x", "batch query embed"),
        ("key", "x", "batch key embed"),
        ("q_proj", "W_q", "batch query (heads head_dim)"),
        ("k_proj", "W_k", "batch key (heads head_dim)"),
        ("q_heads", "q", "batch heads query head_dim"),
        ("k_heads", "k", "batch key heads head_dim"),
    ]
    page = invoke("trace", "attention.py:Attention", "--input-shape", "x=2x5x512").out
    words = ["completed before", "q_heads", "failed: RuntimeError", "Dimension 1 clashes", "cause"]
    assert sorted(words, key=page.index) == words
    assert page.count("k was split but not transposed") == 1


def test_a_layer_before_it_is_complete_and_the_one_that_failed_is_not():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.MultiheadAttention(24, 3, batch_first=True)
            self.proj = nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = k = self.proj(self.first(x, x, x)[0] + x).view(2, 7, 3, 8).transpose(1, 2)
            weights = (q @ k.mT).softmax(-1)
            return nn.functional.linear(weights @ k, self.proj.weight)

    trace = failed(Two(), torch.randn(2, 7, 24))
    assert [attention.module for attention in trace.attentions] == ["first"]
    assert [stage.name for stage in trace.attentions[0].stages][-1] == "output"
    assert trace.failure is not None
    assert trace.failure.op == "aten.mm.default"
    (context,) = (stage for stage in trace.failure.completed if stage.name == "context")
    assert (context.shape, context.axes) == ((2, 3, 7, 8), "batch heads query head_dim")
    assert trace.failure.operands[0].axes == "batch heads query head_dim"
    assert "concat" not in [stage.name for stage in trace.failure.completed]  # the failing product's own flattening
    assert trace.returns == ()


def test_a_dispatched_operation_that_raised_is_told_and_so_are_the_last_ones():
    failure = failure_of(nn.Sequential(nn.Linear(24, 13), nn.Linear(11, 5)), torch.randn(2, 7, 24))
    assert failure.op == "aten.addmm.default"
    assert failure.module == "1"
    assert failure.call == "F.linear"
    assert failure.num_ops == len(failure.last_ops) == 6
    assert failure.last_ops[2].outputs == ((14, 13),)
    assert [operand.role for operand in failure.operands] == ["input", "weight", "bias"]


def test_the_error_itself_stands_behind_it():
    x = torch.randn(2, 7, 24)
    with pytest.raises(RuntimeError) as plain:
        Breaks(view_badly)(x)
    with pytest.raises(ForwardError) as caught:
        mha_inspect.trace(Breaks(view_badly), x)
    assert type(caught.value.__cause__) is RuntimeError
    assert str(caught.value.__cause__) == str(plain.value)
    assert str(plain.value) in str(caught.value)


def test_everything_is_left_as_the_forward_left_it():
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    plain = Breaks(view_badly)
    with pytest.raises(RuntimeError):
        plain(x)
    after, mean = torch.get_rng_state(), plain.norm.running_mean.clone()
    torch.manual_seed(5)
    module = Breaks(view_badly)
    fast = torch.backends.mha.get_fastpath_enabled()
    failure_of(module, x)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(module.norm.running_mean, mean)
    assert int(module.norm.num_batches_tracked) == 1
    assert torch.backends.mha.get_fastpath_enabled() is fast
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.overrides._get_current_function_mode_stack() == []


def test_no_tensor_outlives_the_error():
    module = Breaks(view_badly)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ForwardError) as caught:
            trace_module(module, torch.randn(2, 7, 24))
        trace = caught.value.trace
        del caught
        # Without the collector: nothing that holds it is in a cycle.
        assert [made() for made in module.made] == [None]
    finally:
        gc.enable()
    assert trace.failure is not None


def test_a_module_that_counts_its_calls_is_run_again_from_the_state_before():
    def broken(heads: torch.Tensor) -> torch.Tensor:
        assert module.calls == 1, "the cache has moved on"
        return heads.view(2, 5, -1)

    module = Breaks(broken)
    failure = failure_of(module, torch.randn(2, 7, 24))
    assert module.calls == 1
    assert (failure.error, failure.call, failure.note) == ("RuntimeError", "Tensor.view", "")
    assert failure.line == "return heads.view(2, 5, -1)"
    assert (
        failure.clash
        == "heads is [2, 7, 3, 8] batch sequence heads head_dim, 336 elements; [2, 5, -1] needs a multiple of 10."
    )
    assert failure.num_ops > 0


def test_what_is_no_failure_of_the_forward_is_raised_as_it_is():
    def full(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB.")

    def refuses(_: torch.Tensor) -> torch.Tensor:
        raise InputError("asked for on purpose")

    def stopped(_: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    for broken, kind in ((full, torch.OutOfMemoryError), (refuses, InputError), (stopped, KeyboardInterrupt)):
        module = Breaks(broken)
        with pytest.raises(kind):
            trace_module(module, torch.randn(2, 7, 24))
        assert module.calls == 1
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        trace_module(Breaks(view_badly))


class UnreadableError(RuntimeError):
    """Cannot say what it is about."""

    def __str__(self) -> str:
        raise KeyError("no text")


@pytest.mark.parametrize("kind", [UnreadableError, ValueError])
def test_any_message_can_be_told(kind: type[Exception]):
    def broken(_: torch.Tensor) -> torch.Tensor:
        raise kind("begins" + " and goes on" * 500 + " ends")

    failure = failure_of(Breaks(broken), torch.randn(2, 7, 24))
    assert failure.error == kind.__name__
    if kind is UnreadableError:
        assert failure.message == "(no message: UnreadableError.__str__ raises KeyError)"
    else:
        assert len(failure.message) <= 400
        assert failure.message.startswith("begins and goes on")
        assert failure.message.endswith(" ends")


LAZY = """
from einops import rearrange
from torch import nn


class Unreadable(RuntimeError):
    def __str__(self):
        raise KeyError


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.LazyLinear(24)

    def forward(self, x):
        q = self.q(x)
        return rearrange(q, "b l (h d) -> b h l d", h=5)


class Says(Lazy):
    def forward(self, x):
        raise Unreadable


class Builds(nn.Module):
    def __init__(self):
        raise Unreadable
"""


@pytest.fixture
def lazy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lazy.py").write_text(LAZY)
    return next(number for number, line in enumerate(LAZY.splitlines(), 1) if "return rearrange" in line)


def test_a_lazy_module_that_fails_in_a_library_is_traced_to_the_users_line(lazy_file: int, invoke: Callable[..., Any]):
    answer = invoke("trace", "lazy.py:Lazy", "--json")
    assert (answer.code, answer.err) == (1, "")
    failure = json.loads(answer.out)["failure"]
    assert failure["source"] == f"lazy.py:{lazy_file}"
    assert failure["cause"]["name"] == "heads_do_not_divide"
    answer = invoke("diff", "lazy.py:Lazy", "torch", "--input-shape", "x=2x5x24")
    assert answer.code == 1
    assert f"(lazy.py:{lazy_file})" in answer.err


def test_a_target_whose_error_says_nothing_is_told_in_a_line(lazy_file: int, invoke: Callable[..., Any]):
    assert invoke("trace", "lazy.py:Says", "--input-shape", "x=2x5x13").code == 1
    for code, command in (
        (2, ("trace", "lazy.py:Builds")),
        (1, ("params", "lazy.py:Says", "--input-shape", "x=2x5x13")),
    ):
        answer = invoke(*command)
        assert answer.code == code
        assert "Unreadable: (no message: Unreadable.__str__ raises KeyError)" in answer.err
        assert answer.err.count("\n") == 1


def test_an_exception_that_was_caught_leaves_no_trace():
    def recovers(heads: torch.Tensor) -> torch.Tensor:
        try:
            heads.view(5)
        except RuntimeError:
            return heads.sum(-1)
        raise AssertionError

    assert trace_module(Breaks(recovers), torch.randn(2, 7, 24)).failure is None


@pytest.mark.parametrize(
    ("body", "call", "operands"),
    [
        (lambda m, x: m.proj(x).view(2, 5, -1), "Tensor.view", ["proj(...)"]),
        (lambda m, x: x @ (x * 2), "Tensor.matmul", ["x", "x.mul(2)"]),
        (lambda m, x: torch.cat([x, x[:, :3].transpose(1, 2)], dim=1), "torch.cat", [(2, 7, 24), (2, 24, 3)]),
        (lambda m, x: x[:, 9], "Tensor.__getitem__", ["x"]),
        (lambda m, x: F.dropout(x, 0.5) @ x, "Tensor.matmul", [(2, 7, 24), (2, 7, 24)]),
        (lambda m, x: x.add_(1) @ m.counted(x), "Tensor.matmul", ["x", "x"]),
        (lambda m, x: {"x": x}["y"], "", ["x"]),
    ],
)
def test_the_call_and_its_operands_are_told(body: Callable[..., Any], call: str, operands: Any) -> None:
    failure = failure_of(Block(body), X.clone())
    assert (failure.call, failure.note) == (call, "")
    for operand, expected in zip(failure.operands, operands, strict=True):
        assert expected in (operand.name, operand.shape)


def test_a_forward_that_raises_once_alone_is_told_by_its_frames() -> None:
    raised: list[int] = []

    def body(module: Block, x: torch.Tensor) -> torch.Tensor:
        raised.append(1)
        return x.view(2, 5, -1) if len(raised) < 2 else x

    failure = failure_of(Block(body), X)
    assert (failure.call, failure.op) == ("aten.view.default", "aten.view.default")
    assert [operand.shape for operand in failure.operands] == [(2, 7, 24)]
