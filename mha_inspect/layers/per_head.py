"""The formula of "Attention Is All You Need", word for word: own matrices for every head, and a loop."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return Attention(Q, K, V) = softmax(Q Kᵀ / √d_k) V, equation 1 of the paper, and its weights.

    `... query d_k, ... key d_k, ... key d_v -> ... query d_v, ... query key`. Masked-out scores are set to -inf before
    the softmax (section 3.2.3).
    """
    weights = masked(q @ k.transpose(-2, -1) / math.sqrt(k.size(-1)), mask).softmax(dim=-1)
    return weights @ v, weights


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Return the scores with a mask applied: boolean (True: masked out), or additive."""
    if mask is None:
        return scores
    return scores.masked_fill(mask, float("-inf")) if mask.dtype == torch.bool else scores + mask


def mask_of_head(mask: Tensor | None, head: int) -> Tensor | None:
    """Return one head's part of a merged mask: `query key` or `batch query key`; None without a mask."""
    if mask is None or mask.dim() == 2:
        return mask
    return mask.select(-3, head if mask.size(-3) > 1 else 0)


class PerHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1 … head_h) W_o, head_i = Attention(Q W_q_i, K W_k_i, V W_v_i).

    Source of the style: section 3.2.2 of https://arxiv.org/abs/1706.03762. The paper's matrices have no biases; `bias`
    adds them as implementations do.
    """

    def __init__(
        self, d_model: int, num_heads: int, kdim: int | None = None, vdim: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        d_k = d_model // num_heads
        self.W_q = nn.ModuleList(nn.Linear(d_model, d_k, bias=bias) for _ in range(num_heads))
        self.W_k = nn.ModuleList(nn.Linear(kdim or d_model, d_k, bias=bias) for _ in range(num_heads))
        self.W_v = nn.ModuleList(nn.Linear(vdim or d_model, d_k, bias=bias) for _ in range(num_heads))
        self.W_o = nn.Linear(num_heads * d_k, d_model, bias=bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: `... query embed, ... key kdim, ... key vdim -> ... query embed, ... heads query key`."""
        projections = zip(self.W_q, self.W_k, self.W_v, strict=True)
        heads = [
            attention(w_q(query), w_k(key), w_v(value), mask_of_head(mask, i))
            for i, (w_q, w_k, w_v) in enumerate(projections)
        ]
        outputs, weights = zip(*heads, strict=True)
        return self.W_o(torch.cat(outputs, dim=-1)), torch.stack(weights, dim=-3) if need_weights else None
