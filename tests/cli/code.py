"""The text of an attention of one's own, from which the files of several tests begin."""

from __future__ import annotations

ATTENTION = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, embed_dim=16, num_heads=2):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        weights = (q @ k.mT / self.head_dim**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))
"""
