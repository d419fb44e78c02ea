"""Attention in decoders with recurrences, over stripes, and of softmaxes that say where and not what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import trace

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


class Labels(Places):
    """Each query has the labels of those that it is like: prototypes."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        alike = self.features(x) @ self.features(memory).mT
        return alike.softmax(-1) @ torch.eye(memory.shape[1])


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
    (one,) = trace(module, x, memory).attentions
    assert (one.kind, one.num_heads, one.head_dim) == (("cross",), 1, WIDTH)
    stages = {stage.name: stage.axes for stage in one.stages}
    assert stages["q_heads"] == "batch query head_dim"
    assert stages["v_heads"] == "batch key head_dim"
    assert not {"q_proj", "k_proj", "v_proj"} & set(stages)


@pytest.mark.parametrize("kind", [Places, Labels])
def test_a_mean_of_what_nobody_gave_or_learned_is_no_attention(kind: type[nn.Module]) -> None:
    x, memory = given()
    assert trace(kind(), x, memory).attentions == ()


def test_what_counts_projections_has_a_dimension_of_its_own() -> None:
    (one,) = trace(PackedApart(), given()[0]).attentions
    stages = {stage.name: stage.axes for stage in one.stages}
    assert stages["q_proj"] == "qkv batch heads query head_dim"
