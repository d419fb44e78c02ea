"""Sequences that are not one query, or one key, a position: cut, padded, pooled, asked apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import mha_inspect

from .styles import Base, D, E, H
from .truth import assert_true, attentions

B, N = 2, 13


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


class PieceByPiece(Base):
    """Four queries at a time; the last piece may be shorter."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([attend(part, k, v) for part in q.split(4, dim=2)], 2)


class FewerKeys(Base):
    """Keys of a convolution with a stride, as pyramids have them."""

    def __init__(self) -> None:
        super().__init__()
        self.k = self.v = nn.Conv2d(E, H * D, 2, 2)
        self.q, self.o = nn.Conv2d(E, H * D, 1), nn.Conv2d(H * D, E, 1)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        q, k = (rearrange(p(x), "b (h d) i j -> b h (i j) d", h=H) for p in (self.q, self.k))
        return self.o(rearrange(attend(q, k, k), "b h (i j) d -> b (h d) i j", i=x.shape[2]))


class PooledQueries(Base):
    """Of four positions the largest of each feature asks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.unflatten(2, (4, -1)).amax(2), k, v)


class PooledKeys(Base):
    """The average of three positions is a key."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return super().forward(x, F.avg_pool1d(x.transpose(1, 2), 3).transpose(1, 2))


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


@pytest.mark.parametrize("length", [12, 13])
def test_queries_that_are_asked_piece_by_piece(length: int) -> None:
    found = attentions(PieceByPiece().eval(), torch.randn(B, length, E))
    assert len(found) == math.ceil(length / 4)
    for attention in found:
        assert_true(attention)
        axes = attention.axes()
        assert (axes["query"], axes["key"], axes["output"]) == (
            "batch positions embed",
            "batch key embed",
            "batch positions embed",
        )


def test_places_before_a_stride_are_no_keys() -> None:
    (attention,) = attentions(FewerKeys().eval(), torch.randn(B, E, 8, 12))
    assert_true(attention)
    assert (attention.names.num_heads, attention.names.head_dim) == (H, D)
    assert attention.axes()["key"] == "batch embed positions_1 positions_2"


def test_positions_of_which_one_query_is_made_stand_beside_it() -> None:
    (attention,) = attentions(PooledQueries().eval(), torch.randn(B, 12, E))
    assert_true(attention)
    assert attention.axes()["query"] == "batch (positions query) embed"
    assert attention.axes()["weights"] == "batch heads query key"


def test_keys_that_are_pooled_of_what_asks_are_no_others() -> None:
    with torch.no_grad():
        told = mha_inspect.trace(PooledKeys().eval(), torch.randn(B, 12, E))
    assert [one.kind for one in told.attentions] == [("self",)]


def test_one_query_and_one_key_beside_a_batch() -> None:
    layer = nn.MultiheadAttention(E - 1, 3).eval()
    (attention,) = attentions(layer, *[torch.randn(1, B, E - 1)] * 3, need_weights=False)
    assert attention.found.stages["q_heads"].shape[0] in (B, B * 3)
    assert not {"query", "key"} & set(attention.axes()["weights"].split()[:1])


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
    assert any(f"{B} queries have no key left" in note for note in told.notes)


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
        "context in heads, then mul",
    )
