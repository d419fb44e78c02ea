"""Layers of one code, of which one may be wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .planted import E, N, Right, halves

TRIANGLE = torch.ones(N, N).triu(1).bool()


class Layer(Right):
    """Attention of a block; the options are right or wrong, on the same lines."""

    def __init__(
        self,
        dim: int = -1,
        hidden: Tensor | None = None,
        query_offset: int | None = None,
        fill: float = -torch.inf,
    ) -> None:
        super().__init__()
        self.dim, self.query_offset, self.fill = dim, query_offset, fill
        self.norm = nn.LayerNorm(E)
        self.register_buffer("hidden", hidden)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        self.bias = bias
        return x + super().forward(self.norm(x))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return (q, k, v) if self.query_offset is None else (halves(q, self.query_offset), halves(k), v)

    def mask(self, scores: Tensor) -> Tensor:
        scores = scores if self.hidden is None else scores.masked_fill(self.hidden, self.fill)
        return scores if self.bias is None else scores + self.bias

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(self.dim)


class Stack(nn.Module):
    """Layers in a row, which share a bias that is computed once."""

    def __init__(self, *layers: Layer, is_biased: bool = False) -> None:
        super().__init__()
        self.layers, self.is_biased = nn.ModuleList(layers), is_biased

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = -(places[:, None] - places[None]).abs().float() if self.is_biased else None
        for layer in self.layers:
            x = layer(x, bias)
        return x


def over_queries() -> Layer:
    return Layer(dim=-2)


def rotary() -> Layer:
    return Layer(query_offset=0)


def rotary_offset() -> Layer:
    return Layer(query_offset=1)


def masked() -> Layer:
    return Layer(hidden=TRIANGLE)


def masked_throughout() -> Layer:
    return Layer(hidden=torch.ones(N, N).bool(), fill=-1e9)


def weakly_masked() -> Layer:
    return Layer(hidden=TRIANGLE, fill=1e-9)
