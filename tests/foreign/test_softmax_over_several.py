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


class OverHeads(OfImage):
    """The weights of all heads sum to one: a softmax over the keys is something else."""

    def weights(self, scores: Tensor) -> Tensor:
        return (scores - scores.logsumexp((1, -2, -1), keepdim=True)).exp()


def test_a_softmax_over_heads_and_keys_is_no_softmax_over_keys() -> None:
    torch.manual_seed(0)
    assert not mha_inspect.trace(OverHeads().eval(), torch.randn(BATCH, ROWS, COLUMNS, WIDTH)).attentions


# -- a softmax in pieces of the scores --------------------------------------------------------------------------------

ITEMS, LENGTH = 6, 11


class InPieces(nn.Module):
    """Scores of all queries and keys at once, and weights in place, one half of the batch at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def weights(self, scores: Tensor) -> Tensor:
        for part in scores.chunk(2):
            part.copy_(part.softmax(-1))
        return scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (self.q, self.k, self.v))
        context = self.weights(q @ k.mT / math.sqrt(HEAD_DIM)) @ v
        return self.o(context.transpose(1, 2).flatten(2))


class ByHead(InPieces):
    def weights(self, scores: Tensor) -> Tensor:
        for head in range(HEADS):
            scores[:, head] = scores[:, head].softmax(-1)
        return scores


class ByQueries(InPieces):
    def weights(self, scores: Tensor) -> Tensor:
        for part in scores.split(4, 2):
            part.copy_(part.softmax(-1))
        return scores


class Concatenated(InPieces):
    def weights(self, scores: Tensor) -> Tensor:
        return torch.cat([part.softmax(-1) for part in scores.chunk(2)])


class Causal(InPieces):
    def weights(self, scores: Tensor) -> Tensor:
        later = torch.ones(LENGTH, LENGTH).triu(1).bool()
        for part in scores.chunk(2):
            part.copy_(part.masked_fill(later, -torch.inf).softmax(-1))
        return scores


class Flat(InPieces):
    """Batch and heads are one dimension, of which a half is computed at a time."""

    def forward(self, x: Tensor) -> Tensor:
        sides = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (self.q, self.k, self.v))
        q, k, v = (side.flatten(0, 1) for side in sides)
        context = torch.bmm(self.weights(torch.bmm(q, k.mT) / math.sqrt(HEAD_DIM)), v)
        return self.o(context.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))


class OtherAxes(InPieces):
    """One half has a softmax over the keys, the other over the queries: these are two."""

    def weights(self, scores: Tensor) -> Tensor:
        return torch.cat([scores[:3].softmax(-1), scores[3:].softmax(-2)])


PIECES = [InPieces, ByHead, ByQueries, Concatenated, Causal]


@pytest.mark.parametrize("kind", PIECES)
def test_a_softmax_in_pieces_is_one(kind: type[InPieces]) -> None:
    torch.manual_seed(0)
    module, x = kind().eval().requires_grad_(False), torch.randn(ITEMS, LENGTH, WIDTH)
    (attention,) = attentions(module, x)
    assert_true(attention)
    assert attention.names.num_heads == HEADS
    assert attention.axes()["weights"] == "batch heads query key"
    q, k = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2).double() for side in (module.q, module.k))
    scores = q @ k.mT / math.sqrt(HEAD_DIM)
    assert_close(attention.value("scores").double(), scores)
    later = torch.ones(LENGTH, LENGTH).triu(1).bool()
    masked = scores.masked_fill(later, -torch.inf) if kind is Causal else scores
    assert_close(attention.value("weights").double(), masked.softmax(-1))
    (shown,) = mha_inspect.trace(module, x).attentions
    assert shown.kind == (("self", "causal") if kind is Causal else ("self",))
    if kind is Concatenated:
        return  # from the scores to the weights it is one softmax, whatever is between
    along = {"ByHead": "heads", "ByQueries": "query"}.get(kind.__name__, "batch")
    assert any(f"pieces along {along};" in note for note in shown.notes)
    roles = {parameter.name: parameter.role for parameter in mha_inspect.params(module, x).parameters}
    assert [roles[f"{name}.weight"].split(":")[0] for name in "qkvo"] == ["W_q", "W_k", "W_v", "W_o"]


def test_a_softmax_in_pieces_of_batch_and_heads_is_one() -> None:
    torch.manual_seed(0)
    module, x = Flat().eval().requires_grad_(False), torch.randn(ITEMS, LENGTH, WIDTH)
    (attention,) = attentions(module, x)
    assert_true(attention)
    assert attention.axes()["weights"] == "(batch heads) query key"


def test_softmaxes_over_other_axes_are_not_one() -> None:
    torch.manual_seed(0)
    module = OtherAxes().eval().requires_grad_(False)
    assert len(mha_inspect.trace(module, torch.randn(ITEMS, LENGTH, WIDTH)).attentions) == 2
