"""Attention as people write it, for the tests of targets: how it is built, what it is given, and how it takes masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

print("styles is being imported")


class Attention(nn.Module):
    """Self-attention, which others differ from in what they take."""

    def __init__(self, embed_dim: int = 12, num_heads: int = 3, bias: bool = True):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(embed_dim, 3 * embed_dim, bias=bias), nn.Linear(embed_dim, embed_dim)

    def attended(self, x, change=lambda scores: scores):
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        weights = change(q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attended(x)


# -- how it is built ---------------------------------------------------------------------------------------------------


@dataclass
class GPTConfig:
    block_size: int = 31
    vocab_size: int = 29
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 14
    bias: bool = True


class Configured(Attention):
    """Names the dataclass of its config; causal by a buffer."""

    def __init__(self, config: GPTConfig):
        assert config.n_embd % config.n_head == 0
        super().__init__(config.n_embd, config.n_head, config.bias)
        self.register_buffer("mask", torch.ones(config.block_size, config.block_size).tril())

    def forward(self, x):
        seen = self.mask[: x.shape[1], : x.shape[1]]
        return self.attended(x, lambda scores: scores.masked_fill(seen == 0, float("-inf")))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList([Configured(config) for _ in range(config.n_layer)])

    def forward(self, idx, targets=None):
        x = self.tokens(idx)
        for block in self.blocks:
            x = x + block(x)
        return x, targets


class Tutorial(nn.Module):
    """Three inputs in another order, and a mask that is needed and may be None."""

    def __init__(self, d_model, h, dropout=0.1):
        super().__init__()
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, values, keys, query, mask):
        given = zip(self.linears, (query, keys, values), strict=False)
        q, k, v = (linear(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for linear, x in given)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
        return self.linears[-1]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Cross(nn.Module):
    def __init__(self, query_dim: int, context_dim: int = 11, heads: int = 1):
        super().__init__()
        self.q, self.kv = nn.Linear(query_dim, 6), nn.Linear(context_dim, 12)

    def forward(self, x, context=None):
        k, v = self.kv(x if context is None else context).chunk(2, dim=-1)
        return (self.q(x) @ k.mT / 6**0.5).softmax(-1) @ v


class Refusing(Attention):
    def __init__(self, dim: int, heads: int):
        assert dim % heads == 0
        super().__init__(dim, heads)


def make(depth: int = 1) -> nn.Module:
    return nn.Sequential(*[Configured(GPTConfig()) for _ in range(depth)])


def make_nothing(depth: int = 1):
    return depth


def attention(query, key, value, mask=None):
    return (query @ key.mT).softmax(-1) @ value


SETTINGS = {"n_embd": 10, "n_head": 5}


class FromDict(Attention):
    def __init__(self, cfg):
        super().__init__(cfg["n_embd"], cfg["n_head"])


ready = make()


# -- what its forward is given -----------------------------------------------------------------------------------------


class Lazy(nn.Module):
    def __init__(self, num_hiddens: int = 12):
        super().__init__()
        self.q, self.k = (nn.LazyLinear(num_hiddens) for _ in range(2))

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ x


class LazyImage(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LazyConv1d(7, 3))


class Matrices(nn.Module):
    """No names that tell anything: matrices of its own."""

    def __init__(self, size: int = 13):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(size, 7)) for _ in range(3))

    def forward(self, data):
        return torch.softmax(data @ self.wq @ (data @ self.wk).mT, -1) @ torch.matmul(input=data, other=self.wv)


class Before(Attention):
    """Something turns `x` into what is attended to: a table of tokens, or a convolution of an image or of sound."""

    def __init__(self, kind: str = "tokens"):
        super().__init__()
        kinds = {"tokens": nn.Embedding(29, 12), "image": nn.Conv2d(5, 12, 1), "sound": nn.Conv1d(20, 12, 3, padding=1)}
        self.first = kinds[kind]

    def forward(self, x):
        x = self.first(x)
        return self.attended(x if isinstance(self.first, nn.Embedding) else x.flatten(2).mT)


class Needy(Attention):
    """Needs what nothing tells."""

    def forward(self, x, angles):
        return self.attended(x * angles)


class Stepping(Attention):
    def forward(self, x, start_pos: int):
        return self.attended(x * (start_pos + 1))


class Failing(Attention):
    def forward(self, x):
        print("about to fail")
        return self.out(x) @ self.out(x)


class Silent(Attention):
    def forward(self, x):
        self.attended(x)


class Words(nn.Module):
    """Says by its own words which axis is which, and attends along the first."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3)

    def forward(self, x):
        length, bsz, _ = x.shape
        return self.attention(x, x, x)[0].view(length, bsz, 12)


class Wraps(Words):
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


class Counting(Attention):
    """Counts its calls for all that are copied of it, and would fail in a second one of its own."""

    calls = 0

    def forward(self, x):
        batch, length, _ = x.shape  # so that nobody has to run it to see which is which
        assert batch
        assert not getattr(self, "position", 0)
        self.position = length
        Attention.calls = getattr(Attention, "calls", 0) + 1
        return self.attended(x)


class Dropping(Attention):
    def forward(self, x):
        return nn.functional.dropout(self.attended(x), training=self.training)


class TwoHeads(Attention):
    """Takes a number of heads, and has two all the same."""

    def __init__(self, dim, heads=2):
        super().__init__(dim, 2)


class Dictionary(Attention):
    """Takes its tensors in a dictionary."""

    def forward(self, batch):
        return self.attended(batch["x"])


class Annotated(Attention):
    """Says that its tensors come as a pair."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]):
        return self.attended(pair[0] + pair[1])


class Named(Attention):
    """Takes all of its arguments by name."""

    def forward(self, **given):
        return self.attended(given["x"])


class NoWeights(nn.Module):
    """The code fits its default width 12; no weight shows it."""

    def __init__(self, num_hidden: int = 12, num_heads: int = 3):
        super().__init__()
        self.num_heads, self.size = num_heads, num_hidden // num_heads

    def forward(self, q, k):
        q, k = (x.view(*x.shape[:-1], self.num_heads, self.size).transpose(1, 2) for x in (q, k))
        return (q @ k.mT).softmax(-1) @ k


class OfNoWidth(NoWeights):
    """No width is right."""

    def forward(self, q, k):
        q = q.view(*q.shape[:-1], self.num_heads, self.size).transpose(1, 2)
        return q @ k[..., :5]


def scaled(width: int = 12):
    torch.manual_seed(width)
    return Needy(), (torch.randn(2, 5, 12), torch.ones(5, 12))


def in_dictionary():
    return Dictionary(), (), {"batch": {"x": torch.randn(2, 5, 12)}}


def both(num_heads: int = 3):
    return nn.MultiheadAttention(12, num_heads), [torch.randn(5, 2, 12)] * 3, {"need_weights": False}


def without_arguments():
    return Dictionary(), {"batch": 3}


# -- how it takes masks ------------------------------------------------------------------------------------------------


class Keeps(Attention):
    def forward(self, x, mask=None):
        return self.attended(x, lambda s: s if mask is None else s.masked_fill(mask == 0, -1e9))


class Bars(Attention):
    def forward(self, x, attn_mask=None):
        return self.attended(x, lambda s: s if attn_mask is None else s.masked_fill(attn_mask, float("-inf")))


class Adds(Attention):
    def forward(self, x, attn_bias=None):
        return self.attended(x, lambda s: s if attn_bias is None else s + attn_bias)


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

    late = 1

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1]).triu(self.late).bool()
        return self.attended(x, lambda s: s.masked_fill(future, float("-inf")))


class OneLate(Inside):
    """Masks by itself, and one diagonal too late."""

    late = 2


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


class Own(Inside):
    """Is causal by itself, and has a mask for something else."""

    def forward(self, x, mask=None):
        return super().forward(x)


class Deaf(Attention):
    """Takes a mask and leaves it unheard."""

    def forward(self, x, mask=None):
        return self.attended(x)
