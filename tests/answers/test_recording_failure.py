"""A block of code that raises while it is recorded: the error goes on its way, and the recording has the failure."""

from __future__ import annotations

import gc
import weakref

import jsonschema
import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.schemas import load_schema


class Clashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(2, 7, 3, 8).transpose(1, 2)
        k = self.k(x).view(2, 7, 3, 8)
        return q @ k.transpose(-2, -1)


def test_a_recording_has_the_failure_of_a_block_that_raised():
    clashing, x = Clashing(), torch.randn(2, 7, 24)
    layer = nn.MultiheadAttention(24, 3, batch_first=True)
    with pytest.raises(RuntimeError, match="must match the size") as plain:
        clashing(x)

    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = layer(x, x, x)[0]
        return clashing(x)

    with pytest.raises(RuntimeError) as caught, mha_inspect.recording() as seen:
        step(x)
    assert str(caught.value) == str(plain.value)
    assert len(seen.trace.attentions) == 2
    failure = seen.trace.failure
    assert failure.cause.name == "heads_not_transposed"
    assert failure.line == "return q @ k.transpose(-2, -1)"
    assert [operand.axes for operand in failure.operands] == ["batch heads query head_dim", "batch key head_dim heads"]
    assert "Heads must come before key." in repr(seen.trace)
    data = seen.trace.to_dict()
    jsonschema.validate(data, load_schema("trace"))
    assert data["failure"]["cause"]["name"] == "heads_not_transposed"


def test_a_block_fails_without_a_module_too():
    q, k = torch.randn(2, 3, 7, 8), torch.randn(2, 7, 3, 8)
    with pytest.raises(RuntimeError), mha_inspect.recording() as seen:
        torch.matmul(q, k.transpose(-2, -1))
    failure = seen.trace.failure
    assert (failure.call, failure.source.rpartition(":")[0]) == ("torch.matmul", "tests/test_recording_failure.py")
    assert [(operand.name, operand.shape) for operand in failure.operands] == [
        ("q", (2, 3, 7, 8)),
        ("k.transpose(-2, -1)", (2, 7, 8, 3)),
    ]
    assert failure.clash.endswith("Dimension 1 clashes: 3 against 7.")


def test_what_a_function_gave_is_not_asked_of_it_again():
    calls = []

    def split(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape)
        heads = x.view(2, 7, 3, 8)
        return heads

    with pytest.raises(RuntimeError), mha_inspect.recording() as seen:
        torch.randn(2, 3, 7, 8) @ split(torch.randn(2, 7, 24))
    assert len(calls) == 1
    assert [operand.shape for operand in seen.trace.failure.operands] == [(2, 3, 7, 8)]
    assert "without calling code of yours again" in seen.trace.failure.note


def test_an_interrupt_in_a_block_is_no_failure():
    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), mha_inspect.recording() as seen:
        stopped()
    assert seen.trace.failure is None


def test_no_tensor_outlives_a_block_that_raised():
    made: list[weakref.ref[torch.Tensor]] = []

    def body() -> mha_inspect.recording:
        seen = mha_inspect.recording()
        try:
            with seen:
                x = torch.randn(2, 7, 24)
                made.append(weakref.ref(x))
                Clashing()(x)
        except RuntimeError:
            pass
        return seen

    gc.collect()
    gc.disable()
    try:
        seen = body()
        assert [tensor() for tensor in made] == [None]
        assert seen.trace.failure is not None
    finally:
        gc.enable()
