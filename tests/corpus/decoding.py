"""Modules that are called step by step: with a cache that is returned, kept, written by index, or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .inside import KV, Attend, D
from .inside import B as BATCH

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Attention(nn.Module):
    """As nanoGPT has it, with a `past` that is returned second."""

    def __init__(self, embed=32, heads=4, fault="") -> None:
        super().__init__()
        self.heads, self.fault = heads, fault
        self.qkv, self.proj = nn.Linear(embed, 3 * embed), nn.Linear(embed, embed)

    def forward(self, x, past=None):
        b, t, e = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if past is not None:
            if self.fault == "raises" and past[0].shape[2] > 5:
                raise RuntimeError("the cache is full")
            k, v = (torch.cat([old, new], 2) for old, new in zip(past, (k, v), strict=True))
        keys = k.shape[2]
        mask = torch.ones(t, keys, dtype=torch.bool).tril(keys - t + (self.fault == "late"))
        if self.fault == "forgets":
            k, v, mask = k[:, :, -t:], v[:, :, -t:], mask[:, -t:]
        weights = (q @ k.mT / (e // self.heads) ** 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, e)), (k, v)


class WithBias(nn.Module):
    """Every step sees two keys more than its own, and no earlier one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, add_bias_kv=True, add_zero_attn=True, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class TwoLayers(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.last = Attention(), Attention(fault=fault)

    def forward(self, x, past=None):
        x, first = self.first(x, past and past[0])
        x, last = self.last(x, past and past[1])
        return x, (first, last)


class Restarting(Attention):
    """Positions restart at 0 in each call that is not given them, as in some hybrid models."""

    def forward(self, x, past=None, position_ids=None):
        places = torch.arange(x.shape[1])[None] if position_ids is None else position_ids
        return super().forward(x + places.to(x)[..., None].sin(), past)


class Slots(Attention):
    """Writes by index into a table of slots, and reads those up to the last position."""

    def forward(self, x, cache_position=None):
        places = torch.arange(x.shape[1]) if cache_position is None else cache_position
        if not hasattr(self, "slots"):
            self.slots = torch.zeros(len(x), 16, 2, x.shape[2])
        q, *new = self.qkv(x).chunk(3, -1)
        self.slots.index_put_((torch.arange(len(x))[:, None], places), torch.stack(new, 2))
        k, v = self.slots[:, : int(places[-1]) + 1].unbind(2)
        late = torch.arange(k.shape[1]) > places[:, None]
        return (q @ k.mT / x.shape[2] ** 0.5).masked_fill(late, -torch.inf).softmax(-1) @ v


class TwoWays(nn.Module):
    """Two layers of which each token sees all tokens; the second keeps what the first made of the earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(2))

    def forward(self, x, mems=None):
        kept = []
        for place, layer in enumerate(self.layers):
            kept.append(x if mems is None else torch.cat([mems[place], x], 1))
            x = layer(x, kept[-1], kept[-1])[0]
        return x, kept


class Static(nn.Module):
    """A model that makes and returns, or keeps, a static cache of 16 slots."""

    def __init__(self, hf, *, keeps: bool) -> None:
        super().__init__()
        self.model, self.keeps, self.make = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), keeps, hf.StaticCache
        self.cache = self.make(self.model.config, max_cache_len=16) if keeps else None

    def forward(self, ids, past_key_values=None):
        cache = self.cache if self.keeps else past_key_values or self.make(self.model.config, max_cache_len=16)
        out = self.model(ids, past_key_values=cache)
        return out.logits if self.keeps else (out.logits, out.past_key_values)


class Odd(Attention):
    """A cache of any name, and an argument of positions."""

    def forward(self, x, weights_mask=None, note=None, earlier=None, start_pos=0):
        if note is not None:
            raise TypeError("note is text")
        return super().forward(x + torch.arange(start_pos, start_pos + x.shape[1])[:, None].sin(), earlier)


class Last(Attention):
    """Returns the last position alone, and None before the cache."""

    def forward(self, x, past=None):
        out, cache = super().forward(x, past)
        return out[:, [-1]], None, cache


class Rotated(nn.Module):
    """Attention with a cache, rotated by positions that are given; with `anew` cached keys are rotated by their rows.

    The table is computed in the forward, or a buffer that is sliced, or picked from by ids.
    """

    def __init__(self, *, table: str = "computed", anew: bool = False, most: int = 0, fault: int = 0) -> None:
        super().__init__()
        self.table, self.anew, self.most, self.fault = table, anew, most, fault
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)
        self.register_buffer("angles", self._angles(), persistent=False)

    def _angles(self) -> Tensor:
        return torch.outer(torch.arange(64.0), 50.0 ** (-torch.arange(4) / 4))

    def turn(self, x: Tensor, at: int) -> Tensor:
        angles = self._angles() if self.table == "computed" else self.angles
        places = torch.arange(at, at + x.shape[2])
        angles = angles[places] if self.table == "ids" else angles[at : at + x.shape[2]]
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def forward(self, x: Tensor, past: Any = None, offset: int | None = None) -> tuple[Tensor, Any]:
        q, k, v = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        at = 0 if past is None else past[2] + self.fault
        at = at if offset is None else offset
        k = k if self.anew else self.turn(k, at)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        keys = k.shape[2]
        q = self.turn(q, keys - q.shape[2] if self.anew else at)
        context = nn.functional.scaled_dot_product_attention(
            q, self.turn(k, 0) if self.anew else k, v, is_causal=x.shape[1] > 1
        )
        kept = slice(-self.most if self.most else None, None)
        return self.o(context.transpose(1, 2).flatten(2)), (k[:, :, kept], v[:, :, kept], at + x.shape[1])


# -- steps of a loop, with a cache that the module keeps ---------------------------------------------------------------


class Stepped(Attend):
    """Attention that keeps its keys, in steps."""

    slots = 12

    def __init__(self) -> None:
        super().__init__()
        self.past = 0
        self.old: list[Tensor] = []
        self.kept = [torch.zeros(BATCH, KV, self.slots, D) for _ in range(2)]

    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        start, self.past = self.past, self.past + k.shape[2]
        keys, values = self.write(k, v, slice(start, self.past))
        return keys, values, torch.arange(keys.shape[2]) <= torch.arange(start, self.past)[:, None]

    def write(self, k: Tensor, v: Tensor, new: slice) -> list[Tensor]:
        raise NotImplementedError


class Concatenated(Stepped):
    def write(self, k: Tensor, v: Tensor, new: slice) -> list[Tensor]:
        self.old = [torch.cat((old, x), 2) for old, x in zip(self.old, (k, v), strict=True)] if self.old else [k, v]
        return self.old


class IndexCopied(Stepped):
    def write(self, k: Tensor, v: Tensor, new: slice) -> list[Tensor]:
        places = torch.arange(new.start, new.stop)
        return [kept.index_copy_(2, places, x) for kept, x in zip(self.kept, (k, v), strict=True)]


class Paged(Stepped):
    def __init__(self) -> None:
        super().__init__()
        self.pools = [torch.zeros(2 * self.slots, KV, D) for _ in range(2)]
        self.pages = torch.randperm(2 * self.slots).view(BATCH, self.slots)

    def write(self, k: Tensor, v: Tensor, new: slice) -> list[Tensor]:
        for pool, x in zip(self.pools, (k, v), strict=True):
            pool[self.pages[:, new]] = x.transpose(1, 2)
        return [pool[self.pages[:, : new.stop]].transpose(1, 2) for pool in self.pools]
