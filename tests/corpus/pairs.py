"""Two modules side by side: what they differ in, and why; and such as compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, H, D, N = 32, 4, 8, 9


@dataclass(frozen=True)
class Pair:
    """Two modules with the same arguments."""

    name: str
    left: Callable[[], nn.Module]
    right: Callable[[], nn.Module]
    reasons: tuple[str, ...] = ()
    """Kinds of what is to be named as the cause, in order; empty if no cause is known."""
    outcome: str = "differs"
    first: str | None = None
    """The first stage that differs; None if not asked."""
    whole: bool = True
    """Whether all weights of one side can be put into the other."""
    given: Callable[[], dict[str, Tensor]] = lambda: {"x": _floats(2, N, WIDTH)}
    buffers: tuple[str, ...] = ()
    """Buffers that differ: they are no weights."""

    def made(self) -> tuple[nn.Module, nn.Module]:
        """Return both modules, with weights of their own each."""
        torch.manual_seed(0)
        return self.left().eval(), self.right().eval()


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Causal attention of one packed matrix, `[q | k | v]`; a step may be given as a function of the module."""

    def __init__(self, **steps: Any) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        for name, step in steps.items():
            setattr(self, name, partial(step, self))

    def enter(self, x: Tensor) -> Tensor:
        return x

    def split(self, packed: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (H, D)).transpose(1, 2) for part in packed.chunk(3, -1))

    def turn(self, x: Tensor) -> Tensor:
        return x

    def turn_key(self, x: Tensor) -> Tensor:
        return self.turn(x)

    def values(self, v: Tensor) -> Tensor:
        return v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(D)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(_future(scores), -math.inf)

    def leave(self, output: Tensor, **given: Tensor) -> Any:
        return output

    def forward(self, x: Tensor, **given: Tensor) -> Any:
        q, k, v = self.split(self.qkv(self.enter(x)))
        scores = self.mask(self.scores(self.turn(q), self.turn_key(k)))
        return self.leave(self.out((scores.softmax(-1) @ self.values(v)).transpose(1, 2).flatten(2)), **given)


def _future(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:]).triu(1).bool()


def with_(**steps: Any) -> Callable[[], nn.Module]:
    return lambda: Attention(**steps)


def _angles(length: int, start: int = 0) -> Tensor:
    return torch.outer(torch.arange(start, start + length).float(), 100.0 ** (-torch.arange(D // 2) / (D // 2)))


def halves(m: Any, x: Tensor, start: int = 0) -> Tensor:
    turns, (a, b) = _angles(x.shape[2], start), x.chunk(2, -1)
    return torch.cat([a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()], -1)


def pairs(m: Any, x: Tensor) -> Tensor:
    turns, a, b = _angles(x.shape[2]), x[..., ::2], x[..., 1::2]
    return torch.stack((a * turns.cos() - b * turns.sin(), b * turns.cos() + a * turns.sin()), -1).flatten(-2)


def _ladder(first: int, sign: int = 1) -> Any:
    """ALiBi: slopes 2^(-8h/H), counted from a first head."""

    def mask(m: Any, scores: Tensor) -> Tensor:
        slopes = torch.tensor([2.0 ** (-8 * (head + first) / H) for head in range(H)])
        places = torch.arange(scores.shape[-1])
        return Attention.mask(m, scores + sign * slopes[:, None, None] * (places - places[:, None]))

    return mask


def _window(m: Any, scores: Tensor) -> Tensor:
    return Attention.mask(m, scores).masked_fill(torch.ones(scores.shape[-2:]).tril(-4).bool(), -math.inf)


def _by_head(m: Any, packed: Tensor) -> tuple[Tensor, ...]:
    return packed.unflatten(-1, (H, 3 * D)).transpose(1, 2).chunk(3, -1)


def _exchanged(m: Any, packed: Tensor) -> tuple[Tensor, ...]:
    q, v, k = Attention.split(m, packed)
    return q, k, v


def _normed(over: str) -> Any:
    """Queries and keys with unit mean squares in each head, or over all heads."""

    def turn(m: Any, x: Tensor) -> Tensor:
        if over == "head":
            return F.rms_norm(x, x.shape[-1:])
        return x * x.square().mean((1, 3), keepdim=True).add(1e-6).rsqrt()

    return turn


def _second(factor: float, by_name: bool) -> Any:
    """Returns a second tensor too, in a tuple or by name."""

    def leave(m: Any, output: Tensor) -> Any:
        second = output.mean(1) * factor
        return {"hidden": output, "pooled": second} if by_name else (output, second)

    return leave


def _filled(fill: float) -> Any:
    """What it returns for padding is its own choice."""
    return lambda m, output, attention_mask: output.masked_fill(attention_mask[..., None] == 0, fill)


def _padded() -> dict[str, Tensor]:
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, 6:] = 0
    return {"x": _floats(2, N, WIDTH), "attention_mask": mask}


class Shared(nn.Module):
    """Query heads that share two key heads, which are repeated each or put side by side."""

    def __init__(self, tiled: bool = False, kv_heads: int = 2, order: str = "qkv") -> None:
        super().__init__()
        self.tiled, self.times = tiled, H // kv_heads
        for name in order:
            setattr(self, name, nn.Linear(WIDTH, WIDTH if name == "q" else kv_heads * D))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.tiled:
            k, v = k.repeat(1, self.times, 1, 1), v.repeat(1, self.times, 1, 1)
        else:
            k, v = k.repeat_interleave(self.times, 1), v.repeat_interleave(self.times, 1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Einsum(nn.Module):
    """Projections by an equation, which reads its weights as `in out` where a linear layer has `out in`."""

    def __init__(self) -> None:
        super().__init__()
        self.w_query, self.w_key, self.w_value = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in "qkv")
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        projected = (torch.einsum("bnd,di->bni", x, w) for w in (self.w_query, self.w_key, self.w_value))
        q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in projected)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TorchsLayer(nn.Module):
    """torch's own layer, with one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, H, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x)[0]


class ByMatrix(nn.Module):
    """A projection as `x @ weight`, with the names and the shapes of a square nn.Linear."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inner, outer)), nn.Parameter(torch.randn(outer))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def of_matrices() -> nn.Module:
    module = Shared(kv_heads=H)
    module.q, module.k, module.v, module.o = (ByMatrix(WIDTH, WIDTH) for _ in range(4))
    return module


class LowRank(nn.Module):
    """Keys and values through a narrower layer: their matrices have 7 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7), nn.Linear(7, 2 * WIDTH)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        sides = (self.q(x), *self.up(self.down(x)).chunk(2, -1))
        q, k, v = (side.unflatten(-1, (H, -1)).transpose(1, 2) for side in sides)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Around(nn.Module):
    """The same inside another module, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Buffers(nn.Module):
    """One mask and one slope a head, as buffers; a table of relative distances, whose index is a buffer."""

    def __init__(self, diagonal: int = 0, slope: float = 0.0, turned: bool = False, apart: bool = False) -> None:
        super().__init__()
        self.apart = apart
        if apart:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        else:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(2 * N - 1, H))
        ahead = torch.arange(N) - torch.arange(N)[:, None]
        self.register_buffer("tril", torch.ones(N, N).tril(diagonal))
        self.register_buffer("slopes", slope * torch.arange(1, H + 1).view(-1, 1, 1), persistent=False)
        self.register_buffer("index", (-ahead if turned else ahead) + N - 1)

    def forward(self, x: Tensor) -> Tensor:
        sides = (self.q(x), self.k(x), self.v(x)) if self.apart else self.qkv(x).chunk(3, -1)
        q, k, v = (side.unflatten(-1, (H, -1)).transpose(1, 2) for side in sides)
        ahead = torch.arange(N) - torch.arange(N)[:, None]
        scores = q @ k.mT * D**-0.5 + self.slopes * ahead + self.table[self.index].permute(2, 0, 1)
        weights = scores.masked_fill(self.tril == 0, float("-inf")).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class Tied(nn.Module):
    """Two layers after an attention, which may be one tensor."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.attention, self.a, self.b = Attention(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight if tied else self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(self.attention(x)))


def _normalized(eps: float) -> Any:
    return lambda m, x: F.layer_norm(x, (WIDTH,), eps=eps)


def _capped(cap: float) -> Any:
    return lambda m, q, k: cap * torch.tanh(3 * q @ k.mT / cap)


class Adapted(Attention):
    """An adapter of rank 2 beside the packed matrix, or its input in another order, or without its bias."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(3 * WIDTH, 2))

    def forward(self, x: Tensor, **given: Tensor) -> Any:
        projected = self.qkv(x)
        if self.way == "adapter":
            projected = projected + x @ self.down.T @ self.up.T
        if self.way == "features":
            projected = self.qkv(x.flip(-1))
        if self.way == "no bias":
            projected = F.linear(x, self.qkv.weight)
        q, k, v = self.split(projected)
        return self.out((self.mask(self.scores(q, k)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Transposed(Shared):
    """Values as `x @ weight` of a square nn.Linear."""

    def __init__(self) -> None:
        super().__init__(kv_heads=H)

    def forward(self, x: Tensor) -> Tensor:
        sides = (self.q(x), self.k(x), x @ self.v.weight + self.v.bias)
        q, k, v = (side.unflatten(-1, (-1, D)).transpose(1, 2) for side in sides)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _by_scores_of_head(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return Attention.scores(m, q, k) * torch.arange(1, H + 1).view(-1, 1, 1)


class WithSink(Attention):
    """A softmax with one more exponential in its sum."""

    def forward(self, x: Tensor, **given: Tensor) -> Any:
        q, k, v = self.split(self.qkv(x))
        exponentials = self.mask(self.scores(q, k)).exp()
        weights = exponentials / (1 + exponentials.sum(-1, keepdim=True))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Windows(Attention):
    """Attention in windows of 3 tokens, with a mask of each window."""

    def __init__(self, masked: int, factor: float = 1.0) -> None:
        super().__init__()
        self.masked, self.factor = masked, factor

    def forward(self, x: Tensor, **given: Tensor) -> Any:
        windows = x.view(x.shape[0] * (N // 3), 3, WIDTH)
        q, k, v = self.split(self.qkv(windows))
        scores = self.scores(q, k).view(x.shape[0], N // 3, H, 3, 3) * self.factor
        mask = torch.zeros(N // 3, 1, 3, 3)
        mask[self.masked, :, 0, 2] = -100.0
        weights = (scores + mask).view(-1, H, 3, 3).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Beside(nn.Linear):
    """A linear layer with an adapter of rank 2 beside it, which may be scaled."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 4 * x @ self.down.T @ self.up.T


class ExchangedLayers(Shared):
    """Keys from the layer of values, and values from that of keys."""

    def __init__(self) -> None:
        super().__init__(kv_heads=H)

    def forward(self, x: Tensor) -> Tensor:
        q, v, k = (part(x).unflatten(-1, (-1, D)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def of_adapters() -> Shared:
    torch.manual_seed(3)
    module = Shared(kv_heads=H)
    module.q, module.v = Beside(), Beside()
    return module


def merged(times: float) -> Callable[[], nn.Module]:
    """The same with the products of its adapters in its weights, this many times."""

    def made() -> nn.Module:
        module, beside = Shared(kv_heads=H), of_adapters()
        module.load_state_dict(beside.state_dict(), strict=False)
        for name in "qv":
            layer = getattr(beside, name)
            with torch.no_grad():
                getattr(module, name).weight += times * layer.up @ layer.down
        return module

    return made


RIGHT = with_()
PAIRS = [
    Pair("ExchangedLayers", ExchangedLayers, lambda: Shared(kv_heads=H), ("order", "order"), first="k_proj"),
    Pair("AdapterMerged", of_adapters, merged(4), outcome="same", whole=False),
    Pair("AdapterMergedWithoutScale", of_adapters, merged(1), ("low rank",) * 2, first="q_heads", whole=False),
    Pair("AdapterMergedOnTheLeft", merged(1), of_adapters, ("low rank",) * 2, first="q_heads", whole=False),
    Pair("Same", RIGHT, RIGHT, outcome="same"),
    Pair("RowsByHead", RIGHT, with_(split=_by_head), ("order",), first="q_heads"),
    Pair("KeysAndValuesExchanged", RIGHT, with_(split=_exchanged), ("order",)),
    Pair("HalvesAndPairs", with_(turn=halves), with_(turn=pairs), ("rotation",)),
    Pair("NotScaled", RIGHT, with_(scores=lambda m, q, k: q @ k.mT), ("scale",), first="scores"),
    Pair(
        "NotScaledAndPairs",
        with_(turn=halves, mask=lambda m, s: s),
        with_(turn=pairs, mask=lambda m, s: s, scores=lambda m, q, k: q @ k.mT * 0.1),
        ("rotation", "scale"),
    ),
    Pair("Window", RIGHT, with_(mask=_window), ("mask",)),
    Pair("NotCausal", RIGHT, with_(mask=lambda m, scores: scores), ("mask",)),
    Pair("SlopesFromZero", with_(mask=_ladder(0)), with_(mask=_ladder(1)), ("mask",), first="masked_scores"),
    Pair("SlopesRise", with_(mask=_ladder(1, -1)), with_(mask=_ladder(1)), ("mask",), first="masked_scores"),
    Pair("NormInEachHead", RIGHT, with_(turn=_normed("head")), ("norm",), first="q_heads"),
    Pair("NormOfAllHeads", with_(turn=_normed("all")), with_(turn=_normed("head")), ("norm",), first="q_heads"),
    Pair("Epsilon", with_(enter=_normalized(1e-5)), with_(enter=_normalized(1e-2)), ("number",)),
    Pair(
        "LaterPositions",
        with_(turn=halves),
        with_(turn=lambda m, x: halves(m, x, 3), turn_key=halves),
        ("position",),
    ),
    Pair("Rounded", RIGHT, with_(values=lambda m, v: v.bfloat16().float()), ("dtype",), first="v_heads"),
    Pair("HeadsMoved", RIGHT, with_(values=lambda m, v: v.roll(-1, 1)), ("order",), first="v_heads"),
    Pair("ValuesDoubled", RIGHT, with_(values=lambda m, v: 2 * v), ("scale",), first="v_heads"),
    Pair("Gelu", RIGHT, with_(leave=lambda m, output: F.gelu(output))),
    Pair("Caps", with_(scores=_capped(5.0)), with_(scores=_capped(9.0))),
    Pair("SecondReturned", with_(leave=_second(1.0, False)), with_(leave=_second(3.0, False))),
    Pair("SecondReturnedByName", with_(leave=_second(1.0, True)), with_(leave=_second(3.0, True))),
    Pair("PaddingFilled", with_(leave=_filled(0.0)), with_(leave=_filled(1.0)), ("padding",), given=_padded),
    Pair("Tiled", lambda: Shared(tiled=True), Shared, ("shared heads",)),
    Pair("RepeatedEach", Shared, lambda: Shared(tiled=True), ("shared heads",)),
    Pair("DrawnInAnotherOrder", Shared, lambda: Shared(order="kqv"), outcome="same"),
    Pair("ReadTransposed", Einsum, lambda: Shared(kv_heads=H), outcome="same"),
    Pair("ReadAsMatrices", of_matrices, lambda: Shared(kv_heads=H), outcome="same"),
    Pair("TorchsLayer", TorchsLayer, lambda: Shared(kv_heads=H), outcome="same"),
    Pair("LowRank", LowRank, lambda: Shared(kv_heads=H), whole=False),
    Pair("OtherNamesAndOrder", with_(split=_by_head), Around, outcome="same"),
    Pair(
        "MaskInABuffer",
        lambda: Buffers(diagonal=1),
        Buffers,
        reasons=("mask",),
        first="masked_scores",
        buffers=("tril",),
    ),
    Pair(
        "SlopeInABuffer",
        lambda: Buffers(slope=0.5),
        Buffers,
        reasons=("mask",),
        first="masked_scores",
        buffers=("slopes",),
    ),
    Pair(
        "IndexInABuffer",
        lambda: Buffers(turned=True),
        lambda: Buffers(apart=True),
        ("mask",),
        first="masked_scores",
        buffers=("index",),
    ),
    Pair("TiedOnTheLeft", lambda: Tied(True), lambda: Tied(False), outcome="same"),
    Pair("TiedOnTheRight", lambda: Tied(False), lambda: Tied(True), whole=False),
    Pair("NoBias", lambda: Adapted("no bias"), lambda: Adapted(""), ("term",)),
    Pair("BiasTwice", with_(leave=lambda m, output: output + m.out.bias), RIGHT, ("term",)),
    Pair("Doubled", with_(leave=lambda m, output: 2 * output), RIGHT, ("scale",)),
    Pair("Adapter", lambda: Adapted("adapter"), lambda: Adapted(""), ("low rank",)),
    Pair("FeaturesBackwards", lambda: Adapted("features"), lambda: Adapted(""), ("order",)),
    Pair("ValuesReadTransposed", Transposed, lambda: Shared(kv_heads=H), ("transposed",), first="v_proj"),
    Pair("FactorOfHeads", with_(scores=_by_scores_of_head), RIGHT, ("factor",), first="scores"),
    Pair("Sink", WithSink, RIGHT, ("factor",)),
    Pair("KeysInAnotherOrder", with_(turn_key=lambda m, k: k[:, [0, 0, 2, 2]]), RIGHT, ("order",), first="k_heads"),
    Pair("Elu", with_(values=lambda m, v: F.elu(v)), RIGHT, first="v_heads"),
    Pair("WindowAndElu", with_(mask=_window, values=lambda m, v: F.elu(v)), RIGHT, first="v_heads"),
    Pair("WindowAndGelu", with_(mask=_window, leave=lambda m, output: F.gelu(output)), RIGHT, ("mask",)),
    Pair("MasksOfWindows", lambda: Windows(1), lambda: Windows(2), ("mask",), first="masked_scores"),
    Pair("ScaleOfWindows", lambda: Windows(1, 0.5), lambda: Windows(1), ("scale",)),
    Pair(
        "PositionsBackwards", with_(turn=halves), with_(turn=lambda m, x: halves(m, x.flip(2)).flip(2)), ("position",)
    ),
    Pair(
        "WindowAndBias",
        with_(mask=lambda m, scores: _window(m, scores + 1 / (1 + scores[0, 0, 0].square()))),
        RIGHT,
        ("mask",),
        first="masked_scores",
    ),
    Pair(
        "NormAndRotation",
        with_(turn=lambda m, x: halves(m, _normed("head")(m, x))),
        RIGHT,
        ("norm",),
        first="q_heads",
    ),
]
