"""Queries that are a parameter: they have no batch, and the batch of the keys is no head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

BATCH, KEYS, QUERIES, WIDTH = 5, 11, 7, 12


def weighed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


class Learned(nn.Module):
    """Learned queries `query embed` against keys `batch key embed`."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return weighed(self.latents, self.k(x), self.v(x))


class Projected(Learned):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(weighed(self.q(self.latents), self.k(x), self.v(x)))


class OfABuffer(Learned):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(QUERIES, WIDTH))

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
    (shown,) = mha_inspect.trace(kind().eval(), torch.randn(BATCH, KEYS, WIDTH)).attentions
    formulas = {each.name: each.formula for each in shown.stages}
    assert formulas[stage] == origin
    assert formulas.get("key", "given") == "given"
