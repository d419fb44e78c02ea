"""Attention as people write it, for the tests of targets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

print("styles is being imported")


class Configured(nn.Module):
    """Names the dataclass of its config; causal by a buffer."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.heads = config.n_head
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(config.block_size, config.block_size)))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:t, :t] == 0, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, c))


@dataclass
class GPTConfig:
    block_size: int = 31
    vocab_size: int = 29
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 14
    bias: bool = True


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList([Configured(config) for _ in range(config.n_layer)])

    def forward(self, idx, targets=None):
        t = idx.shape[1]
        x = self.tokens(idx) + self.places(torch.arange(t))
        for block in self.blocks:
            x = x + block(x)
        return x, targets


class Tutorial(nn.Module):
    """Three inputs in another order, and a mask that is needed and may be None."""

    def __init__(self, d_model, h, dropout=0.1):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, values, keys, query, mask):
        n = query.size(0)
        q, k, v = (
            linear(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for linear, x in zip(self.linears, (query, keys, values), strict=False)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.linears[-1]((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, -1, self.h * self.d_k))


class Cross(nn.Module):
    def __init__(self, query_dim: int, context_dim: int = 11, heads: int = 1):
        super().__init__()
        self.q = nn.Linear(query_dim, 6)
        self.kv = nn.Linear(context_dim, 12)

    def forward(self, x, context=None):
        k, v = self.kv(x if context is None else context).chunk(2, dim=-1)
        return (self.q(x) @ k.mT / 6**0.5).softmax(-1) @ v


class Lazy(nn.Module):
    def __init__(self, num_hiddens: int, num_heads: int):
        super().__init__()
        self.q, self.k, self.v = (nn.LazyLinear(num_hiddens) for _ in range(3))

    def forward(self, queries, keys, values, valid_lens):
        return (self.q(queries) @ self.k(keys).mT).softmax(-1) @ self.v(values)


class Matrices(nn.Module):
    """No names that tell anything: matrices of its own."""

    def __init__(self, size: int = 13):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(size, 7)) for _ in range(3))

    def forward(self, data):
        return torch.softmax(data @ self.wq @ (data @ self.wk).mT, -1) @ (data @ self.wv)


class Tokens(nn.Module):
    """`x` that turns out to be token ids."""

    def __init__(self, n_tokens: int = 29):
        super().__init__()
        self.table = nn.Embedding(n_tokens, 12)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x):
        h = self.table(x)
        return self.attention(h, h, h)[0]


class Picture(nn.Module):
    """`x` that turns out to be an image."""

    def __init__(self, in_chans: int = 5, heads: int = 2):
        super().__init__()
        self.qkv = nn.Conv2d(in_chans, 18, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        q, k, v = self.qkv(x).reshape(b, 3, 6, h * w).unbind(1)
        return v @ (q.mT @ k).softmax(-1).mT


class Needy(nn.Module):
    """Needs what nothing tells."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x, angles):
        q = self.linear(x) * angles
        return (q @ q.mT).softmax(-1) @ q


class Stepping(nn.Module):
    def __init__(self, dim: int = 8):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x, start_pos: int):
        q = self.linear(x) * (start_pos + 1)
        return (q @ q.mT).softmax(-1) @ q


class Refusing(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        assert dim % heads == 0


class Plain:
    """No module."""


class Failing(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        print("about to fail")
        return self.linear(x) @ self.linear(x)


def make(depth: int = 1) -> nn.Module:
    return nn.Sequential(*[Configured(GPTConfig()) for _ in range(depth)])


def make_nothing(depth: int = 1):
    return depth


def attention(query, key, value, mask=None):
    return (query @ key.mT).softmax(-1) @ value


SETTINGS = {"n_embd": 10, "n_head": 5, "block_size": 17, "bias": False}


class FromDict(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inner = Configured(GPTConfig(n_embd=cfg["n_embd"], n_head=cfg["n_head"], bias=cfg["bias"]))

    def forward(self, x):
        return self.inner(x)


ready = make()


class Spectrogram(nn.Module):
    """`x` that turns out to be rows of sound, as in speech."""

    def __init__(self, bins: int = 20):
        super().__init__()
        self.conv, self.attention = nn.Conv1d(bins, 12, 3, padding=1), nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x):
        h = self.conv(x).transpose(1, 2)
        return self.attention(h, h, h)[0]


class Pooled(nn.Module):
    """Two widths, of which the second may be left out, as in CLIP."""

    def __init__(self, spacial_dim: int, embed_dim: int, num_heads: int, output_dim: int | None = None):
        super().__init__()
        self.places = nn.Parameter(torch.zeros(spacial_dim**2 + 1, embed_dim))
        self.attention = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)
        self.out = nn.Linear(embed_dim, output_dim or embed_dim)

    def forward(self, x):
        return self.out(self.attention(x, x, x)[0])
