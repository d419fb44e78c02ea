"""Attention of one token at a time to a memory that grows, and biases that a second product of its own makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

HEADS, HEAD_DIM = 4, 8
WIDTH = HEADS * HEAD_DIM


class Feedback(nn.Module):
    """Relative attention of a token to the memory: `memory batch embed`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.places = nn.Parameter(torch.randn(64, HEADS, HEAD_DIM))
        self.of_query, self.of_place = nn.Parameter(torch.randn(HEADS, HEAD_DIM)), nn.Parameter(torch.randn(64, HEADS))

    def forward(self, token: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            side(x).unflatten(-1, (HEADS, -1)) for side, x in ((self.q, token), (self.k, memory), (self.v, memory))
        )
        by_content = torch.einsum("bhd,jbhd->jbh", q + self.of_query, k)
        by_place = torch.einsum("bhd,jhd->jbh", q, self.places[-len(memory) :]) + self.of_place[-len(memory) :, None]
        weights = ((by_content + by_place) / HEAD_DIM**0.5).softmax(0)
        return self.o(torch.einsum("jbh,jbhd->bhd", weights, v).flatten(1))


class FeedbackTransformer(nn.Module):
    """All layers attend to the mean of all layers' results for the tokens before: `position batch embed`."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Feedback() for _ in range(layers))
        self.further = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.shares = nn.Parameter(torch.ones(layers + 1))

    def forward(self, x: Tensor) -> Tensor:
        memory: list[Tensor] = []
        results = []
        for token in x.unbind(0):
            states = [token]
            for layer, further in zip(self.layers, self.further, strict=True):
                if memory:
                    token = token + layer(token, torch.stack(memory))
                token = token + further(token).relu()
                states.append(token)
            memory.append(torch.einsum("lbe,l->be", torch.stack(states), self.shares.softmax(0)))
            results.append(token)
        return torch.stack(results)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_token_attends_to_the_memory_and_nothing_is_accused(layers: int, batch: int) -> None:
    torch.manual_seed(0)
    trace = mha_inspect.trace(FeedbackTransformer(layers).eval(), torch.randn(5, batch, WIDTH))
    assert (trace.findings, len(trace.attentions)) == ((), 4 * layers)
    for attention in trace.attentions:
        axes = {stage.name: stage.axes for stage in attention.stages}
        assert (attention.num_heads, attention.head_dim, axes["v_heads"]) == (
            HEADS,
            HEAD_DIM,
            "key batch heads head_dim",
        )


class Forgetting(nn.Module):
    """Causal attention with a bias by row: logs of gates, which a product of its own makes, summed along the keys."""

    def __init__(self, head_dim: int, of_gates: int) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(35, 3 * HEADS * head_dim), nn.Linear(HEADS * head_dim, 35)
        self.gates = nn.Linear(35, 2 * HEADS * of_gates)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        of_query, of_key = self.gates(x).unflatten(-1, (2, HEADS, -1)).movedim(-3, 0).transpose(-3, -2)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu()
        gates = F.logsigmoid(of_query @ of_key.mT * of_query.shape[-1] ** -0.5).masked_fill(later, 0.0)
        bias = gates.flip(-1).cumsum(-1).flip(-1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5 + bias).masked_fill(later.triu(1), -torch.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("head_dim", "of_gates"), [(8, 6), (6, 8), (8, 8)])
def test_the_product_of_a_bias_by_row_is_not_that_of_the_scores(head_dim: int, of_gates: int) -> None:
    torch.manual_seed(0)
    trace = mha_inspect.trace(Forgetting(head_dim, of_gates).eval(), torch.randn(3, 7, 35))
    (attention,) = trace.attentions
    assert (trace.findings, attention.head_dim) == ((), head_dim)
    assert attention.scale == pytest.approx(head_dim**-0.5)


class Sampled(nn.Module):
    """Scores of the pairs of a sparse mask alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.mask = torch.ones(7, 7).tril().to_sparse_csr()

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.sparse.sampled_addmm(self.mask, self.q(x), self.k(x).mT, beta=0.0).to_dense()
        return scores.masked_fill(self.mask.to_dense() == 0, -torch.inf).softmax(-1) @ self.v(x)


def test_layers_with_a_sparse_mask_each_are_recorded() -> None:
    model = nn.Sequential(*(Sampled() for _ in range(5)))
    with torch.no_grad(), mha_inspect.recording() as block:
        model(torch.randn(7, 16))
    assert block.trace.failure is None
