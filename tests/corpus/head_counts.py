"""Modules of any number of heads, which compare-heads runs."""

from __future__ import annotations

import math
import time

import torch
from torch import nn

DIM, BATCH, LENGTH = 30, 3, 7


class Attention(nn.Module):
    """Takes what a test varies: a mask, and whether W_q learns."""

    def __init__(self, dim=DIM, n_head=1, mask=None, frozen=False):
        super().__init__()
        self.heads, self.mask = n_head, mask
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.register_buffer("ones", torch.ones(dim))
        self.q.requires_grad_(not frozen)

    def weights(self, x):
        q, k = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.mask is not None:
            scores = scores.masked_fill(self.mask, -math.inf)
        return scores.softmax(-1)

    def forward(self, x):
        v = self.v(x * self.ones).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        context = self.weights(x) @ v
        return self.o(context.transpose(1, 2).flatten(2))


CAUSAL = torch.ones(LENGTH, LENGTH).triu(1) > 0


class Writing(Attention):
    """Writes into what it was given."""

    def forward(self, x):
        output = super().forward(x)
        x.mul_(2)
        return output


class Noisy(Attention):
    """Adds noise of its own, in eval mode as well."""

    def forward(self, x):
        return super().forward(x) + torch.rand(())


class CausalOfMany(Attention):
    """A fault: only more than two heads are masked."""

    def weights(self, x):
        self.mask = CAUSAL if self.heads > 2 else None
        return super().weights(x)


class BestKeys(Attention):
    """No fault: each head keeps the best keys of its own scores."""

    def weights(self, x):
        q, k = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        least = scores.topk(3, -1).values[..., -1:]
        return scores.masked_fill(scores < least, -math.inf).softmax(-1)


class Stack(nn.Module):
    def __init__(self, heads, mask, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(DIM, heads, mask) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Slow(nn.Module):
    """Takes longer the more heads it has."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(6, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 * (self.heads - 1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
