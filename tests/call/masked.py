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


class Subtracts(Attention):
    """Takes 1 minus its mask times a large number: -inf would bar as well, and is not what it means."""

    def forward(self, x, mask=None):
        return self.attended(x, lambda s: s if mask is None else s + (1 - mask) * -1e4)


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


class Turns(nn.Module):
    """Batch first, around an attention that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(29, 12), nn.MultiheadAttention(12, 3)

    def forward(self, ids):
        x = self.embedding(ids).transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


class Forgets(Turns):
    """Meant to be batch first: batch_first=True is missing."""

    def forward(self, ids):
        x = self.embedding(ids)
        return self.attention(x, x, x)[0]


class Places(nn.Module):
    """As it, and the positions say so."""

    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.places, self.attention = nn.Embedding(64, 12), nn.MultiheadAttention(12, 3)

    def forward(self, x):
        places = self.places(torch.arange(x.shape[self.axis]))
        x = x + (places if self.axis == 1 else places[:, None])
        return self.attention(x, x, x)[0]


class Words(nn.Module):
    """Says by its own words which axis is which, and attends along the first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, bsz, _ = x.shape
        output: torch.Tensor = self.attention(x, x, x)[0]
        return output.view(length, bsz, 12)


class Mixed(Words):
    """Says that the batch comes first, and attends along it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bsz, length, _ = x.shape
        output: torch.Tensor = self.attention(x, x, x)[0]
        return output.view(bsz, length, 12)


class Silent(nn.Module):
    """Attends along one axis, and has no word for it."""

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis, self.linear = axis, nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.linear(x).transpose(0, self.axis).transpose(0, 1)
        mixed = (turned @ turned.mT).softmax(-1) @ turned
        return mixed.transpose(0, 1).transpose(0, self.axis)


class Pools(nn.Module):
    """Keeps one axis of two."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.layer = axis, nn.TransformerEncoderLayer(12, 3, 24)

    def forward(self, x):
        return self.layer(x).mean(self.axis)


class Wraps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Dictionary(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(29, 12)

    def forward(self, batch):
        x = self.embedding(batch["input_ids"]) + batch.get("extra_embeds")
        mask = batch.get("attention_mask")
        return self.attended(x, lambda s: s if mask is None else s.masked_fill(mask[:, None, None] == 0, -1e9))


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


class Named(Attention):
    """Takes all of its arguments by name."""

    def forward(self, **given):
        return self.attended(given["x"], lambda s: s)


class Trains(Attention):
    def forward(self, x):
        assert self.training, "in training mode alone"
        return self.attended(x, lambda s: s)


class NeedsTurned(Attention):
    """Takes `key query`."""

    def forward(self, x, mask):
        return self.attended(x, lambda s: s.masked_fill(~mask.t(), -1e9))


class NeedsBytes(Attention):
    """Takes no mask but one of uint8, of its keys."""

    def forward(self, x, mask):
        assert mask.dtype == torch.uint8
        return self.attended(x, lambda s: s.masked_fill(mask[:, None, None, :] == 1, -1e9))


class NeedsColumns(Attention):
    """Takes `key batch`."""

    def forward(self, x, pad_mask):
        return self.attended(x, lambda s: s.masked_fill(pad_mask.t()[:, None, None, :] == 0, -1e9))


class NeedsHeld(Attention):
    """Takes its mask in a dictionary."""

    def forward(self, x, masks):
        return self.attended(x, lambda s: s.masked_fill(masks["keys"][:, None, None, :] == 0, -1e9))


class NeedsNamed(Attention):
    """Asks its arguments by name for a mask."""

    def forward(self, x, **rest):
        return self.attended(x, lambda s: s + rest["attention_mask"][:, None, None, :])


class NeedsInside(Attention):
    """Takes all that it takes in a dictionary in a dictionary."""

    def forward(self, batch):
        inside = batch["inputs"]
        return self.attended(inside["x"], lambda s: s.masked_fill(inside["mask"][:, None, None, :] == 0, -1e9))


class NeedsTwo(Attention):
    def forward(self, x, src_mask, tgt_mask):
        half = self.attended(x, lambda s: s.masked_fill(src_mask.unsqueeze(1) == 0, -1e9))
        return half + self.attended(x, lambda s: s.masked_fill(tgt_mask.unsqueeze(1) == 0, -1e9))


class MayHold(Attention):
    """May be given a dictionary of two masks."""

    def forward(self, x, masks=None):
        look, pad = (None, None) if masks is None else (masks["look"], masks["pad"])
        return self.attended(x, lambda s: joined(s, look, pad))


class MayUnpack(Attention):
    """May be given a pair of masks."""

    def forward(self, x, masks=None):
        look, pad = masks if masks is not None else (None, None)
        return self.attended(x, lambda s: joined(s, look, pad))


def joined(scores, look, pad):
    scores = scores if look is None else scores.masked_fill(look, float("-inf"))
    return scores if pad is None else scores.masked_fill(pad[:, None, None], float("-inf"))


class Batched(Attention):
    """Takes a dictionary, in which a mask may be."""

    def forward(self, batch):
        mask = batch.get("attention_mask")
        keep = None if mask is None else mask[:, None, None] == 1
        return self.attended(batch["x"], lambda s: s if keep is None else s.masked_fill(~keep, -1e9))


class BatchedIfThere(Batched):
    def forward(self, batch):
        mask = None
        if "pad_mask" in batch:
            mask = batch["pad_mask"].clone()
        return super().forward({"x": batch["x"], "attention_mask": mask})
