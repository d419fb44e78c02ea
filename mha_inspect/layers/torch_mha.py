"""`torch.nn.MultiheadAttention`, as PyTorch ships it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..inputs import Inputs
from ..spec import AttentionSpec, RunSpec
from .building import build_seeded


def build(spec: AttentionSpec, device: str = "cpu") -> nn.MultiheadAttention:
    """`torch.nn.MultiheadAttention` with torch's own initialisation, drawn from spec.seed.

    torch starts `in_proj_bias` and `out_proj.bias` at 0, and so does this layer: it is shown as it really is. A mistake
    in a bias therefore does not show in the output of a fresh layer; a test of biases must fill them first.

    No parameter's shape depends on num_heads, so one seed gives the same parameters bit for bit for every head count.
    """
    return build_seeded(
        lambda: nn.MultiheadAttention(
            spec.embed_dim,
            spec.num_heads,
            dropout=spec.dropout,
            bias=spec.bias,
            add_bias_kv=spec.add_bias_kv,
            add_zero_attn=spec.add_zero_attn,
            kdim=spec.kdim,
            vdim=spec.vdim,
            batch_first=spec.batch_first,
        ),
        spec,
        device,
    )


def arguments(inputs: Inputs, run: RunSpec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of its forward: query, key and value, then masks and what to return."""
    return (inputs.query, inputs.key, inputs.value), {
        "key_padding_mask": _padding_like(inputs.key_padding_mask, inputs.attn_mask),
        "need_weights": run.need_weights,
        "attn_mask": inputs.attn_mask,
        "average_attn_weights": run.average_weights,
    }


def _padding_like(padding: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """The padding mask in the attn_mask's kind: torch deprecates a boolean mask beside an additive one."""
    if padding is None or attn_mask is None or attn_mask.dtype == torch.bool:
        return padding
    return torch.zeros_like(padding, dtype=attn_mask.dtype).masked_fill_(padding, float("-inf"))
