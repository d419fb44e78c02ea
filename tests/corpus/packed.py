"""One matrix for several of query, key and value."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import Base
from .entry import OUTPUT, D, E, H, attends, linears


@attends(projected="batch token (qkv heads head_dim)", rows=OUTPUT | linears(qkv="qkv: (qkv heads head_dim) embed"))
class Packed(Base):
    """timm: one product, three pieces along an axis of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        return self.o((((q * D**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, H * D))


@attends(projected="batch token (heads qkv head_dim)", rows=OUTPUT | linears(qkv="qkv: (heads qkv head_dim) embed"))
class Interleaved(Packed):
    """GPT-NeoX: each head's query, key and value side by side."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], H, 3 * D).transpose(1, 2).chunk(3, dim=-1)
        return self.o(self.join(self.attend(q, k, v)))


@attends(rows=OUTPUT | {"weight": "qkv: embed (qkv heads head_dim)", "bias": "qkv: (qkv heads head_dim)"})
class Conv1D(Packed):
    """GPT-2: rows put into one dimension, a matrix the other way round, and a split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(E, 3 * H * D)), nn.Parameter(torch.randn(3 * H * D))

    def forward(self, x: Tensor) -> Tensor:
        qkv = torch.addmm(self.bias, x.view(-1, E), self.weight).view(*x.shape[:2], -1)
        q, k, v = map(self.split, qkv.split(H * D, dim=2))
        return self.o(self.join(self.attend(q, k, v)))


@attends(rows=OUTPUT | linears(qkv="qkv: (qkv heads head_dim) embed"))
class Sliced(Packed):
    """Query, key and value as slices of what one product gives."""

    def forward(self, x: Tensor) -> Tensor:
        qkv, w = self.qkv(x), H * D
        return self.o(self.join(self.attend(*map(self.split, (qkv[..., :w], qkv[..., w : 2 * w], qkv[..., 2 * w :])))))


@attends(rows=OUTPUT | linears(q="q: (heads head_dim) embed", kv="kv: (kv heads head_dim) embed"))
class PackedKeyValue(Base):
    """Perceiver: a projection for the queries, one for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(E, 2 * H * D)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        k, v = self.kv(x if y is None else y).chunk(2, dim=-1)
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), k, v)))))


@attends(
    head_dim=D + 2,
    value_dim=4,
    axes={"k_proj": "batch key (heads packed)", "v_proj": "batch key (heads packed)"},
    partly=("kv_b.weight", "kv_b.bias", "q_b.bias"),
    rows={"q_b.weight": "q: (heads head_dim) latent", "o.weight": "o: embed (heads v_head_dim)"},
)
class LowRank(Base):
    """Multi-latent attention: queries, and keys with values, go through something narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Linear(E, 7), nn.LayerNorm(7), nn.Linear(7, H * (D + 2))
        self.kv_a, self.kv_norm, self.kv_b = nn.Linear(E, 9 + 2), nn.LayerNorm(9), nn.Linear(9, H * (D + 4))
        self.o = nn.Linear(H * 4, E)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (H, D + 2)).transpose(1, 2)
        latent, k_rot = self.kv_a(x).split([9, 2], dim=-1)
        k, v = self.kv_b(self.kv_norm(latent)).unflatten(-1, (H, D + 4)).transpose(1, 2).split([D, 4], dim=-1)
        k = torch.cat((k, k_rot.unsqueeze(1).expand(-1, H, -1, -1).cos()), dim=-1)
        return self.o(self.join((q @ k.transpose(-1, -2) / math.sqrt(D + 2)).softmax(-1) @ v))
