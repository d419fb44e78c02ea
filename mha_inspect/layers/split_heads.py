"""Attention that splits heads with view and permute, as in TensorFlow's transformer tutorial."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return softmax(q kᵀ / √depth + mask · -1e9) v, and the weights; the mask is 1 for masked-out keys.

    If every key of a row is masked out, all its scores change by the same number: its weights are finite, unlike with
    -inf.
    """
    matmul_qk = torch.matmul(q, k.transpose(-2, -1))
    scaled_attention_logits = matmul_qk / math.sqrt(k.size(-1))
    if mask is not None:
        scaled_attention_logits = scaled_attention_logits + mask * -1e9
    attention_weights = torch.softmax(scaled_attention_logits, dim=-1)
    output = torch.matmul(attention_weights, v)
    return output, attention_weights


class SplitHeadsAttention(nn.Module):
    """MultiHead(q, k, v) = dense(concat(head_1 … head_h)), each head a slice of wq(q), wk(k), wv(v).

    Source of the style: https://www.tensorflow.org/text/tutorials/transformer (first edition).
    """

    def __init__(self, d_model: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.d_model = d_model
        self.depth = d_model // num_heads
        self.wq = nn.Linear(d_model, d_model, bias=bias)
        self.wk = nn.Linear(d_model, d_model, bias=bias)
        self.wv = nn.Linear(d_model, d_model, bias=bias)
        self.dense = nn.Linear(d_model, d_model, bias=bias)

    def split_heads(self, x: Tensor, batch_size: int) -> Tensor:
        """Split heads: `batch seq (heads depth) -> batch heads seq depth`."""
        x = x.view(batch_size, -1, self.num_heads, self.depth)
        return x.permute(0, 2, 1, 3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attend: `batch query embed, batch key embed, batch key embed -> batch query embed, batch heads query key`."""
        batch_size = q.size(0)
        q = self.split_heads(self.wq(q), batch_size)
        k = self.split_heads(self.wk(k), batch_size)
        v = self.split_heads(self.wv(v), batch_size)

        scaled_attention, attention_weights = scaled_dot_product_attention(q, k, v, mask)
        scaled_attention = scaled_attention.permute(0, 2, 1, 3).contiguous()
        concat_attention = scaled_attention.view(batch_size, -1, self.d_model)
        return self.dense(concat_attention), attention_weights
