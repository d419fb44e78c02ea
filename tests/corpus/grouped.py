"""Fewer heads of keys and values than of queries."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Base
from .entry import OUTPUT, D, E, H, attends, linears

GROUPED = ("self", "grouped")


@attends(
    kv_heads=1, kind=GROUPED, axes={"k_heads": "batch kv_heads key head_dim", "v_heads": "batch kv_heads key head_dim"}
)
class FusedGrouped(Base):
    kv_heads = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@attends(kv_heads=1, kind=GROUPED, twin="FusedGrouped")
class RepeatInterleave(Base):
    kv_heads = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k.repeat_interleave(H, dim=1), v.repeat_interleave(H, dim=1))


@attends(heads=6, kv_heads=2, kind=GROUPED)
class Grouped(nn.Module):
    """Six query heads, two for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(E, 6 * D), nn.Linear(E, 2 * D), nn.Linear(E, 2 * D)
        self.o = nn.Linear(6 * D, E)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, -1, D).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(b, n, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1)
        return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


@attends(
    heads=6,
    kv_heads=3,
    kind=GROUPED,
    rows=OUTPUT | linears(qkv="qkv: heads head_dim | kv_heads head_dim | kv_heads head_dim"),
)
class GroupedSliced(nn.Module):
    """Phi-3: slices of one product, and those of the queries twice as wide as those of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(E, 4 * H * D), nn.Linear(2 * H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        qkv, w = self.qkv(x), H * D
        pieces = qkv[..., : 2 * w], qkv[..., 2 * w : 3 * w], qkv[..., 3 * w :]
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in pieces)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


@attends(
    kv_heads=1,
    kind=GROUPED,
    split="batch (query heads) head_dim",
    pairs="batch (query heads) key",
    axes={
        "k_proj": "batch key (packed head_dim)",
        "v_proj": "batch key (packed head_dim)",
        "k_heads": "batch key head_dim",
        "v_heads": "batch key head_dim",
    },
    rows=linears(q="q: (heads head_dim) embed", o="o: embed (heads head_dim)"),
    partly=("k.weight", "k.bias", "v.weight", "v.bias"),
    findings=frozenset({"parameters"}),
)
class OneKeyHead(Base):
    """Multi-query as GPT-BigCode has it: the query heads stand in the rows of one product."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        k, v = self.k(x)[..., :D], self.v(x)[..., :D]
        q = self.q(x).view(b, n * H, D)
        weights = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)).softmax(-1)
        return self.o(torch.bmm(weights, v).view(b, n, H * D))
