"""Attention with heads folded into the batch, as in textbooks: one function serves one head or several."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn

from .per_head import masked


class DotProductAttention(nn.Module):
    """softmax(q kᵀ / √d) v without heads: a batch item is a sequence, or one head of a sequence."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend: `batch query d, batch key d, batch key d -> batch query d, batch query key`."""
        scores = masked(torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(queries.size(-1)), mask)
        weights = torch.softmax(scores, dim=-1)
        return torch.bmm(self.dropout(weights), values), weights


class FoldHeadsAttention(nn.Module):
    """concat(head_1 … head_h) W_o: `batch seq (heads head_dim) -> (batch heads) seq head_dim`, attention, and back.

    The projections are lazy: queries, keys and values may have different widths, and all become num_hiddens wide.
    Source of the style: "Dive into Deep Learning",
    https://d2l.ai/chapter_attention-mechanisms-and-transformers/multihead-attention.html, with its transpose_qkv
    written in einops.
    """

    def __init__(self, num_hiddens: int, num_heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_k = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_v = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_o = nn.LazyLinear(num_hiddens, bias=bias)

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend: `batch query embed, batch key kdim, batch key vdim -> batch query embed, batch heads query key`."""
        fold = "batch seq (heads head_dim) -> (batch heads) seq head_dim"
        projections = ((self.W_q, queries), (self.W_k, keys), (self.W_v, values))
        folded = [rearrange(project(x), fold, heads=self.num_heads) for project, x in projections]
        if mask is not None and mask.dim() == 4:
            mask = mask.expand(queries.size(0), self.num_heads, -1, -1)
            mask = rearrange(mask, "batch heads query key -> (batch heads) query key")

        output, weights = self.attention(*folded, mask)
        concat = rearrange(output, "(batch heads) seq head_dim -> batch seq (heads head_dim)", heads=self.num_heads)
        weights = rearrange(weights, "(batch heads) query key -> batch heads query key", heads=self.num_heads)
        return self.W_o(concat), weights


def make(num_hiddens: int, num_heads: int, kdim: int, vdim: int, dropout: float, bias: bool) -> nn.Module:
    """Return a layer of these sizes without lazy parameters."""
    layer = FoldHeadsAttention(num_hiddens, num_heads, dropout, bias)
    linears = {layer.W_q: num_hiddens, layer.W_k: kdim, layer.W_v: vdim, layer.W_o: num_hiddens}
    # A lazy Linear gets its width from its first call. This call is here, with no rows, so that no trace shows it.
    for linear, width in linears.items():
        linear(torch.empty(0, width))
    return layer
