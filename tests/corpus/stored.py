"""Modules that a file of weights is read for."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

HEAD_DIM, HEADS = 8, 6
WIDTH = HEAD_DIM * HEADS


class Attention(nn.Module):
    def __init__(self, make: Any, bias: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = make(24, 72, bias), make(24, 24, bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (u.unflatten(-1, (4, 6)).transpose(1, 2) for u in self.c_attn(x).chunk(3, -1))
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(context.transpose(1, 2).flatten(2))


class Separate(nn.Module):
    """Queries, keys and values with square weights of their own."""

    kv_width = 24

    def __init__(self, make: Any, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.o_proj = make(24, 24, bias), make(24, 24, bias)
        self.k_proj, self.v_proj = make(24, self.kv_width, bias), make(24, self.kv_width, bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, 6)).transpose(1, 2) for part in parts)
        return self.o_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Grouped(Separate):
    """Four query heads and two key heads of 6 features; as a mistake, the key heads are not repeated."""

    kv_width = 12


class FeedForward(nn.Module):
    def __init__(self, make: Any, bias: bool) -> None:
        super().__init__()
        self.c_fc, self.c_proj = make(24, 96, bias), make(96, 24, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x).relu())


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


def linear(inner: int, outer: int, bias: bool) -> nn.Module:
    return nn.Linear(inner, outer, bias)


class Model(nn.Module):
    """Blocks, with a head that is a Linear in every layout."""

    def __init__(self, kind: Any = Attention, layers: int = 2, make: Any = linear, bias: bool = True) -> None:
        super().__init__()
        blocks = (Block(kind(make, bias), FeedForward(make, bias)) for _ in range(layers))
        self.h, self.lm_head = nn.ModuleList(blocks), nn.Linear(24, 30, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class Apart(nn.Module):
    """Attention with a projection for each of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        projected = (side(x) for side in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (side.unflatten(-1, (4, -1)).transpose(1, 2) for side in projected)
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
