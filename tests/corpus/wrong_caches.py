"""Mistakes of caches and of the calls that continue from them, beside right twins, and published code with caches."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.checks.intent import Intent

from .planted import Case, D, E, Right

WIDTH = 20


def floats(batch: int, length: int, width: int = WIDTH) -> Any:
    return lambda: {"x": torch.randn(batch, length, width)}


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate halves of `batch heads position head_dim` by positions, `position` or `batch position`."""
    half = x.shape[-1] // 2
    angles = positions[..., None].float() * 50.0 ** (-torch.arange(half) / half)
    angles, (a, b) = angles[:, None] if positions.dim() > 1 else angles, x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Decoder(nn.Module):
    """Attention written out, with shared key heads, a rotation, a bias by distance and a cache.

    The cache has keys and values, at most `most` of them where it is not 0, and the number of tokens so far.
    """

    def __init__(self, *, heads: int = 6, shared: int = 3, head_dim: int = 4, most: int = 0, **steps: Any) -> None:
        super().__init__()
        self.heads, self.shared, self.head_dim, self.most = heads, shared, head_dim, most
        self.q = nn.Linear(WIDTH, heads * head_dim)
        self.k, self.v = (nn.Linear(WIDTH, shared * head_dim) for _ in range(2))
        self.o, self.places = nn.Linear(heads * head_dim, WIDTH), nn.Embedding(64, WIDTH)
        for name, step in steps.items():
            setattr(self, name, partial(step, self))

    def embedded(self, x: Tensor, seen: int) -> Tensor:
        return x + self.places(torch.arange(seen, seen + x.shape[1]))

    def first_angle(self, rows: int, seen: int) -> int:
        """Return the position of the first new token, after the rows of the cache and the tokens so far."""
        return seen

    def turned_key(self, k: Tensor, positions: Tensor) -> Tensor:
        return turned(k, positions)

    def joined(self, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if past is None:
            return k, v
        return torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)

    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kept = slice(-self.most if self.most else None, None)
        return k[:, :, kept], v[:, :, kept]

    def scale(self, past: Any) -> float:
        return 1 / math.sqrt(self.head_dim)

    def distance(self, rows: Tensor, keys: Tensor) -> Tensor:
        return rows - keys

    def hidden(self, rows: Tensor, keys: Tensor) -> Tensor:
        late = keys > rows
        return late | (rows - keys >= self.most) if self.most else late

    def forward(self, x: Tensor, past_kv: Any = None) -> tuple[Tensor, Any]:
        count = x.shape[1]
        rows, seen = (0, 0) if past_kv is None else (past_kv[0].shape[2], past_kv[2])
        x = self.embedded(x, seen)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        first = self.first_angle(rows, seen)
        positions = torch.arange(first, first + count)
        k, v = self.joined(past_kv, self.turned_key(k, positions), v)
        repeats = self.heads // self.shared
        scores = turned(q, positions) @ k.repeat_interleave(repeats, 1).mT * self.scale(past_kv)
        places = torch.arange(seen, seen + count)[:, None]
        of_keys = torch.arange(k.shape[2]) + seen + count - k.shape[2]
        slopes = 0.2 * torch.arange(1.0, 1 + self.heads)[:, None, None]
        scores = scores - slopes * self.distance(places, of_keys).abs()
        weights = scores.masked_fill(self.hidden(places, of_keys), -torch.inf).softmax(-1)
        context = weights @ v.repeat_interleave(repeats, 1)
        return self.o(context.transpose(1, 2).flatten(2)), (*self.cached(k, v), seen + count)


def _rotates_all(m: Any, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = Decoder.joined(m, past, k, v)
    return turned(k, torch.arange(k.shape[2])), v


def _values_first(m: Any, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (k, v) if past is None else (torch.cat((past[0], k), 2), torch.cat((v, past[1]), 2))


def _changed(change: Any) -> Any:
    """Earlier keys that are changed before the new ones are joined to them."""

    def joined(m: Any, past: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return Decoder.joined(m, None if past is None else (change(past[0]), past[1]), k, v)

    return joined


def _top_left(m: Any, rows: Tensor, keys: Tensor) -> Tensor:
    return torch.ones(len(rows), len(keys), dtype=torch.bool).triu(1)


_decoder = partial(Case, check="cache", base=Decoder, intent=Intent(cache="past_kv"), alone=False, inputs=floats(2, 12))
_window = Intent(causal=True, window=6, cache="past_kv")
CASES = [
    _decoder("MaskTopLeft", wrong={"hidden": _top_left}),
    _decoder("BiasFromZero", wrong={"distance": lambda m, rows, keys: rows - rows[0] - keys}),
    _decoder("RotationRestarts", wrong={"first_angle": lambda m, rows, seen: 0}),
    _decoder(
        "RotationCountsRows",
        wrong={"first_angle": lambda m, rows, seen: rows, "most": 6},
        twin={"most": 6},
        intent=_window,
    ),
    _decoder("EmbeddingRestarts", wrong={"embedded": lambda m, x, seen: Decoder.embedded(m, x, 0)}),
    _decoder("RotatedTwice", wrong={"turned_key": lambda m, k, positions: k, "joined": _rotates_all}),
    _decoder("ValuesJoinedFirst", wrong={"joined": _values_first}),
    _decoder("CacheLost", wrong={"joined": lambda m, past, k, v: (k, v)}),
    _decoder("OtherScale", wrong={"scale": lambda m, past: Decoder.scale(m, past) * (1 if past is None else 1.5)}),
    _decoder("OpenAfterwards", wrong={"hidden": lambda m, r, k: Decoder.hidden(m, r, k) & (r[0] == 0)}),
    _decoder("KeysAndValuesSwapped", wrong={"cached": lambda m, k, v: (v, k)}),
    _decoder("KeysDoubled", wrong={"joined": _changed(lambda k: 2 * k)}),
    _decoder("HeadsMoved", wrong={"joined": _changed(lambda k: k.roll(1, 1))}),
    _decoder("AsManyKeyHeads", wrong=None, twin={"heads": 4, "shared": 4, "most": 6}),
]


# -- other caches ------------------------------------------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Projections of 5 heads of 4 features, and a way to continue that is `right` or not."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.right, self.qkv, self.out = right, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (5, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]


class LateOwnKey(Layer):
    """A cache whose new key and value are appended after the step has read it."""

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        new = (k, v) if cache is None else tuple(torch.cat(pair, 2) for pair in zip(cache, (k, v), strict=True))
        read = (k, v) if cache is None else new if self.right else cache
        past = 0 if cache is None else cache[0].shape[2]
        mask = torch.arange(read[0].shape[2]) <= torch.arange(q.shape[2])[:, None] + past
        return self.out(attended(q, *read, mask)), new


class Memo(Layer):
    """A rotation whose angles are kept by the number of tokens; if `right`, also by the first position."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__(right=right)
        self.kept: dict[Any, Tensor] = {}

    def turned(self, x: Tensor, start: int) -> Tensor:
        key = (x.shape[2], start if self.right else 0)
        positions = self.kept.setdefault(key, torch.arange(start, start + x.shape[2]))
        return turned(x, positions)

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        past = 0 if cache is None else cache[0].shape[2]
        q, k = self.turned(q, past), self.turned(k, past)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None] + past
        return self.out(attended(q, k, v, mask)), (k, v)


class Ring(Layer):
    """A cache of fixed size, a ring if `most` is smaller than the tokens; `shift` moves the slots that are read."""

    def __init__(self, most: int, *, shift: int = 0, right: bool = True) -> None:
        super().__init__(right=right)
        self.most, self.shift = most, shift

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        count, empty = x.shape[1], x.new_zeros(len(x), 5, self.most, 4)
        keys, values, start = (empty, empty, 0) if cache is None else cache
        keys, values, end = keys.clone(), values.clone(), start + count
        place = torch.full((self.most,), -1)
        for token in range(max(end - self.most, 0), start):
            place[token % self.most] = token
        for at in range(count):
            slot = (start + at) % self.most
            keys[:, :, slot], values[:, :, slot], place[slot] = k[:, :, at], v[:, :, at], start + at
        read = slice(self.shift, min(end, self.most) + self.shift)
        rows = torch.arange(start, end)[:, None]
        columns = place[read] if self.right else torch.arange(place[read].shape[0])
        mask = (columns <= rows) & ((columns > rows - self.most) | torch.tensor(not self.right))
        return self.out(attended(q, keys[:, :, read], values[:, :, read], mask)), (keys, values, end)


class TwoFused(nn.Module):
    """Two layers with torch's kernel, whose is_causal is aligned top left; before them a convolution over the past."""

    def __init__(self, *, right: bool = True, mixes: bool = False) -> None:
        super().__init__()
        self.right, self.mix = right, nn.Conv1d(WIDTH, WIDTH, 3) if mixes else None
        self.qkv, self.out = (nn.ModuleList(nn.Linear(WIDTH, size) for _ in range(2)) for size in (60, WIDTH))

    def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        kept = []
        x = x if self.mix is None else x + self.mix(F.pad(x.mT, (2, 0))).mT
        for place, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (part.unflatten(-1, (5, 4)).transpose(1, 2) for part in qkv(x).chunk(3, -1))
            if cache is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(cache[place], (k, v), strict=True))
            kept.append((k, v))
            rows = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
            mask: Any = {"attn_mask": torch.arange(k.shape[2]) <= rows} if self.right else {"is_causal": True}
            y = F.scaled_dot_product_attention(q, k, v, **mask)
            x = x + out(y.transpose(1, 2).flatten(2))
        return x, kept


class SumsBefore(nn.Module):
    """A running sum before attention that leaves padding out of a prompt alone, as recurrent layers of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor, mask: Tensor, past: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Any]:
        if x.shape[1] > 1:
            x = x * mask[:, -x.shape[1] :, None]
        sums = x.cumsum(1)
        if past is not None:
            sums = sums + past[2]
        q, k, v = self.qkv(sums / 9).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        future = torch.ones(q.shape[1], k.shape[1]).triu(1 + k.shape[1] - q.shape[1]).bool()
        scores = (q @ k.mT / E**0.5).masked_fill(future | ~mask[:, None].bool(), -1e9)
        return scores.softmax(-1) @ v, (k, v, sums[:, -1:])


class Kept(Right):
    """An attention with a cache that keeps a part of what it has: right ones drop the oldest."""

    def __init__(self, *, uses: Any = lambda side: side, keeps: Any = lambda side: side) -> None:
        super().__init__()
        self.uses, self.keeps = uses, keeps

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.heads(x)
        if past is not None:
            k, v = (self.uses(torch.cat(pair, 2)) for pair in zip(past, (k, v), strict=True))
        return self.o(self.join(self.attend(q, k, v))), (self.keeps(k), self.keeps(v))


def _left_out(mask_of: int) -> Any:
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, :mask_of] = 0
    return lambda: {"x": torch.randn(3, 10, E), "mask": mask}


_other = partial(Case, check="cache", intent=Intent(causal=True, cache="cache"), alone=False, inputs=floats(2, 12))
_slots = partial(Case, check="cache", inputs=floats(2, 12), intent=Intent(cache="cache"), alone=False)
CASES += [
    _other("OwnKeyTooLate", wrong=partial(LateOwnKey, right=False), twin=LateOwnKey),
    _other("AnglesByLength", wrong=partial(Memo, right=False), twin=Memo),
    _other("KernelTopLeft", wrong=partial(TwoFused, right=False), twin=TwoFused, intent=Intent(cache="cache")),
    _other("ConvolutionRestarts", wrong=partial(TwoFused, mixes=True), twin=TwoFused, intent=Intent(cache="cache")),
    _slots("RingOverwritten", wrong=partial(Ring, 6, right=False), twin=partial(Ring, 12)),
    _slots("SlotsReadOneLate", wrong=partial(Ring, 32, shift=1, right=False), twin=partial(Ring, 32)),
    _slots("SlotsReadTwoLate", wrong=partial(Ring, 12, shift=2, right=False), twin=partial(Ring, 16)),
    Case(
        "SumsOfAPaddedPrompt",
        "cache",
        None,
        SumsBefore,
        Intent(causal=True, cache="past"),
        inputs=_left_out(2),
    ),
    Case(
        "OldestDropped",
        "cache",
        None,
        partial(Kept, uses=lambda t: t[:, :, -5:], keeps=lambda t: t[:, :, -4:]),
        asked=False,
    ),
    Case(
        "SinkKept", "cache", None, partial(Kept, keeps=lambda t: torch.cat([t[:, :, :1], t[:, :, -3:]], 2)), asked=False
    ),
]


# -- no softmax --------------------------------------------------------------------------------------------------------


class Retention(nn.Module):
    """A state that decays by head; if wrong, what was kept does not decay for the tokens of the call."""

    def __init__(self, *, right: bool = True) -> None:
        super().__init__()
        self.right = right
        self.q, self.k, self.v, self.o = (nn.Linear(E, E, bias=False) for _ in range(4))
        self.register_buffer("decay", 1 - 2.0 ** (-2 - torch.arange(4)))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        far = places[:, None] - places
        keep = self.decay[:, None, None] ** far.clamp(min=0) * (far >= 0)
        y = (q @ k.mT * keep) @ v
        state = torch.einsum("bhnk,bhnv,hn->bhkv", k, v, keep[:, -1])
        if memory is not None:
            fades = self.decay[:, None, None] ** (places + 1)[:, None]
            y = y + (q * fades if self.right else q) @ memory
            state = state + memory * (self.decay ** x.shape[1])[:, None, None]
        return self.o(y.transpose(1, 2).flatten(2)), state


CASES += [
    Case(
        "StateNotDecayed",
        "cache",
        partial(Retention, right=False),
        Retention,
        Intent(causal=True, cache="memory"),
        inputs=floats(2, 12, E),
        alone=False,
    )
]


# -- a cache and a mask of all tokens in one call ----------------------------------------------------------------------


class Masked(Right):
    """Attention with a cache of all tokens or of a window, and a mask of `batch key`; `fault` breaks it."""

    def __init__(self, fault: str = "", *, window: int = 0) -> None:
        super().__init__()
        self.fault, self.window = fault, window

    def positions(self, mask: Tensor | None, start: int, count: int, batch: int) -> Tensor:
        """Return the positions of new tokens, `batch position`: those of real tokens, where a mask tells them."""
        if mask is None or self.fault == "all tokens" or (self.fault == "positions" and start):
            return torch.arange(start, start + count).expand(batch, -1)
        return (mask.long().cumsum(-1)[:, -count:] - 1).clamp(min=0)

    def seen(self, count: int, keys: int) -> Tensor:
        rows, columns = torch.arange(keys - count, keys)[:, None], torch.arange(keys)
        return (columns <= rows) & (columns > rows - (self.window or keys))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        count, start = q.shape[2], 0 if past is None else past[2]
        at = self.positions(attention_mask, start, count, len(x))
        q, k = turned(q, at), turned(k, at)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        seen = self.seen(count, k.shape[2])
        if attention_mask is not None and not (self.fault == "ignored" and past is not None):
            seen = seen & self.laid_over(attention_mask.bool(), count, k.shape[2])
        weights = (q @ k.mT / D**0.5).masked_fill(~seen, -1e9).softmax(-1)
        cut = slice(-self.window if self.window else None, None)
        return self.o(self.join(weights @ v)), (k[:, :, cut], v[:, :, cut], start + count)

    def laid_over(self, mask: Tensor, count: int, keys: int) -> Tensor:
        if self.fault == "all tokens":
            return mask[:, None, None]
        if self.fault == "first":
            return mask[:, None, None, :keys]
        if self.fault == "square":
            return mask[:, None, None, :].expand(-1, -1, count, -1).reshape(len(mask), 1, count, count)
        return mask[:, None, None, -keys:]


class NewAlone(Masked):
    """Keeps the mask of earlier tokens in its cache, and takes that of the new tokens alone: another convention."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if mask.shape[1] != x.shape[1]:
            raise ValueError("the mask is that of the new tokens")
        if past is not None:
            past, mask = past[:3], torch.cat((past[3], mask), 1)
        y, cache = super().forward(x, mask, past)
        return y, (*cache, mask)


_intent = Intent(causal=True, cache="past", padding="attention_mask", padding_true="keep")
_of_window = Intent(causal=True, window=5, cache="past", padding="attention_mask", padding_true="keep")
_masked = partial(Case, check="cache", intent=_intent, alone=False, inputs=floats(2, 12, E))
_windowed = partial(_masked, intent=_of_window, twin=partial(Masked, window=5))
CASES += [
    _masked("MaskLaidAsSquare", wrong=partial(Masked, "square"), twin=Masked),
    _masked("MaskIgnoredWithCache", wrong=partial(Masked, "ignored"), twin=Masked),
    _masked("PositionsOfPaddedCalls", wrong=partial(Masked, "positions"), twin=Masked),
    _masked("MaskOfNewTokens", wrong=None, twin=NewAlone),
    _windowed("MaskOfAllTokensAtAWindow", wrong=partial(Masked, "all tokens", window=5)),
    _windowed("MaskCutAtTheFirst", wrong=partial(Masked, "first", window=5)),
]


# -- published code ----------------------------------------------------------------------------------------------------


def rotations(dim: int, end: int) -> Tensor:
    """Complex numbers, `position pair`."""
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2).float() / dim))
    freqs = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def rotated(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate pairs of `batch position heads head_dim`."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis.view(1, x.shape[1], 1, -1)).flatten(3)


class LlamaAttention(nn.Module):
    """The cache is written in place."""

    def __init__(self, dim: int = 32, n_heads: int = 4, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.cache_k = torch.zeros(4, 32, n_kv_heads, self.head_dim)
        self.cache_v = torch.zeros(4, 32, n_kv_heads, self.head_dim)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv, self.head_dim)
        xq, xk = rotated(xq, freqs_cis), rotated(xk, freqs_cis)
        self.cache_k[:bsz, start_pos : start_pos + seqlen] = xk
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = xv
        keys = self.cache_k[:bsz, : start_pos + seqlen].repeat_interleave(self.n_heads // self.n_kv, 2)
        values = self.cache_v[:bsz, : start_pos + seqlen].repeat_interleave(self.n_heads // self.n_kv, 2)
        scores = xq.transpose(1, 2) @ keys.permute(0, 2, 3, 1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        out = scores.softmax(-1) @ values.transpose(1, 2)
        return self.wo(out.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class LlamaModel(nn.Module):
    """Each chunk is rotated from position 0 on, or its first query sees the first key alone, if wrong."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.emb, self.out, self.wrong = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False), wrong
        self.layers = nn.ModuleList(LlamaAttention() for _ in range(2))
        self.freqs_cis = rotations(8, 32)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        seqlen, h = tokens.shape[1], self.emb(tokens)
        mask = self.mask(start_pos, seqlen) if seqlen > 1 else None
        first = 0 if self.wrong == "restarts" else start_pos
        for layer in self.layers:
            h = h + layer(h, start_pos, self.freqs_cis[first : first + seqlen], mask)
        return self.out(h)

    def mask(self, start_pos: int, seqlen: int) -> Tensor:
        if self.wrong == "top left":
            return torch.triu(torch.full((seqlen, start_pos + seqlen), float("-inf")), diagonal=1)
        mask = torch.triu(torch.full((seqlen, seqlen), float("-inf")), diagonal=1)
        return torch.hstack([torch.zeros((seqlen, start_pos)), mask])


class GptFast(nn.Module):
    """A static cache that is written by index_put, input_pos, and a table of masks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.wqkv = nn.Embedding(50, 32), nn.Linear(32, 64, bias=False)
        self.wo = nn.Linear(32, 32, bias=False)
        self.register_buffer("k_cache", torch.zeros(2, 2, 16, 8))
        self.register_buffer("v_cache", torch.zeros(2, 2, 16, 8))
        self.register_buffer("causal_mask", torch.tril(torch.ones(16, 16, dtype=torch.bool)))
        self.register_buffer("freqs", rotations(8, 16))

    def forward(self, idx: Tensor, input_pos: Tensor) -> Tensor:
        mask, freqs = self.causal_mask[None, None, input_pos], self.freqs[input_pos]
        q, k, v = (side.unflatten(-1, (-1, 8)) for side in self.wqkv(self.emb(idx)).split([32, 16, 16], -1))
        q, k = rotated(q, freqs), rotated(k, freqs)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        self.k_cache[:, :, input_pos] = k
        self.v_cache[:, :, input_pos] = v
        k, v = self.k_cache.repeat_interleave(2, dim=1), self.v_cache.repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().flatten(2))


TOKENS = torch.arange(12).reshape(2, 6)
_published = partial(Case, check="cache", alone=False, inputs=lambda: {"tokens": TOKENS})
_scaled = {"causal": True, "scale": "sqrt_head_dim"}
CASES += [
    _published(
        "LlamaRestarts", wrong=partial(LlamaModel, "restarts"), twin=LlamaModel, intent=Intent(cache="start_pos")
    ),
    _published("LlamaTopLeft", wrong=partial(LlamaModel, "top left"), twin=LlamaModel, intent=Intent(**_scaled)),
    _published(
        "GptFastIsRight",
        wrong=None,
        twin=GptFast,
        intent=Intent(cache="input_pos", **_scaled),
        inputs=lambda: {"idx": TOKENS, "input_pos": torch.arange(6)},
    ),
]
