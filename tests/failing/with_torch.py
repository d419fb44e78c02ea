"""torch's own attention, called with one mistake each. `# fails` marks the line that raises."""

import torch
import torch.nn as nn


class Attend(nn.Module):
    def __init__(self, embed_dim=24, num_heads=3, **settings):
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, num_heads, **settings)

    def forward(self, x, memory=None, **masks):
        memory = x if memory is None else memory
        out, _ = self.attn(x, memory, memory, **masks)  # fails
        return out


class Encoder(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 31, **settings)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, src, **masks):
        return self.encoder(src, **masks)  # fails


class Clip(nn.Module):
    """A causal mask made for the text's length, a layer that was not told batch_first."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3)
        self.register_buffer("mask", torch.full((7, 7), float("-inf")).triu(1))

    def forward(self, x):
        return self.attn(x, x, x, attn_mask=self.mask)[0]  # fails


class OtherValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x, memory):
        return self.attn(x, x, memory)[0]  # fails
