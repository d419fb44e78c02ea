"""BERT's self-attention, without an output projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class BertSelfAttention(nn.Module):
    """concat(head_1 … head_h) with head_i = softmax(q_i k_iᵀ / √attention_head_size + attention_mask) v_i.

    There is no W_o: BERT has it in the next layer (BertSelfOutput). The mask is 0, or the lowest number of the dtype
    for masked-out keys. Keys and values come from encoder_hidden_states in cross-attention. Source of the style:
    BertSelfAttention in Hugging Face transformers and in google-research/bert.
    """

    def __init__(
        self, hidden_size: int, num_attention_heads: int, attention_probs_dropout_prob: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(hidden_size, self.all_head_size, bias=bias)
        self.key = nn.Linear(hidden_size, self.all_head_size, bias=bias)
        self.value = nn.Linear(hidden_size, self.all_head_size, bias=bias)
        self.dropout = nn.Dropout(attention_probs_dropout_prob)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """Split heads: `... seq (heads head_dim) -> ... heads seq head_dim`."""
        x = x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size)
        return x.transpose(-3, -2)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: `... query hidden, ... key hidden -> ... query hidden, ... heads query key`; a batch is optional."""
        key_states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(key_states))
        value_layer = self.transpose_for_scores(self.value(key_states))

        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        attention_probs = self.dropout(attention_probs)

        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.transpose(-3, -2).contiguous()
        context_layer = context_layer.view(*context_layer.shape[:-2], self.all_head_size)
        return context_layer, attention_probs if output_attentions else None
