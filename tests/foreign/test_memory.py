"""Attention over a memory: the keys and values are parameters, and only the queries depend on the input."""

from __future__ import annotations

import math

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

    num_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.values = (nn.Parameter(torch.randn(MEMORY, WIDTH)) for _ in range(2))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.keys.mT).softmax(-1) @ self.values


class ByFunctional(Memory):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.softmax(F.linear(self.q(x), self.keys), -1), self.values.T)


class ByEinsum(Memory):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.einsum("bqd,md->bqm", self.q(x), self.keys).softmax(-1)
        return torch.einsum("bqm,md->bqd", weights, self.values)


class ByMatrix(Memory):
    """The projection of the queries is a parameter too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.softmax((x @ self.matrix) @ self.keys.mT / math.sqrt(WIDTH), -1) @ self.values)


class Shared(Memory):
    """One parameter for keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.keys.mT).softmax(-1) @ self.keys)


class InHeads(Memory):
    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        weights = (split(self.q(x)) @ split(self.keys).mT / math.sqrt(HEAD_DIM)).softmax(-1)
        return self.o((weights @ split(self.values)).transpose(1, 2).flatten(2))


class ByKernel(Memory):
    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        k, v = (split(side).expand(len(x), -1, -1, -1) for side in (self.keys, self.values))
        return self.o(F.scaled_dot_product_attention(split(self.q(x)), k, v).transpose(1, 2).flatten(2))


class Expanded(Memory):
    def forward(self, x: Tensor) -> Tensor:
        k, v = (side.expand(len(x), -1, -1) for side in (self.keys, self.values))
        return (torch.bmm(self.q(x), k.mT) / math.sqrt(WIDTH)).softmax(-1).bmm(v)


KINDS = [Memory, ByFunctional, ByEinsum, ByMatrix, Shared, InHeads, ByKernel, Expanded]


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_are_named(kind: type[Memory]) -> None:
    torch.manual_seed(0)
    module, x = kind().eval(), torch.randn(BATCH, LENGTH, WIDTH)
    (shown,) = mha_inspect.trace(module, x).attentions
    formulas = {stage.name: stage.formula for stage in shown.stages}
    assert formulas["query"] == "given"
    assert formulas["k_heads"] == "the parameter keys"
    assert formulas["v_heads"] == ("the parameter keys" if kind is Shared else "the parameter values")
    roles = {parameter.name: parameter.role for parameter in mha_inspect.params(module, x).parameters}
    assert "keys" in roles["keys"]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_read_a_memory_are_not_accused_of_not_mixing(kind: type[Memory]) -> None:
    torch.manual_seed(0)
    report = mha_inspect.check(kind().eval(), torch.randn(BATCH, LENGTH, WIDTH))
    assert "mixing" not in {finding.check for finding in report.findings}
