"""Attention with fewer key and value heads than query heads, and rotary positions, as in LLaMA."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def rotate_half(x: Tensor) -> Tensor:
    """Return (-x2, x1) for (x1, x2), the halves of the last dimension."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotary_positions(x: Tensor, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position · base^(-2i / head_dim), each `position head_dim`.

    x is `batch heads position head_dim`. The angles are computed in float32 or finer: in bfloat16 positions 257 and 258
    are equal. Source: https://arxiv.org/abs/2104.09864, with the two features of a pair head_dim / 2 apart as in LLaMA.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    head_dim = x.shape[-1]
    inv_freq = base ** -(torch.arange(0, head_dim, 2, dtype=dtype, device=x.device) / head_dim)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=dtype, device=x.device), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def apply_rotary(x: Tensor) -> Tensor:
    """Rotate each pair of features (i, i + head_dim / 2) of `batch heads position head_dim` by its position's angle."""
    cos, sin = rotary_positions(x)
    return (x * cos) + (rotate_half(x) * sin)


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """Repeat each head n_rep times in a row: `batch kv_heads key head_dim -> batch (kv_heads n_rep) key head_dim`."""
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


class GroupedQueryAttention(nn.Module):
    """concat(head_1 … head_h) W_o, head_i = softmax(q_i k_gᵀ / √head_dim) v_g, with g = i // (heads / kv_heads).

    Key/value head g is shared by a group of query heads. With `rope` queries and keys are rotated by position first.
    Source of the style: https://arxiv.org/abs/2305.13245 and the attention of LLaMA.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        rope: bool = False,
        attention_dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.num_key_value_groups = num_heads // num_key_value_heads
        self.head_dim = head_dim
        self.scaling = head_dim**-0.5
        self.rope = rope
        self.attention_dropout = attention_dropout
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, mask added: `batch query embed, batch key embed -> batch query embed, batch heads query key`."""
        batch, query_len, _ = hidden_states.shape
        states = hidden_states if key_value_states is None else key_value_states
        of_keys = (batch, states.shape[1], self.num_key_value_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(batch, query_len, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.k_proj(states).view(of_keys).transpose(1, 2)
        value = self.v_proj(states).view(of_keys).transpose(1, 2)
        if self.rope:
            query, key = apply_rotary(query), apply_rotary(key)
        key = repeat_kv(key, self.num_key_value_groups)
        value = repeat_kv(value, self.num_key_value_groups)

        attn_weights = torch.matmul(query, key.transpose(2, 3)) * self.scaling
        if attention_mask is not None:
            attn_weights = attn_weights + attention_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_weights = nn.functional.dropout(attn_weights, p=self.attention_dropout, training=self.training)
        attn_output = torch.matmul(attn_weights, value)
        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.reshape(batch, query_len, -1)
        return self.o_proj(attn_output), attn_weights if output_attentions else None
