"""Attention that runs and is wrong, each beside a twin that differs in one step: after threads that people wrote.

A case replaces steps of `Right`. The declared intent is the smallest that tells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.checks.intent import Intent

H, D, N, B = 4, 6, 10, 3
E = H * D

Steps = Mapping[str, Any] | Callable[[], nn.Module]
"""A step of `Right` to the function that takes its place, its first argument the module; or to a setting or a part.

Where modules are classes of their own, what makes them.
"""


def future(scores: Tensor, diagonal: int = 1) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)


def before(scores: Tensor) -> Tensor:
    """How far each key lies before its query."""
    return torch.arange(scores.shape[-2])[:, None] - torch.arange(scores.shape[-1])


def angles(n: int, start: int = 0, width: int = D) -> Tensor:
    return torch.outer(torch.arange(start, start + n).float(), 10.0 ** -torch.arange(0, width, 2).float())


def halves(x: Tensor, start: int = 0) -> Tensor:
    both = torch.cat([angles(x.shape[-2], start, x.shape[-1])] * 2, -1)
    a, b = x.chunk(2, -1)
    return x * both.cos() + torch.cat((-b, a), -1) * both.sin()


def pairs(x: Tensor, start: int = 0) -> Tensor:
    turn = angles(x.shape[-2], start, x.shape[-1])
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()), -1).flatten(-2)


class Right(nn.Module):
    """Attention as it should be; a case gives other steps."""

    def __init__(self, kv_heads: int = H, **steps: Any) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(E, E), nn.Linear(E, E)
        self.k, self.v = nn.Linear(E, kv_heads * D), nn.Linear(E, kv_heads * D)
        for name, step in steps.items():
            is_part = isinstance(step, partial)
            setattr(self, name, step() if is_part else partial(step, self) if callable(step) else step)

    def forward(self, x: Tensor) -> Any:
        return self.leave(self.join(self.attend(*self.heads(self.enter(x)))))

    def enter(self, x: Tensor) -> Tensor:
        return x

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, D).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weigh(self.mask(q @ k.transpose(-1, -2) / math.sqrt(D))) @ v

    def mask(self, scores: Tensor) -> Tensor:
        return scores

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def leave(self, x: Tensor) -> Tensor:
        return self.o(x)


class Padded(Right):
    """Takes a mask of `batch key`, True where there is a token."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.padding = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        return super().forward(x)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.padding[:, None, None, :], -1e9)


class TorchsLayer(nn.Module):
    """torch's own layer, with a mask that is given to it as a function says."""

    def __init__(self, given: Callable[[Tensor], Tensor] = lambda mask: mask, **settings: Any) -> None:
        super().__init__()
        self.given, self.layer = given, nn.MultiheadAttention(E, H, **{"batch_first": True, **settings})

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.layer(x, x, x, key_padding_mask=None if mask is None else self.given(mask.bool()))[0]


class Cached(Right):
    """Returns its keys and values, and goes on from them."""

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = self.heads(x)
        start = 0 if past is None else past[0].shape[2]
        q, k = self.turn(q, start), self.turn(k, start)
        if past is not None:
            k, v = self.after(past[0], k), self.after(past[1], v)
        return self.o(self.join(self.attend(q, k, v))), (k, v)

    def turn(self, x: Tensor, start: int) -> Tensor:
        return halves(x, start)

    def after(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.cat((past, new), 2)

    def mask(self, scores: Tensor) -> Tensor:
        n, m = scores.shape[-2:]
        return scores.masked_fill(future(scores, 1 + m - n), -math.inf)


class CachedIfAsked(Cached):
    """Returns None in place of its keys and values if they are not asked for, as many decoders do."""

    def forward(self, x: Tensor, past: Any = None, use_cache: bool = False) -> tuple[Tensor, Any]:
        output, kept = super().forward(x, past)
        return output, kept if use_cache else (None, None)


@dataclass(frozen=True)
class Case:
    """A mistake with the intent that tells it."""

    name: str
    check: str
    """The check that is to find it."""
    wrong: Steps | None
    """None of what is right and looks like that mistake."""
    twin: Steps = field(default_factory=dict)
    intent: Intent = field(default_factory=Intent)
    base: Callable[..., nn.Module] = Right
    inputs: Callable[[], dict[str, Tensor]] = lambda: {"x": torch.randn(B, N, E)}
    alone: bool = True
    """Whether it is found with nothing declared."""
    suspected: bool = False
    """Whether it may be meant, so that it is no more than suspected."""
    in_trace: bool = False
    """Whether the one run of a trace shows it."""
    asked: bool = True
    """Whether the check has something to test in the twin, and passes."""

    def make(self, wrong: bool) -> nn.Module:
        """Return the module with the mistake, or its twin."""
        steps = self.wrong if wrong else self.twin
        assert steps is not None, "no mistake is known"
        return steps() if callable(steps) else self.base(**steps)


def folded(
    fold: Callable[[Tensor], Tensor] = lambda t: t.unflatten(-1, (H, D)).transpose(1, 2).flatten(0, 1),
    unfold: Callable[[Tensor], Tensor] = lambda t: t.unflatten(0, (-1, H)).transpose(1, 2).flatten(2),
    weigh: Callable[[Any, Tensor], Tensor] = lambda m, s: s.softmax(-1),
) -> Steps:
    """Steps in which batch and heads are one dimension."""
    return {"split": lambda m, t: fold(t), "weigh": weigh, "join": lambda m, t: unfold(t)}


def masked(bar: Callable[[Tensor], Tensor], number: float = -math.inf) -> Steps:
    """A step that masks scores where a function of them says."""
    return {"mask": lambda m, s: s.masked_fill(bar(s), number)}


def padded(keep: Callable[[Tensor], Tensor]) -> Steps:
    """A step that keeps scores where a function of the padding mask says."""
    return {"mask": lambda m, s: s.masked_fill(~keep(m.padding), -1e9)}


def keys_of(project: Callable[[Any, Tensor], Tensor], value: Callable[[Any, Tensor], Tensor] | None = None) -> Steps:
    """Steps in which keys, or values too, are what a function makes of the module and the input."""
    return {"heads": lambda m, x: (m.split(m.q(x)), m.split(project(m, x)), m.split(value(m, x) if value else m.v(x)))}


def repeated(key: Callable[[Tensor], Tensor], value: Callable[[Tensor], Tensor] | None = None) -> Steps:
    """Steps in which two key heads, and value heads, become four."""
    return {"kv_heads": 2, "attend": lambda m, q, k, v: Right.attend(m, q, key(k), (value or key)(v))}


def turned(query: Callable[[Tensor], Tensor], key: Callable[[Tensor], Tensor]) -> Steps:
    return {"attend": lambda m, q, k, v: Right.attend(m, query(q), key(k), v)}


def scaled(score: Callable[[Tensor, Tensor], Tensor]) -> Steps:
    return {"attend": lambda m, q, k, v: score(q, k).softmax(-1) @ v}


def fused(**settings: Any) -> Steps:
    """torch's fused kernel; a setting may be a function of the module and the queries."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = {name: value(m, q) if callable(value) else value for name, value in settings.items()}
        return F.scaled_dot_product_attention(q, k, v, **given)

    return {"attend": attend}


def _by_view(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], H, -1, D)


def _over_heads(x: Tensor) -> Tensor:
    """The rotation of a tensor whose heads stand where it looks for positions."""
    return halves(x.transpose(1, 2)).transpose(1, 2)


def _tiled(x: Tensor) -> Tensor:
    return x.repeat(1, 2, 1, 1)


def _each(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


def _keeps_keys(m: Any, x: Tensor, *, wrong: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of a cache that nobody empties."""
    q, k, v = Right.heads(m, x)
    k, m.past = (k + m.past if wrong and m.past is not None else k), k.detach()
    return q, k, v


def _norm(x: Tensor, *dims: int) -> Tensor:
    return (x - x.mean(dims, keepdim=True)) / x.std(dims, keepdim=True)


def _normed(m: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads behind a norm over the features of all of them."""
    return m.split(_norm(m.q(x), -1)), m.split(_norm(m.k(x), -1)), m.split(m.v(x))


def _mean(m: Any, x: Tensor) -> Tensor:
    return (x * m.padding[..., None]).sum(1, True) / m.padding.sum(1)[:, None, None]


def _bar_without_keys(m: Any, s: Tensor) -> Tensor:
    return ~m.padding[:, None, None, :] | future(s)


def _batch_by_view(flip: Callable[[Tensor], Tensor]) -> Steps:
    """Layers that have the sequence first, between others."""
    return {
        "enter": lambda m, x: flip(x),
        "split": lambda m, t: t.reshape(len(t), -1, D).transpose(0, 1),
        "join": lambda m, t: t.transpose(0, 1).reshape(t.shape[1], -1, E),
        "leave": lambda m, t: m.o(t.transpose(0, 1)),
    }


def _no_key() -> dict[str, Tensor]:
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, :2] = False
    return {"x": torch.randn(B, N, E), "mask": mask}


def _by_group(order: str) -> Steps:
    """Key heads `g` that groups `r` of query heads share, without a copy; `order` is that of the split query heads."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (torch.einsum(f"b{order}qd,bgkd->bgrqk", q.unflatten(1, (2, 2)), k) / math.sqrt(D)).softmax(-1)
        return torch.einsum(f"bgrqk,bgkd->b{order}qd", weights, v).flatten(1, 2)

    return {"kv_heads": 2, "attend": attend}


def _capped(scores: Tensor) -> Tensor:
    return 5 * torch.tanh(scores / 5)


def _left_padded(rows: slice) -> Steps:
    """A causal mask and the padding of some rows, with the lowest number."""

    def mask(m: Any, s: Tensor) -> Tensor:
        return s.masked_fill(~m.padding[rows, None, None, :] | future(s), torch.finfo(s.dtype).min)

    return {"mask": mask}


def _pads_on_the_left() -> dict[str, Tensor]:
    mask = torch.ones(B, N)
    mask[1:, :4] = 0
    return {"x": torch.randn(B, N, E), "mask": mask}


CAUSAL, CACHE, SCALE = Intent(causal=True), Intent(cache="past"), Intent(scale="sqrt_head_dim")
WINDOW, PADDING = Intent(causal=True, window=4), Intent(padding="mask", padding_true="keep")
LEFT = Intent(padding="mask", padding_true="keep", padding_side="left")

meant = partial(partial, Case, alone=False)
"""A case that only a declared intent tells."""
_causal, _window = meant(check="causal", intent=CAUSAL), meant(check="window", intent=WINDOW)
_scale = meant(check="scale", intent=SCALE)
_padding = meant(check="padding", intent=PADDING, base=Padded)
_cache = meant(check="cache", intent=CACHE, base=Cached)
torch.manual_seed(7)  # the tests' own: the reference has the weights of the module
_reference = meant(check="reference", intent=Intent(reference=Right()))


CASES = [
    # reczoo/FuxiCTR#30
    Case("SplitByView", "heads", {"split": lambda m, x: _by_view(x), "join": lambda m, x: x.reshape(len(x), -1, E)}),
    # the view and its opposite, of a multiple of as many tokens as heads
    Case(
        "QueriesSplitAndMergedByView",
        "heads",
        {
            "heads": lambda m, x: (_by_view(m.q(x)), m.split(m.k(x)), m.split(m.v(x))),
            "join": lambda m, x: x.reshape(len(x), -1, E),
        },
        inputs=lambda: {"x": torch.randn(B, 2 * H, E)},
    ),
    # 649453932/Chinese-Text-Classification-Pytorch#53: view(batch * heads, -1, head_dim)
    Case(
        "SplitIntoBatch",
        "heads",
        folded(lambda t: t.reshape(-1, t.shape[1], D), lambda t: t.reshape(-1, t.shape[1], E)),
        folded(),
    ),
    # jsbaan/transformer-from-scratch#6
    Case("MergedByReshape", "heads", {"join": lambda m, x: x.reshape(len(x), x.shape[2], E)}),
    # gazelle93/Transformer-Various-Positional-Encoding#1: folded as (batch heads), unfolded as (heads batch)
    Case(
        "UnfoldedInTheOtherOrder",
        "heads",
        folded(unfold=lambda t: t.unflatten(0, (H, -1)).permute(1, 2, 0, 3).flatten(2)),
        folded(),
    ),
    Case("WeightsCutOff", "softmax", {"weigh": lambda m, s: s.softmax(-1) * (s > 0)}),
    Case("SoftmaxOfSoftmax", "softmax", {"weigh": lambda m, s: s.softmax(-1).softmax(-1)}),
    Case(
        "MaskAfterSoftmax",
        "softmax",
        {"weigh": lambda m, s: s.softmax(-1).masked_fill(future(s), 0)},
        masked(future),
    ),
    Case("TrilAfterSoftmax", "softmax", {"weigh": lambda m, s: s.softmax(-1).tril()}, masked(future), intent=CAUSAL),
    Case(
        "TrilWithoutSum",
        "softmax",
        {"weigh": lambda m, s: s.softmax(-1).tril() / s.softmax(-1).sum(-1, keepdim=True)},
        {"weigh": lambda m, s: s.softmax(-1).tril() / s.softmax(-1).tril().sum(-1, keepdim=True)},
        intent=CAUSAL,
    ),
    Case("MaskOfTheOtherSign", "masking", masked(future, 1e9), masked(future, -1e9)),
    _causal("CausalWithoutItself", wrong=masked(lambda s: future(s, 0), -1e9), twin=masked(future, -1e9)),
    _causal("CausalForgotten", wrong=fused(), twin=fused(is_causal=True)),
    # the triangle lies over the heads' axis and is broadcast over the queries
    _causal("CausalAlongHeads", wrong=masked(lambda s: future(s)[:H][None, :, None], -1e9), twin=masked(future, -1e9)),
    # a norm over the positions tells each of the later ones
    _causal(
        "NormOverPositions",
        wrong={**masked(future, -1e9), "enter": lambda m, x: _norm(x, 1, 2)},
        twin={**masked(future, -1e9), "enter": lambda m, x: _norm(x, 2)},
    ),
    # a convolution before causal attention, padded on both sides
    _causal(
        "ConvolutionSeesAhead",
        wrong={
            **masked(future, -1e9),
            "conv": partial(nn.Conv1d, E, E, 3),
            "enter": lambda m, x: m.conv(F.pad(x.mT, (1, 1))).mT,
        },
        twin={
            **masked(future, -1e9),
            "conv": partial(nn.Conv1d, E, E, 3),
            "enter": lambda m, x: m.conv(F.pad(x.mT, (2, 0))).mT,
        },
    ),
    # huggingface/transformers#39408: a window of 4 that sees 5
    _window(
        "WindowOneWide",
        wrong=masked(lambda s: (before(s) < 0) | (before(s) > 4)),
        twin=masked(lambda s: (before(s) < 0) | (before(s) >= 4)),
    ),
    _window(
        "WindowOneNarrow",
        wrong=masked(lambda s: future(s) | ~future(s, -2), -1e9),
        twin=masked(lambda s: future(s) | ~future(s, -3), -1e9),
    ),
    # pytorch/pytorch#27968 and others: True means the opposite
    _padding("PaddingTurnedRound", wrong=padded(lambda keep: ~keep[:, None, None, :])),
    _padding("PaddingOnQueries", wrong=padded(lambda keep: keep[:, None, :, None])),
    # lsdefine/attention-is-all-you-need-keras#36: mask and heads are folded in different orders
    _padding(
        "PaddingInTheOtherOrder",
        wrong={**folded(), **padded(lambda keep: keep.repeat(H, 1)[:, None, :])},
        twin={**folded(), **padded(lambda keep: keep.repeat_interleave(H, 0)[:, None, :])},
    ),
    _padding(
        "GivenPaddingOfFirstRow",
        wrong=_left_padded(slice(0, 1)),
        twin=_left_padded(slice(None)),
        inputs=_pads_on_the_left,
        intent=replace(LEFT, causal=True),
    ),
    # the cap of Gemma 2, after the mask
    Case(
        "MaskBeforeCap",
        "masking",
        {"mask": lambda m, s: _capped(s.masked_fill(future(s), -1e9))},
        {"mask": lambda m, s: _capped(s).masked_fill(future(s), -1e9)},
        intent=CAUSAL,
    ),
    _padding(
        "PaddingAsBoolForFused",
        wrong=fused(attn_mask=lambda m, q: ~m.padding[:, None, None, :]),
        twin=fused(attn_mask=lambda m, q: m.padding[:, None, None, :]),
    ),
    # torch's layer ignores where key_padding_mask is True: facebookresearch/detr#96
    _padding("PaddingForTorchsLayer", wrong={}, twin={"given": torch.logical_not}, base=TorchsLayer),
    # a mean over all tokens, padding among them, is taken off first
    _padding(
        "MeanOfPadding",
        wrong={"enter": lambda m, x: x - x.mean(1, keepdim=True)},
        twin={"enter": lambda m, x: x - _mean(m, x)},
    ),
    # huggingface/trl#469: positions are counted from the padding on the left
    _padding(
        "PositionsOfPadding",
        wrong={
            "place": partial(nn.Embedding, N + 1, E),
            "enter": lambda m, x: x + m.place(torch.arange(x.shape[1])[None]),
        },
        twin={
            "place": partial(nn.Embedding, N + 1, E),
            "enter": lambda m, x: x + m.place((m.padding.long().cumsum(-1) - 1).clamp(min=0)),
        },
        intent=LEFT,
    ),
    # pytorch/pytorch#41508: causal and padding on the left leave a query without keys
    Case(
        "NoKeyLeft",
        "finite",
        {"mask": lambda m, s: s.masked_fill(_bar_without_keys(m, s), -math.inf)},
        {"mask": lambda m, s: s.masked_fill(_bar_without_keys(m, s) & ~torch.eye(s.shape[-1]).bool(), -math.inf)},
        base=Padded,
        inputs=_no_key,
    ),
    # aipixel/AEMatter#3: torch's layer has the sequence first, and is given the batch first
    Case("BatchNotFirst", "batch", {"batch_first": False}, intent=Intent(batch_axis=0), base=TorchsLayer, alone=False),
    # rish-16/tokenlearner-pytorch#1: a view where a transpose belongs, between layers that have the sequence first
    Case(
        "BatchByView",
        "batch",
        _batch_by_view(lambda x: x.reshape(x.shape[1], -1, E)),
        _batch_by_view(lambda x: x.transpose(0, 1)),
    ),
    _scale("NoScale", wrong=scaled(lambda q, k: q @ k.mT)),
    # the queries are scaled, and the fused kernel scales again
    _scale(
        "ScaledTwice",
        wrong={"attend": lambda m, q, k, v: F.scaled_dot_product_attention(q * D**-0.5, k, v)},
        twin={"attend": lambda m, q, k, v: F.scaled_dot_product_attention(q * D**-0.5, k, v, scale=1.0)},
    ),
    # onnx/onnx#7274: tiled where torch repeats each
    Case("Tiled", "grouped", repeated(_tiled), repeated(_each)),
    # the norm of all key heads together moves each of them
    Case("TiledBehindNorm", "grouped", {**repeated(_tiled), "heads": _normed}, {**repeated(_each), "heads": _normed}),
    Case("GroupsBeforeKeyHeads", "grouped", _by_group("rg"), _by_group("gr")),
    # raiyanyahya/how-to-train-your-gpt#6: halves of one layout, pairs of another
    Case("RotaryMixed", "rotary", turned(halves, pairs), turned(halves, halves)),
    Case("RotaryOfQueriesAlone", "rotary", turned(pairs, lambda k: k), turned(pairs, pairs)),
    Case("RotaryBackwards", "rotary", turned(halves, lambda k: halves(k.flip(-2)).flip(-2)), turned(halves, halves)),
    # the heads stand where the rotation looks for positions
    Case("RotaryByHead", "rotary", turned(_over_heads, _over_heads), turned(halves, halves)),
    Case("QueryServesTwice", "parameters", keys_of(lambda m, x: m.q(x))),
    Case("KeyServesTwice", "parameters", keys_of(lambda m, x: m.k(x), lambda m, x: m.k(x))),
    Case("OutputForgotten", "parameters", {"leave": lambda m, x: x}),
    Case("KeysCutOff", "parameters", keys_of(lambda m, x: m.k(x).detach())),
    # karpathy/nanoGPT#240, pytorch/pytorch#124464
    Case("DropoutAlways", "repeat", fused(dropout_p=0.3), fused(dropout_p=lambda m, q: 0.3 if m.training else 0.0)),
    Case(
        "DropoutWithoutFlag",
        "repeat",
        {"weigh": lambda m, s: F.dropout(s.softmax(-1), 0.2, training=True)},
        {"weigh": lambda m, s: F.dropout(s.softmax(-1), 0.2, training=m.training)},
    ),
    Case(
        "MaskInTrainingAlone",
        "training",
        {"mask": lambda m, s: s.masked_fill(future(s), -1e9) if m.training else s},
        masked(future, -1e9),
    ),
    Case(
        "WritesIntoItsInput",
        "inputs",
        {"enter": lambda m, x: x.add_(torch.ones(E).cumsum(0) / E)},
        {"enter": lambda m, x: x + torch.ones(E).cumsum(0) / E},
    ),
    Case(
        "KeepsKeysBetweenCalls",
        "repeat",
        {"past": None, "heads": lambda m, x: _keeps_keys(m, x, wrong=True)},
        {"past": None, "heads": lambda m, x: _keeps_keys(m, x, wrong=False)},
    ),
    # scaled after the product, in half precision
    Case(
        "HalfOverflows",
        "finite",
        {"enter": lambda m, x: x * 40, **scaled(lambda q, k: (q * 40) @ (k * 40).mT / 1600 / math.sqrt(D))},
        {"enter": lambda m, x: x * 40},
        inputs=lambda: {"x": torch.randn(B, N, E).half()},
    ),
    # pytorch/executorch#21749: is_causal begins top left
    _cache(
        "CacheTopLeft",
        wrong=masked(lambda s: future(s, 1 if s.shape[-2] > 1 else s.shape[-1])),
    ),
    _cache("CacheIfAsked", wrong={"turn": lambda m, x, start: halves(x, 0)}, base=CachedIfAsked),
    _cache("CacheTurnedRound", wrong={"after": lambda m, past, new: torch.cat((new, past), 2)}),
    # mlx-node/mlx-node#24: a chunk behind a cache is not masked at all
    _cache("CacheOpenChunk", wrong={"mask": lambda m, s: s if s.shape[-1] > s.shape[-2] else Cached.mask(m, s)}),
    _reference("KeyAndValueSwapped", wrong=keys_of(lambda m, x: m.v(x), lambda m, x: m.k(x))),
    # view(…, head_dim, heads) where weights are (heads head_dim)
    _reference("FeaturesBeforeHeads", wrong={"split": lambda m, x: x.unflatten(-1, (D, H)).permute(0, 3, 1, 2)}),
]
MADE = {case.name: case.make for case in CASES}
