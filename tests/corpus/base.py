"""Self-attention with a matrix each for query, key, value and output: most other modules differ from it in one step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .entry import D, E, H, attends


@attends()
class Base(nn.Module):
    """Separate projections; `attend` is what a style writes."""

    kv_heads = H

    def __init__(self, heads: int = H) -> None:
        super().__init__()
        self.heads = heads
        kv = self.kv_heads if heads == H else heads
        self.q, self.o = nn.Linear(E, heads * D), nn.Linear(heads * D, E)
        self.k, self.v = nn.Linear(E, kv * D), nn.Linear(E, kv * D)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, D).transpose(-3, -2)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(-3, -2).flatten(-2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        y = x if y is None else y
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), self.k(y), self.v(y))))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


def angles(n: int, width: int) -> Tensor:
    return torch.outer(torch.arange(n).float(), 10.0 ** -torch.arange(0, width, 2).float())
