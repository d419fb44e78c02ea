"""Sequences that are not one query, or one key, a position: cut, padded, pooled, asked apart."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import mha_inspect
from tests.corpus.base import Base
from tests.corpus.entry import D, E, H

from .truth import attentions

B, N = 2, 13


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


class Neighbours(nn.Module):
    """Every place of an image asks the nine around it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(E, H * D, 1) for _ in range(3))
        self.o = nn.Conv2d(H * D, E, 1)

    def forward(self, x: Tensor) -> Tensor:
        q = rearrange(self.q(x), "b (h d) i j -> b h (i j) 1 d", h=H)
        k, v = (rearrange(F.unfold(p(x), 3, padding=1), "b (h d k) n -> b h n k d", h=H, k=9) for p in (self.k, self.v))
        return self.o(rearrange(attend(q, k, v), "b h (i j) 1 d -> b (h d) i j", i=x.shape[2]))


class RelativePlaces(Base):
    """Queries and keys of an image, whose scores are biased by row and column."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).unflatten(-1, (3, 4)).unflatten(-3, (3, 4))
        rows, columns = (torch.arange(n)[:, None] - torch.arange(n) for n in (3, 4))
        image = q.unflatten(2, (3, 4))
        table = self.q.weight[:8]
        by_row = torch.einsum("bhijd,ikd->bhijk", image, table[rows + 2][..., :D])
        by_column = torch.einsum("bhijd,jkd->bhijk", image, table[columns + 3][..., :D])
        scores = scores + by_row[..., None] + by_column[..., None, :]
        return scores.flatten(-2).flatten(-3, -2).softmax(-1) @ v


def test_keys_stay_other_axes_than_queries_where_both_are_split() -> None:
    (attention,) = attentions(RelativePlaces().eval(), torch.randn(B, 12, E))
    axes = attention.axes()
    assert axes["scores"] == "batch heads query_1 query_2 key_1 key_2"
    assert axes["weights"] == "batch heads query key"


def test_neighbours_of_an_image_by_columns() -> None:
    module, x = Neighbours().eval(), torch.randn(B, E, 4, 5)
    (attention,) = attentions(module, x)
    axes = attention.axes()
    assert (axes["query"], axes["weights"]) == ("batch embed query_1 query_2", "batch heads query 1 key")
    assert (attention.names.num_heads, attention.names.num_kv_heads, attention.names.head_dim) == (H, H, D)
    with torch.no_grad():
        told = mha_inspect.params(module, x, per_head=True)
    slices = {own.name: [(s.part, s.head, s.rows) for s in own.heads or ()] for own in told.parameters}
    for side in "qkv":
        assert slices[f"{side}.weight"] == [(f"W_{side}", head, (head * D, head * D + D)) for head in range(H)]


def test_scores_that_are_normalised_along_both_axes_are_said_to_be() -> None:
    class Sinkhorn(Base):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2) / math.sqrt(D)
            scores = scores - scores.logsumexp(-1, keepdim=True)
            return (scores - scores.logsumexp(-2, keepdim=True)).exp() @ v

    (attention,) = attentions(Sinkhorn().eval(), torch.randn(B, N, E))
    assert attention.found.over_queries
    assert attention.found.scoring == (("log_softmax", None),)
    scores, masked, weights = (attention.value(stage) for stage in ("scores", "masked_scores", "weights"))
    torch.testing.assert_close(masked, scores.log_softmax(-1))
    torch.testing.assert_close(weights, masked.softmax(-2))


class FewerAsked(Base):
    """Padding bars some keys and all of the last query's, and of the queries the first few go on."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        barred = torch.zeros(N, N, dtype=torch.bool)
        barred[-1] = True
        weights = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(barred, -torch.finfo(q.dtype).max).softmax(-1)
        return weights.gather(2, torch.arange(5)[None, None, :, None].expand(len(q), H, 5, N)) @ v


def test_a_masked_query_that_does_not_go_on_has_no_row_in_what_does() -> None:
    with torch.no_grad():
        told = mha_inspect.trace(FewerAsked().eval(), torch.randn(B, N, E), keep=True)
    (attention,) = told.attentions
    assert {stage.name: stage.axes for stage in attention.stages}["context"] == "batch heads positions head_dim"
    assert attention.context.formula == "(weights, then gather) · v_heads"
    assert any(f"{B} queries have every key masked out" in note for note in told.notes)


class AskedByTheMean(nn.Module):
    """All heads ask with the mean of the positions, of one key head; a gate gives each position its part."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.gate = (nn.Linear(E, w) for w in (H * D, D, D, H * D))
        self.o = nn.Linear(H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x.mean(1)).view(-1, H, D) / math.sqrt(D)
        read = (q @ self.k(x).mT).softmax(-1) @ self.v(x)
        return self.o((read[:, None] * self.gate(x).sigmoid().unflatten(-1, (H, D))).flatten(2))


def test_heads_that_ask_with_one_query_are_no_queries() -> None:
    torch.manual_seed(0)
    (attention,) = mha_inspect.trace(AskedByTheMean(), torch.randn(3, N, E)).attentions
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (H, 1, D)
    stages = {stage.name: stage for stage in attention.stages}
    assert (stages["q_heads"].axes, stages["weights"].axes) == ("batch heads head_dim", "batch heads key")
    assert (stages["concat"].axes, stages["concat"].formula) == (
        "batch query (heads head_dim)",
        "context in heads, then gate (sigmoid)",
    )
