"""Attention that cuts the embedding into slices before any projection, as articles describe it that split the input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .per_head import mask_of_head, masked


class NarrowAttention(nn.Module):
    """concat(head_1 … head_h) W_o, head_i = softmax(q_i k_iᵀ / √s) v_i, with q_i = query[slice i] W_q_i.

    Keys and values are projected from their slices i. Head i reads only s = emb / heads features of the embedding, so
    its matrices are s by s. Multi-head attention is the same if every weight outside of these blocks is zero; PyTorch's
    weights are not. Source of the style: "narrow" self-attention in Peter Bloem's
    https://peterbloem.nl/blog/transformers.
    """

    def __init__(self, emb: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        s = emb // heads
        self.toqueries = nn.ModuleList(nn.Linear(s, s, bias=bias) for _ in range(heads))
        self.tokeys = nn.ModuleList(nn.Linear(s, s, bias=bias) for _ in range(heads))
        self.tovalues = nn.ModuleList(nn.Linear(s, s, bias=bias) for _ in range(heads))
        self.unifyheads = nn.Linear(heads * s, emb, bias=bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: `... query embed, ... key embed, ... key embed -> ... query embed, ... heads query key`."""
        slices = zip(query.chunk(self.heads, -1), key.chunk(self.heads, -1), value.chunk(self.heads, -1), strict=True)
        outputs, weights = [], []
        for i, (query_slice, key_slice, value_slice) in enumerate(slices):
            q, k, v = self.toqueries[i](query_slice), self.tokeys[i](key_slice), self.tovalues[i](value_slice)
            scores = masked(q @ k.transpose(-2, -1) / math.sqrt(k.size(-1)), mask_of_head(mask, i))
            weights.append(scores.softmax(dim=-1))
            outputs.append(weights[-1] @ v)
        return self.unifyheads(torch.cat(outputs, dim=-1)), torch.stack(weights, dim=-3) if need_weights else None
