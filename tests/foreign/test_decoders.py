"""Attention in decoders with recurrences, over stripes, and of softmaxes that say where and not what."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import params, trace

WIDTH, HEADS, HEAD_DIM = 12, 3, 4


class General(nn.Module):
    """Luong's general score: queries are projected, keys are the memory as it is, and the context meets its query."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.joined = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        context = torch.bmm((self.score(x) @ memory.mT).softmax(-1), memory)
        return torch.tanh(self.joined(torch.cat([context, x], -1)))


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


class Stripes(nn.Module):
    """Some heads see rows of an image, the others columns: two attentions, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, made: Tensor, rows: int, columns: int) -> Tensor:
        batch, height, width, _ = made.shape
        pieces = made.view(batch, height // rows, rows, width // columns, columns, 3, 1, 6)
        q, k, v = pieces.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(3, -1, 1, rows * columns, 6)
        context = (q @ k.mT * 6**-0.5).softmax(-1) @ v
        context = context.view(batch, height // rows, width // columns, rows, columns, 6)
        return context.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, 6)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.qkv(x).unflatten(-1, (3, 2, 6))
        by_row, by_column = (halves[..., half, :].flatten(-2) for half in range(2))
        return self.o(torch.cat([self.attend(by_row, 2, x.shape[2]), self.attend(by_column, x.shape[1], 2)], -1))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, HEADS, HEAD_DIM).transpose(1, 2)

    def weights(self, x: Tensor) -> Tensor:
        return (self.split(self.q(x)) @ self.split(self.k(x)).mT / 2).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.weights(x) @ self.split(self.v(x))).transpose(1, 2).flatten(2))


class InPlace(Heads):
    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, HEADS, HEAD_DIM).transpose_(1, 2)


class NormedByBatch(Heads):
    """Weights are mixed by head and go through a batch norm, a channel of it each head (DeepViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(HEADS, HEADS, 1), nn.BatchNorm2d(HEADS)

    def weights(self, x: Tensor) -> Tensor:
        return self.norm(self.mix(super().weights(x)))


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


def test_a_decoders_queries_cross_to_the_memory() -> None:
    module, (x, memory) = General(), given()
    (one,) = trace(module, x, memory).attentions
    assert (one.kind, one.num_heads) == (("cross",), 1)
    stages = {stage.name: stage.axes for stage in one.stages}
    assert "concat" not in stages  # what the context is put beside is its query, and no other head
    assert (stages["k_heads"], stages["context"]) == ("batch key head_dim", "batch query head_dim")
    assert not any("W_o" in one.role for one in params(module, x, memory).parameters)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
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


def test_heads_that_see_other_stripes_are_two_attentions() -> None:
    first, second = trace(Stripes(), torch.randn(2, 4, 6, WIDTH)).attentions
    assert (first.num_heads, second.num_heads) == (1, 1)
    assert [stage.shape for one in (first, second) for stage in one.stages if stage.name == "weights"] == [
        (4, 1, 12, 12),
        (6, 1, 8, 8),
    ]


@pytest.mark.parametrize("kind", [InPlace, NormedByBatch])
def test_heads_are_found_as_those_of_the_plain_layer(kind: type[Heads]) -> None:
    (x, _), module, plain = given(), kind().eval(), Heads().eval()
    (one,), (other,) = (trace(own, x).attentions for own in (module, plain))
    axes = {stage.name: (stage.shape, stage.axes) for stage in other.stages}
    assert {stage.name: (stage.shape, stage.axes) for stage in one.stages} == axes
    if kind is InPlace:
        formulas = {stage.name: stage.formula for stage in one.stages}
        assert formulas == {stage.name: stage.formula for stage in other.stages}


def test_what_counts_projections_has_a_dimension_of_its_own() -> None:
    (one,) = trace(PackedApart(), given()[0]).attentions
    stages = {stage.name: stage.axes for stage in one.stages}
    assert stages["q_proj"] == "qkv batch heads query head_dim"
