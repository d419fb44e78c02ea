"""A block of code that raises while it is recorded: the error goes on its way, and the recording has the failure."""

from __future__ import annotations

import gc
import weakref

import jsonschema
import pytest
import torch
from torch import nn

import mha_inspect
from tests.schemas import load_schema

from .breaking import Clashing


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
    assert failure.line == "return q @ k.transpose(-2, -1)"
    assert [(operand.name, operand.axes) for operand in failure.operands] == [
        ("q", "batch heads sequence head_dim"),
        ("k", "batch sequence heads head_dim"),
    ]
    assert "needs another run of your code" in failure.note
    assert "must match the size" in str(seen.trace)
    jsonschema.validate(seen.trace.to_dict(), load_schema("trace"))


def test_the_operation_that_was_dispatched_in_a_block_tells_the_cause():
    heads = torch.randn(2, 3, 7, 8).transpose(1, 2)
    with pytest.raises(RuntimeError), mha_inspect.recording() as seen:
        heads.view(2, 7, 24).add(heads.view(2, 7, 23))
    failure = seen.trace.failure
    assert (failure.call, failure.source.rpartition(":")[0]) == (
        "aten.view.default",
        "tests/corpus/test_recorded_failures.py",
    )
    assert [(operand.name, operand.shape) for operand in failure.operands] == [("heads", (2, 7, 3, 8))]
    assert failure.cause.name == "not_contiguous"


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
