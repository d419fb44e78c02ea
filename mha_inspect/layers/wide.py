"""Attention whose every head is as wide as the embedding: the parameters grow with the heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .per_head import masked


class WideAttention(nn.Module):
    """concat(head_1 … head_h) W_o, head_i = softmax(q_i k_iᵀ / √k) v_i, every head with k = emb features of its own.

    Queries and keys are each divided by k^¼ before the product, which takes less memory than dividing the product.
    Source of the style: "wide" self-attention in Peter Bloem's https://peterbloem.nl/blog/transformers.
    """

    def __init__(self, emb: int, heads: int, head_dim: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.k = head_dim
        self.toqueries = nn.Linear(emb, heads * self.k, bias=bias)
        self.tokeys = nn.Linear(emb, heads * self.k, bias=bias)
        self.tovalues = nn.Linear(emb, heads * self.k, bias=bias)
        self.unifyheads = nn.Linear(heads * self.k, emb, bias=bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: `batch query embed, batch key embed, batch key embed -> batch query embed, batch heads query key`."""
        b, t, h, k = query.size(0), query.size(1), self.heads, self.k
        queries = self.toqueries(query).view(b, t, h, k)
        keys = self.tokeys(key).view(b, -1, h, k)
        values = self.tovalues(value).view(b, -1, h, k)

        queries = queries.transpose(1, 2) / (k ** (1 / 4))
        keys = keys.transpose(1, 2) / (k ** (1 / 4))
        values = values.transpose(1, 2)

        weights = torch.softmax(masked(queries @ keys.transpose(2, 3), mask), dim=3)
        out = (weights @ values).transpose(1, 2).contiguous().view(b, t, h * k)
        return self.unifyheads(out), weights if need_weights else None
