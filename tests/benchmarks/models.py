"""Models of the sizes that people trace, of torch's modules alone, for this process and for fresh ones."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A block as GPT-2 has it, its attention one fused causal kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `batch query embed`."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(context.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Gpt(nn.Module):
    """A language model of tokens and learned positions."""

    def __init__(self, layers: int, width: int, heads: int = 8, tokens: int = 1000, length: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `batch query tokens`."""
        x = self.blocks(self.token(tokens) + self.position(torch.arange(tokens.shape[1])))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


SIZES = {
    "gpt2-like, 12 x 256, 2 x 64": (12, 256, 4, 2, 64),
    "BERT-like, 12 x 768, 4 x 128": (12, 768, 12, 4, 128),
}
"""Layers, width, heads, sequences and positions."""


def model_and_input(size: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model of one of `SIZES` and what goes into it."""
    layers, width, heads, batch, length = SIZES[size]
    return nn.Sequential(*(Block(width, heads) for _ in range(layers))).eval(), torch.randn(batch, length, width)
