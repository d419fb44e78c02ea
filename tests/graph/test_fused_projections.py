"""One matrix for queries, keys and values: each side's stage is the piece that the module itself takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mha_inspect

B, N, E, H, D = 2, 7, 12, 3, 5

Cut = Callable[[Tensor, Sequence[int]], Sequence[Tensor]]


def at(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:place]) for place in range(len(sizes))]


CUTS: dict[str, Cut] = {
    "split": lambda projected, sizes: projected.split(list(sizes), dim=-1),
    "narrow": lambda projected, sizes: [
        projected.narrow(-1, start, size) for start, size in zip(at(sizes), sizes, strict=True)
    ],
    "indexing": lambda projected, sizes: [
        projected[..., start : start + size] for start, size in zip(at(sizes), sizes, strict=True)
    ],
    "unbind": lambda projected, sizes: projected.unflatten(-1, (len(sizes), -1)).unbind(-2),
    "select": lambda projected, sizes: [
        projected.unflatten(-1, (len(sizes), -1))[:, :, piece] for piece in range(len(sizes))
    ],
}


class OneHead(nn.Module):
    """One head: the pieces are multiplied as they are."""

    def __init__(self, cut: Cut, bias: bool, order: str = "qkv") -> None:
        super().__init__()
        self.cut, self.order = cut, order
        self.fused, self.out = nn.Linear(E, 3 * E, bias=bias), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        pieces = dict(zip(self.order, self.cut(self.fused(x), (E, E, E)), strict=True))
        weights = (pieces["q"] @ pieces["k"].mT / E**0.5).softmax(-1)
        return self.out(weights @ pieces["v"])


class MultiQuery(nn.Module):
    """All heads share one key and value head, which nothing reshapes; the rows of `more` are a feed-forward layer's."""

    def __init__(self, cut: Cut, bias: bool, more: int = 0) -> None:
        super().__init__()
        self.cut = cut
        self.sizes = [H * D, D, D, more][: 4 if more else 3]
        self.fused, self.out = nn.Linear(E, sum(self.sizes), bias=bias), nn.Linear(H * D, E)
        self.down = nn.Linear(more, E) if more else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, *inner = self.cut(self.fused(x), self.sizes)
        q = q.unflatten(-1, (H, D)).transpose(1, 2) * D**-0.5
        weights = torch.einsum("bhqd,bkd->bhqk", q, k).softmax(-1)
        attended = self.out(torch.einsum("bhqk,bkd->bhqd", weights, v).transpose(1, 2).flatten(2))
        return attended if self.down is None else attended + self.down(inner[0].relu())


class Convolved(nn.Module):
    """One head of an image: the features are in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Conv2d(E, 3 * E, 1), nn.Conv2d(E, E, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (piece.flatten(2) for piece in self.fused(x).chunk(3, dim=1))
        weights = (q.mT @ k / E**0.5).softmax(-1)
        return self.out((v @ weights.mT).reshape(x.shape))


def traced(module: nn.Module, *inputs: Tensor):
    with torch.no_grad():
        (attention,) = mha_inspect.trace(module, *inputs, keep=True).attentions
    return attention


def stage(attention, name: str) -> Tensor:
    return next(stage.tensor for stage in attention.stages if stage.name == name)


def assert_pieces(attention, pieces: Sequence[Tensor], order: str = "qkv") -> None:
    for side, piece in zip(order, pieces, strict=True):
        assert torch.equal(stage(attention, f"{side}_proj"), piece), side


@pytest.mark.parametrize(("cut", "bias", "order"), [*((cut, True, "kvq") for cut in CUTS), ("narrow", False, "qkv")])
def test_a_side_of_one_head_has_the_piece_that_it_multiplies(cut: str, bias: bool, order: str) -> None:
    module, x = OneHead(CUTS[cut], bias, order), torch.randn(B, N, E)
    pieces = module.fused(x).detach().split(E, dim=-1)
    assert_pieces(traced(module, x), pieces, order)


@pytest.mark.parametrize(("cut", "bias", "more"), [("split", True, 0), ("narrow", False, 11), ("indexing", True, 11)])
def test_a_side_of_multi_query_attention_has_its_own_piece(cut: str, bias: bool, more: int) -> None:
    module, x = MultiQuery(CUTS[cut], bias, more), torch.randn(B, N, E)
    pieces = module.fused(x).detach().split(module.sizes, dim=-1)
    assert_pieces(traced(module, x), pieces[:3])


def test_a_side_of_a_convolution_has_the_channels_that_it_multiplies() -> None:
    module, x = Convolved(), torch.randn(B, E, N, 4)
    attention = traced(module, x)
    assert_pieces(attention, module.fused(x).detach().split(E, dim=1))
    assert attention.stages[3].axes == "batch (heads head_dim) query_1 query_2"


@pytest.mark.parametrize("module", [OneHead(CUTS["split"], True), MultiQuery(CUTS["split"], False)])
def test_the_flops_of_the_pieces_are_those_of_the_whole_matrix(module: nn.Module) -> None:
    x = torch.randn(B, N, E)
    with FlopCounterMode(display=False) as counter:
        module(x)
    assert sum(stage.flops for stage in traced(module, x).stages) == counter.get_total_flops()
