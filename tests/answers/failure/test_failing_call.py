"""The call that raised: seen in one more run, which leaves nothing behind; of a block by its frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mha_inspect
from mha_inspect.errors import ForwardError
from mha_inspect.reports.trace import Failure

X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Calls a function, and counts how often its own functions are called."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.proj, self.other = nn.Linear(24, 24), nn.Linear(24, 24)
        self.drop = nn.Dropout(0.5)
        self.body, self.calls = body, 0

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


def failure_of(module: nn.Module, x: torch.Tensor) -> Failure:
    with pytest.raises(ForwardError) as caught:
        mha_inspect.trace(module, x)
    assert caught.value.trace.failure is not None
    return caught.value.trace.failure


@pytest.mark.parametrize(
    ("body", "call", "operands"),
    [
        (lambda m, x: m.proj(x).view(2, 5, -1), "Tensor.view", {"proj(...)": (2, 7, 24)}),
        (lambda m, x: torch.matmul(m.proj(x), m.other(x)), "torch.matmul", ["proj(...)", "other(...)"]),
        (lambda m, x: m.proj(x[:, :5]) @ m.proj(x), "Tensor.matmul", [(2, 5, 24), (2, 7, 24)]),
        (lambda m, x: x @ (x * 2), "Tensor.matmul", ["x", "x.mul(2)"]),
        (lambda m, x: torch.cat([x, x[:, :3].transpose(1, 2)], dim=1), "torch.cat", [(2, 7, 24), (2, 24, 3)]),
        (lambda m, x: x[:, 9], "Tensor.__getitem__", ["x"]),
        (lambda m, x: x.masked_fill(x[0].mT > 0, 0.0), "Tensor.masked_fill", [(2, 7, 24), (24, 7)]),
        (lambda m, x: F.dropout(x, 0.5) @ x, "Tensor.matmul", [(2, 7, 24), (2, 7, 24)]),
        (lambda m, x: x @ m.drop(x), "Tensor.matmul", [(2, 7, 24), (2, 7, 24)]),
        (lambda m, x: m.counted(x).view(2, 5, -1), "Tensor.view", ["x"]),
        (lambda m, x: x.add_(1) @ m.counted(x), "Tensor.matmul", ["x", "x"]),
        (lambda m, x: {"x": x}["y"], "", ["x"]),
        (lambda m, x: int("x"), "", ["x"]),
    ],
)
def test_the_call_and_its_operands_are_told(body: Callable[..., Any], call: str, operands: Any) -> None:
    failure = failure_of(Block(body), X.clone())
    assert (failure.call, failure.note) == (call, "")
    if isinstance(operands, dict):
        assert {operand.name: operand.shape for operand in failure.operands} == operands
    else:
        assert len(failure.operands) == len(operands)
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
