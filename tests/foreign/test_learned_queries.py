"""Queries that are a parameter: they have no batch, and the batch of the keys is no head."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

from .truth import assert_close, assert_true, attentions

BATCH, KEYS, QUERIES, HEADS, HEAD_DIM = 5, 11, 7, 3, 4
WIDTH = HEADS * HEAD_DIM


def weighed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3)


class Learned(nn.Module):
    """Learned queries `query embed` against keys `batch key embed`."""

    num_heads = 1

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return weighed(self.latents, self.k(x), self.v(x))


class BySoftmaxModule(Learned):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.softmax(self.latents @ self.k(x).mT / math.sqrt(WIDTH)) @ self.v(x)


class Expanded(Learned):
    def forward(self, x: Tensor) -> Tensor:
        return weighed(self.latents.expand(len(x), -1, -1), self.k(x), self.v(x))


class Unprojected(Learned):
    """Attention pooling: the keys and the values are the input."""

    def forward(self, x: Tensor) -> Tensor:
        return weighed(self.latents, x, x)


class OneVector(Learned):
    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.k(x) @ self.vector / math.sqrt(WIDTH)).softmax(-1)
        return (weights[:, None] @ self.v(x))[:, 0]


class Projected(Learned):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(weighed(self.q(self.latents), self.k(x), self.v(x)))


class ProjectedAlone(Learned):
    def forward(self, x: Tensor) -> Tensor:
        return weighed(self.q(self.latents), x, x)


class ProjectedThenExpanded(Learned):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(weighed(self.q(self.latents).expand(len(x), -1, -1), self.k(x), self.v(x)))


class InHeads(Learned):
    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        made = weighed(split(self.q(self.latents)), split(self.k(x)), split(self.v(x)))
        return self.o(made.transpose(1, 2).flatten(2))


class InHeadsByKernel(Learned):
    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(self.latents)).expand(len(x), -1, -1, -1)
        made = F.scaled_dot_product_attention(q, split(self.k(x)), split(self.v(x)))
        return self.o(made.transpose(1, 2).flatten(2))


class Unprojected4(Learned):
    num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        return weighed(split(self.latents), split(self.k(x)), split(self.v(x))).transpose(1, 2).flatten(2)


class OneHeadSplit(Learned):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (1, WIDTH)).transpose(-2, -3) for side in (self.q(self.latents), self.k(x), x))
        return self.o(weighed(q, k, v).transpose(1, 2).flatten(2))


class OneQueryAHead(Learned):
    """One query of each head, multiplied and summed."""

    num_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(HEADS, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        k, v = (side.unflatten(-1, (HEADS, HEAD_DIM)) for side in (self.k(x), self.v(x)))
        weights = ((k * self.seeds).sum(-1) / math.sqrt(HEAD_DIM)).softmax(1)
        return (weights[..., None] * v).sum(1).flatten(1)


KINDS = [
    Learned,
    BySoftmaxModule,
    Expanded,
    Unprojected,
    OneVector,
    Projected,
    ProjectedAlone,
    ProjectedThenExpanded,
    InHeads,
    InHeadsByKernel,
    Unprojected4,
    OneHeadSplit,
    OneQueryAHead,
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_of_learned_queries_is_no_head(kind: type[Learned]) -> None:
    torch.manual_seed(0)
    module, x = kind().eval(), torch.randn(BATCH, KEYS, WIDTH)
    (attention,) = attentions(module, x)
    assert_true(attention)
    assert attention.names.num_heads == kind.num_heads == attention.names.num_kv_heads
    assert attention.sizes()["batch"] == BATCH
    assert attention.axes()["k_heads"].split()[0] == "batch"
    (shown,) = mha_inspect.trace(module, x).attentions
    assert shown.num_heads == kind.num_heads


@pytest.mark.parametrize("kind", [Learned, Expanded, Unprojected])
def test_the_query_is_the_parameter(kind: type[Learned]) -> None:
    torch.manual_seed(0)
    module, x = kind().eval(), torch.randn(BATCH, KEYS, WIDTH)
    (attention,) = attentions(module, x)
    q = attention.canonical("q_heads", "batch heads query head_dim")
    assert_close(q.broadcast_to(BATCH, 1, QUERIES, WIDTH), module.latents.detach().double())


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
        (Expanded, "q_heads", "the parameter latents"),
        (Projected, "query", "the parameter latents"),
        (OfABuffer, "query", "the buffer table"),
        (WithPositions, "query", "computed from parameters"),
        (InHeadsByKernel, "query", "the parameter latents"),
    ],
)
def test_a_query_that_is_no_input_is_not_called_given(kind: type[Learned], stage: str, origin: str) -> None:
    torch.manual_seed(0)
    (shown,) = mha_inspect.trace(kind().eval(), torch.randn(BATCH, KEYS, WIDTH)).attentions
    formulas = {each.name: each.formula for each in shown.stages}
    assert formulas[stage] == origin
    assert formulas.get("key", "given") == "given"


def test_a_layer_that_scores_is_no_query() -> None:
    """The same arithmetic by a layer of its own pools positions."""
    torch.manual_seed(0)
    scorer, values = nn.Linear(WIDTH, QUERIES, bias=False), nn.Linear(WIDTH, WIDTH)

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scorer, self.values = scorer, values

        def forward(self, x: Tensor) -> Tensor:
            return self.scorer(x).softmax(1).mT @ self.values(x)

    assert not mha_inspect.trace(Pool().eval(), torch.randn(BATCH, KEYS, WIDTH)).attentions
