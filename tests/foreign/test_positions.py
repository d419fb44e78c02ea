"""Sequences that are not one query, or one key, a position: cut, padded, pooled, asked apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

import mha_inspect
from tests.corpus.base import Base
from tests.corpus.entry import D, E, H

from .truth import assert_true, attentions

B, N = 2, 13


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


class ClassTokenApart(Base):
    """The first token asks all, the others ask their own group and the first."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        first = torch.einsum("bij,bjd->bid", self.scores(q[:, :1], k).softmax(-1), v)
        q, *others = (rearrange(t[:, 1:], "b (g n) d -> (b g) n d", g=4) for t in (q, k, v))
        k, v = (
            torch.cat([repeat(t[:, :1], "b 1 d -> (b g) 1 d", g=4), own], 1)
            for t, own in zip((k, v), others, strict=True)
        )
        rest = torch.einsum("bij,bjd->bid", self.scores(q, k).softmax(-1), v)
        joined = torch.cat([first, rearrange(rest, "(b g) n d -> b (g n) d", g=4)], 1)
        return joined.unflatten(0, (-1, H))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bid,bjd->bij", q, k) / math.sqrt(D)


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


class FewerQueries(FewerKeys):
    """Queries of a convolution with a stride, whose places no product with a weight has seen before."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Conv2d(E, H * D, 2, 2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        k = rearrange(self.k(x), "b (h d) i j -> b h (i j) d", h=H)
        q = rearrange(self.q(x), "b (h d) (i m) (j n) -> (b h) (i j) (m n) d", h=H, i=2, j=3)
        return self.o(
            rearrange(attend(q, *[rearrange(k, "b h n d -> (b h) 1 n d")] * 2), "(b h) w n d -> b (h d) w n", h=H)
        )


class PooledQueries(Base):
    """Of four positions the largest of each feature asks."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q.unflatten(2, (4, -1)).amax(2), k, v)


class PooledKeys(Base):
    """The average of three positions is a key."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return super().forward(x, F.avg_pool1d(x.transpose(1, 2), 3).transpose(1, 2))


class OverLayers(nn.Module):
    """Every position asks each layer's state of itself, by queries that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.k, self.v = nn.Parameter(torch.randn(H, D)), nn.Linear(E, D), nn.Linear(E, D)

    def forward(self, *layers: Tensor) -> Tensor:
        x = torch.stack(layers)
        weights = torch.einsum("qd,lbnd->qlbn", self.query, self.k(x)).softmax(1)
        return torch.einsum("qlbn,lbnd->qbnd", weights, self.v(x))


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


def test_a_token_that_asks_apart_is_one_query_and_what_is_joined_are_positions() -> None:
    first, rest = attentions(ClassTokenApart().eval(), torch.randn(B, N, E))
    for attention in (first, rest):
        assert_true(attention)
        axes = attention.axes()
        assert (axes["query"], axes["output"]) == ("batch positions embed",) * 2
        assert axes["concat"] == "batch positions (heads head_dim)"
    assert first.axes()["weights"] == "(batch heads) query key"
    assert first.found.stages["weights"].shape == (B * H, 1, N)
    assert rest.axes()["weights"] == "(batch heads windows) query key"


@pytest.mark.parametrize("length", [12, 13])
def test_queries_that_are_asked_piece_by_piece(length: int) -> None:
    (attention,) = attentions(PieceByPiece().eval(), torch.randn(B, length, E))
    assert_true(attention)
    axes = attention.axes()
    assert (axes["query"], axes["key"], axes["output"]) == ("batch query embed", "batch key embed", "batch query embed")
    assert attention.value("weights").shape == (B, H, length, length)


@pytest.mark.parametrize(("style", "named"), [(FewerKeys, "key"), (FewerQueries, "query")])
def test_places_before_a_stride_are_neither_queries_nor_keys(style: type[FewerKeys], named: str) -> None:
    (attention,) = attentions(style().eval(), torch.randn(B, E, 8, 12))
    if style is FewerKeys:
        assert_true(attention)
    else:  # the keys are those of every window
        assert attention.axes()["weights"] == "(batch heads) windows query key"
    assert (attention.names.num_heads, attention.names.head_dim) == (H, D)
    assert attention.axes()[named] == "batch embed positions_1 positions_2"


def test_positions_of_which_one_query_is_made_stand_beside_it() -> None:
    (attention,) = attentions(PooledQueries().eval(), torch.randn(B, 12, E))
    assert_true(attention)
    assert attention.axes()["query"] == "batch (positions query) embed"
    assert attention.axes()["weights"] == "batch heads query key"


def test_keys_that_are_pooled_of_what_asks_are_no_others() -> None:
    with torch.no_grad():
        told = mha_inspect.trace(PooledKeys().eval(), torch.randn(B, 12, E))
    assert [one.kind for one in told.attentions] == [("self",)]


def test_a_softmax_over_layers_has_positions_for_a_batch() -> None:
    (attention,) = attentions(OverLayers().eval(), *(torch.randn(B, N, E) for _ in range(5)))
    assert attention.axes()["weights"] == "(heads query) key batch_1 batch_2"
    q, k, v = (attention.value(f"{side}_heads") for side in "qkv")
    weights = torch.einsum("qd,lbnd->qlbn", q.reshape(H, D), k.reshape(5, B, N, D)).softmax(1)
    torch.testing.assert_close(attention.value("weights").reshape(weights.shape), weights)
    context = torch.einsum("qlbn,lbnd->qbnd", weights, v.reshape(5, B, N, D))
    torch.testing.assert_close(attention.value("context").reshape(context.shape), context)


def test_keys_stay_other_axes_than_queries_where_both_are_split() -> None:
    (attention,) = attentions(RelativePlaces().eval(), torch.randn(B, 12, E))
    axes = attention.axes()
    assert axes["scores"] == "batch heads query_1 query_2 key_1 key_2"
    assert axes["weights"] == "batch heads query key"


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


class ChannelByChannel(nn.Module):
    """Queries, keys and values by one matrix, and each of their channels convolved by itself."""

    def __init__(self) -> None:
        super().__init__()
        width = 3 * H * D
        self.qkv, self.near = nn.Conv2d(E, width, 1), nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.o = nn.Conv2d(H * D, E, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rearrange(t, "b (h d) x y -> b h (x y) d", h=H) for t in self.near(self.qkv(x)).chunk(3, 1))
        return self.o(rearrange(attend(q, k, v), "b h (x y) d -> b (h d) x y", x=x.shape[2]))


FILTERED = "convolves the queries and keys and values after their projection, each channel by itself"


def test_what_is_convolved_channel_by_channel_has_the_channels_of_what_it_makes() -> None:
    torch.manual_seed(0)
    module, x = ChannelByChannel(), torch.randn(2, E, 3, 5)
    (attention,) = attentions(module, x)
    assert_true(attention)
    axes = attention.axes()
    assert axes["query"] == "batch embed query_1 query_2"
    assert axes["q_proj"] == "batch (qkv heads head_dim) query_1 query_2"
    told = mha_inspect.trace(module, x).attentions[0]
    assert (told.kind, told.stages[6].formula) == (("self",), "q_proj in heads, then convolution")
    rows = {row.name: row for row in mha_inspect.params(module, x, per_head=True).parameters}
    assert rows["qkv.weight"].role == f"W_q, W_k, W_v stacked: rows 0–{H * D - 1}, {H * D}–{2 * H * D - 1}, " + (
        f"{2 * H * D}–{3 * H * D - 1}"
    )
    near = rows["near.weight"]
    assert (near.axes, near.role) == ("(qkv heads head_dim) 1 3 3", FILTERED)
    assert [piece.rows for piece in near.heads or ()] == [(at, at + D) for at in range(0, 3 * H * D, D)]


class TokenAsItIs(nn.Module):
    """RvT: the queries are projected, but for the class token, which is a query as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H * D)
        self.q, self.k, self.v, self.o = (nn.Linear(H * D, H * D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q = torch.cat((x[:, :1], self.q(x[:, 1:]).tanh()), 1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=H) for t in (q, self.k(x), self.v(x)))
        return self.o(rearrange(attend(q, k, v), "b h n d -> b n (h d)"))


def test_a_class_token_that_is_not_projected_has_no_projection_from_outside() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(E, H * D), TokenAsItIs()), torch.randn(B, N, E)
    (told,) = mha_inspect.trace(module, x).attentions
    assert (told.kind, told.num_heads, told.qk_norm) == (("self",), H, None)
    roles = {row.name: row.role for row in mha_inspect.params(module, x).parameters}
    assert roles["1.q.weight"] == f"W_q: rows are the heads stacked, {D} each"
    assert roles["0.weight"] == "Linear"
