"""An operand without a name is called by its source, and a view is told from a transposition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.errors import ForwardError
from mha_inspect.reports.trace import Failure


class Split(nn.Module):
    heads = 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, self.qkv(x).chunk(3, -1))
        return ((q @ k.mT).softmax(-1) @ v).flatten(2)

    def split(self, y: Tensor) -> Tensor:
        return y.view(y.shape[0], self.heads, y.shape[1], -1)


class Summed(Split):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).softmax(-1) @ (self.qkv.weight[:2] + 1)


def failure_of(module: nn.Module, *given: Any) -> Failure:
    with pytest.raises(ForwardError) as raised:
        mha_inspect.trace(module, *given)
    failure = raised.value.trace.failure
    assert failure is not None
    return failure


def test_an_operand_is_called_by_its_source() -> None:
    failure = failure_of(Summed(), torch.randn(2, 5, 16))
    assert [operand.name for operand in failure.operands] == ["(x * 2).softmax(-1)", "(self.qkv.weight[:2] + 1)"]


def test_a_view_of_a_slice_would_put_the_heads_in_the_place_of_positions() -> None:
    failure = failure_of(Split(), torch.randn(2, 12, 16))
    assert failure.cause is not None
    assert "transposed" not in failure.cause.explanation
    assert ".view(2, 12, 4, 4).transpose(1, 2)" in str(failure.cause)
    assert "contiguous()" not in str(failure.cause)
