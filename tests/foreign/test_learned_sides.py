"""Queries, or keys and values, that are parameters: they have no batch, and are not called given."""

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


def weighed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class Learned(nn.Module):
    """Learned queries `query embed` against keys `batch key embed`."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(MEMORY, WIDTH))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return weighed(self.latents, self.k(x), self.v(x))


class Projected(Learned):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(weighed(self.q(self.latents), self.k(x), self.v(x)))


class OfABuffer(Learned):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(MEMORY, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(weighed(self.q(self.table), self.k(x), self.v(x)))


class WithPositions(OfABuffer):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(weighed(self.q(self.latents + self.table), self.k(x), self.v(x)))


@pytest.mark.parametrize(
    ("kind", "stage", "origin"),
    [
        (Learned, "q_heads", "the parameter latents"),
        (Projected, "query", "the parameter latents"),
        (OfABuffer, "query", "the buffer table"),
        (WithPositions, "query", "computed from parameters"),
    ],
)
def test_a_query_that_is_no_input_is_not_called_given(kind: type[Learned], stage: str, origin: str) -> None:
    torch.manual_seed(0)
    (shown,) = mha_inspect.trace(kind().eval(), torch.randn(BATCH, LENGTH, WIDTH)).attentions
    formulas = {row.name: row.formula for row in shown.stages}
    assert formulas[stage] == origin
    assert formulas.get("key", "given") == "given"
