"""Attention that takes its masks in one way each, and forwards that lay their inputs out in one way each."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)

    def parts(self, x):
        return (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

    def attended(self, x, change):
        q, k, v = self.parts(x)
        weights = change(q @ k.mT / 2).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Keeps(Attention):
    def forward(self, x, mask=None):
        return self.attended(x, lambda s: s if mask is None else s.masked_fill(mask == 0, -1e9))


class Bars(Attention):
    def forward(self, x, attn_mask=None):
        return self.attended(x, lambda s: s if attn_mask is None else s.masked_fill(attn_mask, float("-inf")))


class Adds(Attention):
    def forward(self, x, attn_bias=None):
        return self.attended(x, lambda s: s if attn_bias is None else s + attn_bias)


class Multiplies(Attention):
    """Takes its mask after the softmax, and divides by what is left."""

    def forward(self, x, mask=None):
        q, k, v = self.parts(x)
        weights = (q @ k.mT / 2).softmax(-1)
        weights = weights if mask is None else weights * mask
        return (weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2)


class Lengths(Attention):
    """Is told how long each sequence is."""

    def forward(self, x, seq_lens):
        barred = torch.arange(x.shape[1]) >= seq_lens[:, None, None, None]
        return self.attended(x, lambda s: s.masked_fill(barred, float("-inf")))


class Visible(Attention):
    """Has a name of its own for its mask."""

    def forward(self, x, visible=None):
        return self.attended(x, lambda s: s if visible is None else s.masked_fill(~visible, float("-inf")))


class Needed(Attention):
    """Cannot do without, and takes `batch query key`."""

    def forward(self, x, mask):
        return self.attended(x, lambda s: s.masked_fill(mask.unsqueeze(1) == 0, -1e9))


class ByHead(Attention):
    """Takes a mask of every head."""

    def forward(self, x, mask=None):
        if mask is not None:
            assert mask.shape == (len(x), 3, x.shape[1], x.shape[1])
        return self.attended(x, lambda s: s if mask is None else s.masked_fill(~mask, float("-inf")))


class Inside(Attention):
    """Masks by itself, and takes no mask."""

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return self.attended(x, lambda s: s.masked_fill(future, float("-inf")))


class OneLate(Attention):
    """Masks by itself, and one diagonal too late."""

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1]).triu(2).bool()
        return self.attended(x, lambda s: s.masked_fill(future, float("-inf")))


class KeepsKeys(Attention):
    def forward(self, x, pad_mask=None):
        fill = None if pad_mask is None else (1.0 - pad_mask[:, None, None, :]) * -1e4
        return self.attended(x, lambda s: s if fill is None else s + fill)


class BarsKeys(Attention):
    def forward(self, x, key_padding_mask=None):
        barred = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
        return self.attended(x, lambda s: s if barred is None else s.masked_fill(barred, float("-inf")))


class Both(Attention):
    """Takes a mask of each kind."""

    def forward(self, x, look_ahead_mask=None, pad_mask=None):
        def change(s):
            s = s if look_ahead_mask is None else s.masked_fill(look_ahead_mask, float("-inf"))
            return s if pad_mask is None else s.masked_fill(~pad_mask[:, None, None, :], float("-inf"))

        return self.attended(x, change)


class Own(Attention):
    """Is causal by itself, and has a mask for something else."""

    def forward(self, x, mask=None):
        barred = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.attended(x, lambda s: s.masked_fill(barred, float("-inf")))


class Deaf(Attention):
    """Takes a mask and leaves it unheard."""

    def forward(self, x, mask=None):
        return self.attended(x, lambda s: s)


class Words(nn.Module):
    """Says by its own words which axis is which, and attends along the first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, bsz, _ = x.shape
        output: torch.Tensor = self.attention(x, x, x)[0]
        return output.view(length, bsz, 12)


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class WrapsTurned(Wraps):
    """Turns its input to the layout of the layer inside, and back."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class WrapsPooled(Wraps):
    """Takes the mean over tokens, so that the second axis of its input is theirs."""

    def forward(self, x):
        return super().forward(x).mean(1)


class Calls(Attention):
    """Counts its calls for all that are copied of it."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return self.attended(x, lambda s: s)


class Lazy(nn.Module):
    def __init__(self, units: int = 12) -> None:
        super().__init__()
        self.first, self.attention = nn.LazyLinear(units), nn.MultiheadAttention(units, 3, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return self.attention(x, x, x)[0]


class LazyImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LazyConv1d(7, 3)

    def forward(self, x):
        return self.first(x)


class Trains(Attention):
    def forward(self, x):
        assert self.training, "in training mode alone"
        return self.attended(x, lambda s: s)


class Dictionary(Attention):
    """Takes its tensors in a dictionary."""

    def forward(self, batch):
        return self.attended(batch["x"], lambda s: s)


class Annotated(Attention):
    """Says that its tensors come as a pair."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]):
        x, other = pair
        return self.attended(x + other, lambda s: s)


class Named(Attention):
    """Takes all of its arguments by name."""

    def forward(self, **given):
        return self.attended(given["x"], lambda s: s)


class Scaled(Attention):
    """Takes what nothing tells, behind what a name tells."""

    def forward(self, x, angles):
        return self.attended(x * angles, lambda s: s)


class NoWeights(nn.Module):
    """The code fits its default width 12; no weight shows it."""

    def __init__(self, num_hidden: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads, self.size = num_heads, num_hidden // num_heads

    def forward(self, q, k):
        q, k = (x.view(*x.shape[:-1], self.num_heads, self.size).transpose(1, 2) for x in (q, k))
        return (q @ k.mT).softmax(-1) @ k


class OfSetting(NoWeights):
    """No view names the width: the error is about heads of 37 / 3 features."""

    def forward(self, q, k):
        q, k = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k))
        return (q @ k.mT).softmax(-1) @ k


class OfNoWidth(NoWeights):
    """No width is right."""

    def __init__(self) -> None:
        super().__init__(num_hidden=12, num_heads=3)

    def forward(self, q, k):
        q = q.view(*q.shape[:-1], self.num_heads, self.size).transpose(1, 2)
        return q @ k[..., :5]


def scaled(width: int = 12, num_heads: int = 3):
    torch.manual_seed(width)
    return Scaled(), (torch.randn(2, 5, 12), torch.ones(5, 12))


def in_dictionary():
    return Dictionary(), (), {"batch": {"x": torch.randn(2, 5, 12)}}


def both(num_heads: int = 3):
    return nn.MultiheadAttention(12, num_heads), [torch.randn(5, 2, 12)] * 3, {"need_weights": False}


def without_arguments():
    return Dictionary(), {"batch": 3}
