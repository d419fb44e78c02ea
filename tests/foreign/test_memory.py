"""Attention over a memory: the keys and values are parameters, and only the queries depend on the input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

BATCH, LENGTH, MEMORY, HEADS, HEAD_DIM = 5, 11, 7, 3, 4
WIDTH = HEADS * HEAD_DIM


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3)


class Memory(nn.Module):
    """`softmax(x W_q · keysᵀ) · values` with learned keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.values = (nn.Parameter(torch.randn(MEMORY, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.keys.mT).softmax(-1) @ self.values


class ByFunctional(Memory):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.softmax(F.linear(self.q(x), self.keys), -1), self.values.T)


class Shared(Memory):
    """One parameter for keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.keys.mT).softmax(-1) @ self.keys)


class ByKernel(Memory):
    def forward(self, x: Tensor) -> Tensor:
        k, v = (split(side).expand(len(x), -1, -1, -1) for side in (self.keys, self.values))
        return self.o(F.scaled_dot_product_attention(split(self.q(x)), k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Memory, ByFunctional, Shared, ByKernel])
def test_a_memory_is_named_and_tokens_that_read_it_are_not_accused_of_not_mixing(kind: type[Memory]) -> None:
    torch.manual_seed(0)
    module, x = kind().eval(), torch.randn(BATCH, LENGTH, WIDTH)
    (shown,) = mha_inspect.trace(module, x).attentions
    formulas = {stage.name: stage.formula for stage in shown.stages}
    assert formulas["query"] == "given"
    assert formulas["k_heads"] == "the parameter keys"
    assert formulas["v_heads"] == ("the parameter keys" if kind is Shared else "the parameter values")
    roles = {parameter.name: parameter.role for parameter in mha_inspect.params(module, x).parameters}
    assert "keys" in roles["keys"]
    assert "mixing" not in {finding.check for finding in mha_inspect.check(module, x).findings}
