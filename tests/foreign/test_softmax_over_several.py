"""A softmax over several dimensions of the scores, and a softmax that is computed in pieces of the scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from .truth import assert_close, assert_true, attentions

BATCH, ROWS, COLUMNS, HEADS, HEAD_DIM = 2, 3, 5, 3, 4
WIDTH = HEADS * HEAD_DIM


class OfImage(nn.Module):
    """Queries and keys are the places of an image; the scores are `batch heads row column row column`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def weights(self, scores: Tensor) -> Tensor:
        return (scores - scores.logsumexp((-2, -1), keepdim=True)).exp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).unflatten(-1, (HEADS, HEAD_DIM)) for side in (self.q, self.k, self.v))
        weights = self.weights(torch.einsum("bijhc,bklhc->bhijkl", q, k) / math.sqrt(HEAD_DIM))
        return torch.einsum("bhijkl,bklhc->bijhc", weights, v).flatten(-2)


class BySum(OfImage):
    def weights(self, scores: Tensor) -> Tensor:
        exponentials = (scores - scores.amax((-2, -1), keepdim=True)).exp()
        return exponentials / exponentials.sum((4, 5), keepdim=True)


class ByInverse(OfImage):
    def weights(self, scores: Tensor) -> Tensor:
        exponentials = scores.exp()
        return exponentials * exponentials.sum((-1, -2), keepdim=True).reciprocal()


class Indexed(OfImage):
    def weights(self, scores: Tensor) -> Tensor:
        return torch.exp(scores - torch.logsumexp(scores, dim=(4, 5))[..., None, None])


class OverHeads(OfImage):
    """The weights of all heads sum to one: a softmax over the keys is something else."""

    def weights(self, scores: Tensor) -> Tensor:
        return (scores - scores.logsumexp((1, -2, -1), keepdim=True)).exp()


@pytest.mark.parametrize("kind", [OfImage, BySum, ByInverse, Indexed])
def test_a_softmax_over_two_axes_of_keys_is_found(kind: type[OfImage]) -> None:
    torch.manual_seed(0)
    module, x = kind().eval(), torch.randn(BATCH, ROWS, COLUMNS, WIDTH)
    (attention,) = attentions(module, x)
    assert_true(attention)
    assert attention.axes()["weights"] == "batch heads query_1 query_2 key_1 key_2"
    assert attention.names.num_heads == HEADS
    q, k = (side(x).flatten(1, 2).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (module.q, module.k))
    expected = (q @ k.mT / math.sqrt(HEAD_DIM)).double().softmax(-1)
    assert_close(attention.canonical("weights", "batch heads query key"), expected)


def test_a_softmax_over_heads_and_keys_is_no_softmax_over_keys() -> None:
    torch.manual_seed(0)
    assert not mha_inspect.trace(OverHeads().eval(), torch.randn(BATCH, ROWS, COLUMNS, WIDTH)).attentions
