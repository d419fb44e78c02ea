"""Positions that are rotated, or added to the scores."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.reports.trace import Position

from .base import Base, angles
from .entry import HEADS_IN_ROWS, D, E, H, attends


def rotary(layout: Literal["half", "interleaved"], dims: int) -> Position:
    return Position("rotary", layout, dims, 0, 0)


@attends(head_dim=6, position=rotary("half", 6))
class RotateHalf(nn.Module):
    """LLaMA's rotary positions; with `part` only the first features of a head are turned."""

    width, part = 6, 6

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, H * self.width) for _ in range(3))
        self.o = nn.Linear(H * self.width, E)

    def rotate(self, x: Tensor) -> Tensor:
        turned, rest = x[..., : self.part], x[..., self.part :]
        both = torch.cat([angles(x.shape[-2], self.part)] * 2, -1)
        half = torch.cat((-turned[..., self.part // 2 :], turned[..., : self.part // 2]), -1)
        turned = turned * both.cos() + half * both.sin()
        return torch.cat((turned, rest), dim=-1) if rest.numel() else turned

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t(x).view(b, n, H, self.width).transpose(1, 2) for t in (self.q, self.k, self.v))
        weights = (self.rotate(q) @ self.rotate(k).transpose(2, 3) * self.width**-0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, -1))


@attends(head_dim=10, position=rotary("half", 4))
class RotatePart(RotateHalf):
    width, part = 10, 4


@attends(head_dim=6, position=rotary("interleaved", 6))
class RotateComplex(RotateHalf):
    """Pairs of features as complex numbers."""

    def rotate(self, x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones(x.shape[-2], self.width // 2), angles(x.shape[-2], self.width))
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)


@attends(head_dim=6, position=rotary("interleaved", 6), twin="RotateComplex")
class RotatePairs(RotateHalf):
    """Every other feature with the next."""

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = angles(x.shape[-2], self.width).cos(), angles(x.shape[-2], self.width).sin()
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


@attends(bias=True, masked=True, position=Position("relative bias"))
class RelativeBias(Base):
    """A bias for each head and distance, out of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, H)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])[None] + 32
        scores = q @ k.transpose(-1, -2) / math.sqrt(D) + self.table(distance).permute(2, 0, 1)
        return scores.softmax(-1) @ v


@attends(
    bias=True,
    masked=True,
    in_scores=1.0,
    position=Position("relative bias"),
    rows=HEADS_IN_ROWS | {"u": "q: heads 1 head_dim"},
)
class RelativeShift(Base):
    """Transformer-XL: a second product with projected positions, shifted into place."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(E, H * D, bias=False)
        self.u = nn.Parameter(torch.randn(H, 1, D))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[-2]
        r = self.split(self.r(torch.linspace(0, 9, (2 * n - 1) * E).sin().view(-1, E)))
        shifted = F.pad(q @ r.transpose(-1, -2), (1, 0)).view(-1, H, 2 * n, n)[:, :, 1:].reshape(-1, H, n, 2 * n - 1)
        return (((q + self.u) @ k.transpose(-1, -2) + shifted[..., :n]) / math.sqrt(D)).softmax(-1) @ v
