"""Queries and keys that something else makes: recurrences, convolutions, packed parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import params, trace

WIDTH, HEADS, HEAD_DIM = 12, 3, 4


class Recurrent(nn.Module):
    """A decoder's steps attend to an encoder's."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.encoder, self.decoder = (kind(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        keys, queries = self.encoder(memory)[0], self.decoder(x)[0]
        return torch.einsum("bqd,bkd->bqk", queries, keys).softmax(2) @ keys


class Places(nn.Module):
    """The mean place of what is alike: matching, and no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        alike = self.features(x) @ self.features(memory).mT
        return alike.softmax(-1) @ torch.linspace(0, 1, memory.shape[1])[:, None]


class PackedApart(nn.Module):
    """One product gives queries, keys and values, which are counted along a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = (
            nn.Parameter(torch.randn(3, WIDTH, HEADS, HEAD_DIM)),
            nn.Parameter(torch.randn(HEADS, HEAD_DIM, WIDTH)),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bne,tehd->tbhnd", x, self.qkv)
        return torch.einsum("bhnd,hde->bne", (q @ k.mT / 2).softmax(-1) @ v, self.o)


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 7, WIDTH), torch.randn(2, 9, WIDTH)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_step_of_a_recurrence_is_no_projection(kind: type[nn.Module]) -> None:
    module, (x, memory) = Recurrent(kind), given()
    (attention,) = trace(module, x, memory).attentions
    assert (attention.kind, attention.num_heads, attention.head_dim) == (("cross",), 1, WIDTH)
    stages = {stage.name: stage.axes for stage in attention.stages}
    assert stages["q_heads"] == "batch query head_dim"
    assert stages["v_heads"] == "batch key head_dim"
    assert not {"q_proj", "k_proj", "v_proj"} & set(stages)


def test_a_mean_of_what_nobody_gave_or_learned_is_no_attention() -> None:
    x, memory = given()
    assert trace(Places(), x, memory).attentions == ()


def test_what_counts_projections_has_a_dimension_of_its_own() -> None:
    (attention,) = trace(PackedApart(), given()[0]).attentions
    stages = {stage.name: stage.axes for stage in attention.stages}
    assert stages["q_proj"] == "qkv batch heads query head_dim"


class Reduced(nn.Module):
    """Fewer keys than queries, by a convolution before W_k and W_v (SegFormer, CvT) or as W_k and W_v (PVT)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.q, self.o = kind, nn.Linear(12, 12), nn.Linear(12, 12)
        self.few = nn.Conv2d(12, 24 if kind == "as" else 12, 2, 2, groups=12 if kind == "by channel" else 1)
        self.norm, self.kv = nn.LayerNorm(12), nn.Linear(12, 24)

    def forward(self, x: Tensor) -> Tensor:
        few = self.few(x.mT.unflatten(2, (4, 6))).flatten(2).mT
        k, v = (few if self.kind == "as" else self.kv(self.norm(few))).chunk(2, -1)
        q, k, v = (side.unflatten(-1, (3, 4)).transpose(1, 2) for side in (self.q(x), k, v))
        return self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["before", "by channel", "as"])
def test_keys_that_a_convolution_makes_fewer_say_so(kind: str) -> None:
    module, x = Reduced(kind), torch.randn(2, 24, 12)
    formulas = {stage.name: stage.formula for stage in trace(module, x).attentions[0].stages}
    rows = {row.name: row for row in params(module, x, per_head=True).parameters}
    few = rows["few.weight"]
    if kind == "as":
        assert (few.axes, few.role) == ("(kv heads head_dim) embed 2 2", "W_k, W_v stacked: rows 0–11, 12–23")
        assert [(piece.part, piece.head, piece.rows) for piece in few.heads or ()] == [
            (part, head, (start + 4 * head, start + 4 * head + 4))
            for part, start in (("W_k", 0), ("W_v", 12))
            for head in range(3)
        ]
    else:
        assert (formulas["key"], formulas["value"]) == ("the query, then convolution, native_layer_norm", "the key")
        roles = {rows[name].role for name in ("few.weight", "few.bias", "norm.weight", "norm.bias")}
        assert roles == {"used before the projection to the keys and values"}
