"""Attention made of the choices that people make, at any sizes: what a trace says of it, and that `check` accuses none.

The truth is the choices themselves; the weights are those that the module computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from hypothesis import strategies as st
from torch import Tensor, nn

import mha_inspect

HEADS, PAST, SLOTS, WINDOW, SHIFT = 6, 6, 4, 3, 3


@dataclass(frozen=True)
class Style:
    project: str
    split: str
    kv_heads: int
    share: str
    norm: str
    position: str
    shifted: bool
    scale: str
    mask: str
    softmax: str
    cache: str
    merge: str
    batch: int
    length: int
    embed: int
    head_dim: int
    single: bool

    @property
    def new(self) -> int:
        """Number of queries: a step of a loop has one."""
        return 1 if self.cache and self.single else self.length

    @property
    def offset(self) -> int:
        return PAST if self.cache else SHIFT * self.shifted

    @property
    def rotated(self) -> int:
        sizes = {"partial": self.head_dim // 4 * 2} | dict.fromkeys(("", "alibi", "relative"), 0)
        return sizes.get(self.position, self.head_dim)


@st.composite
def styles(draw: st.DrawFn) -> Style:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    cache, project = one_of("", "", "joined", "in place"), one_of("three", "packed", "beside", "matrices", "by head")
    norm, position = one_of("", "", "rms", "layer", "l2", "rms of all"), one_of("", *ROTATIONS, "alibi", "relative")
    return Style(
        project=project,
        split=one_of(*(SPLITS if project != "beside" else ("view", "einops", "movedim"))),
        kv_heads=one_of(HEADS, 3, 2, 1),
        share=one_of("repeat", "expand", "group"),
        norm="rms" if norm == "rms of all" and project in ("beside", "by head") else norm,
        position=position,
        shifted=draw(st.booleans()),
        scale=one_of("query", "scores", "both", "kernel"),
        mask=one_of("", "fill", "lowest", "add", "where", "window") if not cache else one_of("fill", "add", "window"),
        softmax=one_of(*SOFTMAXES),
        cache=cache,
        merge=one_of("reshape", "einops", "by head"),
        batch=one_of(1, 2, 3, 6),
        length=one_of(3, 4, 5, 6, 8, 10),
        embed=one_of(14, 35, 60),
        head_dim=one_of(4, 8, 10, 12),
        single=draw(st.booleans()),
    )


SPLITS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "view": lambda x, heads: x.view(*x.shape[:2], heads, -1).transpose(1, 2),
    "einops": lambda x, heads: rearrange(x, "b n (h d) -> b h n d", h=heads),
    "stack": lambda x, heads: torch.stack(x.chunk(heads, -1), 1),
    "movedim": lambda x, heads: x.unflatten(-1, (heads, -1)).movedim(2, 1),
}


def half(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * angles.repeat(1, 2).cos() + torch.cat([-b, a], -1) * angles.repeat(1, 2).sin()


def partial(x: Tensor, angles: Tensor) -> Tensor:
    size = 2 * angles.shape[-1]
    return torch.cat([half(x[..., :size], angles), x[..., size:]], -1)


def interleaved(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).flatten(-2)


def complex_numbers(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(3)


def exponentials(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.complex(x[..., ::2], x[..., 1::2]) * torch.exp(1j * angles)
    return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)


def matrices(x: Tensor, angles: Tensor) -> Tensor:
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    return (x.unflatten(-1, (-1, 1, 2)) * turns).sum(-1).flatten(3)


ROTATIONS = {
    "half": half,
    "partial": partial,
    "interleaved": interleaved,
    "complex": complex_numbers,
    "exponentials": exponentials,
    "matrices": matrices,
}


def by_hand(scores: Tensor) -> Tensor:
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "function": lambda scores: F.softmax(scores, dim=-1),
    "float32": lambda scores: scores.float().softmax(-1).type_as(scores),
    "by hand": by_hand,
    "sink": lambda scores: torch.cat([scores, torch.full_like(scores[..., :1], 0.3)], -1).softmax(-1)[..., :-1],
}


class Composed(nn.Module):
    """Attention in one style. `weights` are those of its last forward, unless a fused kernel computed them."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = style
        embed, size = style.embed, style.head_dim
        self.counts = (HEADS, style.kv_heads, style.kv_heads)
        if style.project in ("packed", "beside"):
            self.packed = nn.Linear(embed, sum(self.counts) * size)
        elif style.project == "three":
            self.a, self.b, self.c = (nn.Linear(embed, count * size) for count in self.counts)
        else:
            shapes = ((c, embed, size) if style.project == "by head" else (embed, c * size) for c in self.counts)
            self.a, self.b, self.c = (nn.Parameter(torch.randn(shape) / embed**0.5) for shape in shapes)
        self.out: Any = nn.Linear(HEADS * size, embed)
        if style.merge == "by head":
            self.out = nn.Parameter(torch.randn(HEADS, size, embed) / embed**0.5)
        widths = (HEADS * size, style.kv_heads * size) if style.norm == "rms of all" else (size, size)
        kind = {"rms": nn.RMSNorm, "rms of all": nn.RMSNorm, "layer": nn.LayerNorm}.get(style.norm)
        self.norms = nn.ModuleList(nn.Identity() if kind is None else kind(width) for width in widths)
        if style.position == "relative":
            self.table = nn.Parameter(torch.randn(64, HEADS))
        slots = PAST + (style.new + SLOTS if style.cache == "in place" else 0)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(style.batch, style.kv_heads, slots, size))
            getattr(self, name)[:, :, :PAST] = torch.randn(style.batch, style.kv_heads, PAST, size)
        rows = torch.arange(32.0)[:, None] * 10_000 ** (-torch.arange(0, style.rotated, 2) / max(style.rotated, 1))
        self.register_buffer("angles", rows)
        self.weights: Tensor | None = None

    def projected(self, x: Tensor) -> list[Tensor]:
        style = self.style
        if style.project == "by head":
            return [torch.einsum("bne,hed->bhnd", x, matrix) for matrix in (self.a, self.b, self.c)]
        if style.project == "beside":  # keys and values in one, as flash-attn packs them
            q, both = self.packed(x).split([self.counts[0] * style.head_dim, 2 * self.counts[1] * style.head_dim], -1)
            k, v = both.unflatten(-1, (2, -1, style.head_dim)).unbind(-3)
            return [SPLITS[style.split](q, self.counts[0]), k.transpose(1, 2), v.transpose(1, 2)]
        if style.project == "packed":
            parts = self.packed(x).split([count * style.head_dim for count in self.counts], -1)
        else:
            parts = [make(x) if style.project == "three" else x @ make for make in (self.a, self.b, self.c)]
        if style.norm == "rms of all":
            parts = [self.norms[0](parts[0]), self.norms[1](parts[1]), parts[2]]
        return [SPLITS[style.split](part, count) for part, count in zip(parts, self.counts, strict=True)]

    def rotated(self, x: Tensor) -> Tensor:
        turn, start = ROTATIONS.get(self.style.position), self.style.offset
        return x if turn is None else turn(x, self.angles[start : start + x.shape[2]])

    def cached(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.style.cache == "joined":
            return torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        if self.style.cache:
            self.keys[:, :, PAST : PAST + keys.shape[2]] = keys
            self.values[:, :, PAST : PAST + keys.shape[2]] = values
            return self.keys, self.values
        return keys, values

    def forward(self, x: Tensor) -> Tensor:
        style = self.style
        q, k, v = self.projected(x)
        if style.norm == "l2":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        elif style.norm != "rms of all":
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = self.rotated(q), self.rotated(k)
        k, v = self.cached(k, v)
        shared = HEADS // style.kv_heads
        if style.share == "repeat":
            k, v = (each.repeat_interleave(shared, 1) for each in (k, v))
        elif style.share == "expand":
            k, v = (each[:, :, None].expand(-1, -1, shared, -1, -1).flatten(1, 2) for each in (k, v))
        context = self.attended(q, k, v)
        if style.merge == "by head":
            return torch.einsum("bhnd,hde->bne", context, self.out)
        merged = rearrange(context, "b h n d -> b n (h d)")
        return self.out(merged if style.merge == "einops" else context.transpose(1, 2).reshape(merged.shape))

    def visible(self, place: Tensor) -> Tensor:
        """Which keys are seen, where `place` is how far each lies before its query."""
        return (place >= 0) & ((place < WINDOW) | (self.style.mask != "window")) | (self.style.mask == "")

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        style, root = self.style, self.style.head_dim**-0.5
        place = torch.arange(q.shape[2])[:, None] + (PAST if style.cache else 0) - torch.arange(k.shape[2])
        seen = self.visible(place)
        bias = None
        if style.position == "alibi":
            bias = -place.abs() * 0.5 ** torch.arange(1.0, HEADS + 1)[:, None, None]
        elif style.position == "relative":
            bias = self.table[place.clamp(-31, 31) + 31].permute(2, 0, 1)
        if style.scale == "kernel":
            mask = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=style.share == "group")
        if style.scale != "scores":
            q = q * (root if style.scale == "query" else root**0.5)
        k = k * root**0.5 if style.scale == "both" else k
        grouped = style.share == "group" and style.kv_heads < HEADS
        q = q.unflatten(1, (style.kv_heads, -1)) if grouped else q
        scores = torch.einsum("bgrnd,bgmd->bgrnm", q, k).flatten(1, 2) if grouped else q @ k.mT
        scores = scores * root if style.scale == "scores" else scores
        scores = scores if bias is None else scores + bias
        if style.mask == "add":
            scores = scores + torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        elif style.mask == "where":
            scores = torch.where(seen, scores, torch.tensor(-1e9))
        elif style.mask:
            lowest = torch.finfo(scores.dtype).min if style.mask == "lowest" else -torch.inf
            scores = scores.masked_fill(~seen, lowest)
        weights = SOFTMAXES[style.softmax](scores)
        self.weights = weights.detach()
        if grouped:
            weights = weights.unflatten(1, (style.kv_heads, -1))
            return torch.einsum("bgrnm,bgmd->bgrnd", weights, v).flatten(1, 2)
        return weights @ v


def truth(style: Style) -> dict[str, object]:
    """What the choices say."""
    many = style.new > 1
    cache = {"joined": (PAST, style.new, 0, "concatenated"), "in place": (PAST, style.new, SLOTS, "in place")}
    position: object = {"alibi": ("alibi", None, None, None, None)}.get(style.position)
    if style.position == "relative":
        position = "relative bias", None, None, None, None
    elif style.rotated:
        layout = "half" if style.position in ("half", "partial") else "interleaved"
        position = "rotary", layout, style.rotated, style.offset, style.offset
    norm = ("rms", "all") if style.norm == "rms of all" else (style.norm, "head") if style.norm else None
    return {
        "heads": (HEADS, style.kv_heads, style.head_dim),
        "kind": {"self", *["causal"] * (many and style.mask != ""), *["grouped"] * (style.kv_heads < HEADS)},
        "position": position,
        "norm": norm,
        "cache": cache.get(style.cache),
        "window": WINDOW if style.mask == "window" and many and (style.cache or style.new > WINDOW) else None,
        "bias": style.position in ("alibi", "relative"),
        "scale": round(style.head_dim**-0.5, 5),
    }


def said(attention: Any) -> dict[str, object]:
    """What a report says of the same."""
    position, norm, cache = attention.position, attention.qk_norm, attention.cache
    return {
        "heads": (attention.num_heads, attention.num_kv_heads, attention.head_dim),
        "kind": set(attention.kind),
        "position": position
        and (position.kind, position.layout, position.dims, position.query_offset, position.key_offset),
        "norm": norm and (norm.kind, norm.over),
        "cache": cache and (cache.past, cache.new, cache.empty, cache.way),
        "window": attention.window,
        "bias": attention.bias,
        "scale": round(attention.scale, 5),
    }


def test_styles(try_all: Callable[..., None]) -> None:
    def check(style: Style) -> None:
        torch.manual_seed(0)
        module, x = Composed(style).eval(), torch.randn(style.batch, style.new, style.embed)
        trace = mha_inspect.trace(module, x, keep=True)
        (attention,) = trace.attentions
        assert said(attention) == truth(style)
        formulas = " ".join(stage.formula for stage in attention.stages)
        assert all(matrix in formulas for matrix in ("W_q", "W_k", "W_v", "W_o")), formulas
        if module.weights is not None:
            weights = attention.weights.tensor
            assert torch.equal(weights[..., : module.weights.shape[-1]].reshape(module.weights.shape), module.weights)
        assert all(parameter.role for parameter in mha_inspect.params(module, x).parameters)
        causal = bool(style.mask) and style.new > 1
        intent = mha_inspect.Intent(causal=causal, window=WINDOW if causal and style.mask == "window" else None)
        assert mha_inspect.check(module, x, intent=intent).findings == ()

    try_all(check, styles(), 80)


class Planted(Composed):
    """Counts what it rotates, first the query, and may leave the key alone."""

    fault = ""

    def forward(self, x: Tensor) -> Tensor:
        self.turned = 0
        return super().forward(x)

    def rotated(self, x: Tensor) -> Tensor:
        self.turned += 1
        return x if self.fault == "key left alone" and self.turned == 2 else super().rotated(x)


class Misturned(Planted):
    """Rotates only the query, the key in another layout, or the values too."""

    def rotated(self, x: Tensor) -> Tensor:
        if self.fault != "other layout" or not self.turned:
            return super().rotated(x)
        start, other = self.style.offset, interleaved if self.style.position == "half" else half
        return other(x, self.angles[start : start + x.shape[2]])

    def cached(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return super().cached(keys, super().rotated(values) if self.fault == "values" else values)


def test_a_wrong_rotation_is_the_one_finding(try_all: Callable[..., None]) -> None:
    def check(case: tuple[Style, str]) -> None:
        style, fault = case
        torch.manual_seed(0)
        module, x = Misturned(style).eval(), torch.randn(style.batch, style.new, style.embed)
        module.fault = fault
        causal = bool(style.mask)
        intent = mha_inspect.Intent(causal=causal, window=WINDOW if style.mask == "window" else None)
        findings = mha_inspect.check(module, x, intent=intent).findings
        assert [(finding.check, finding.sure) for finding in findings] == [("rotary", True)]

    turning = styles().filter(lambda style: style.position in ("half", "interleaved") and style.new > 1)
    try_all(check, st.tuples(turning, st.sampled_from(("key left alone", "other layout", "values"))), 40)


class Misshared(Planted):
    """Shares its key heads in turns: query head h uses key head h % heads."""

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = HEADS // self.style.kv_heads
        return super().attended(q, *(each[:, ::shared].repeat(1, shared, 1, 1) for each in (k, v)))


def test_shared_heads_in_turns_are_the_one_finding(try_all: Callable[..., None]) -> None:
    def check(style: Style) -> None:
        torch.manual_seed(0)
        module, x = Misshared(style).eval(), torch.randn(style.batch, style.new, style.embed)
        findings = mha_inspect.check(module, x).findings
        assert [(finding.check, finding.sure) for finding in findings] == [("grouped", True)]

    def shares(style: Style) -> bool:
        return style.share != "group" and style.kv_heads in (2, 3) and style.project != "by head"

    try_all(check, styles().filter(shares), 30)


class Mismasked(Planted):
    """Sees other keys than it should, and takes a mask of `batch key`, True where there is a token."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        self.keep = torch.ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        return super().forward(x)

    def visible(self, place: Tensor) -> Tensor:
        shifted = {"early": place - 1, "reversed": -place}.get(self.fault, place)
        seen, keep = super().visible(shifted), self.keep[:, None, None]
        if self.fault == "late":
            seen |= place == -1
        elif self.fault == "inverted":
            seen = ~seen
        elif self.fault == "over the heads":
            seen = seen[:HEADS, None]
        elif self.fault == "over the batch":
            seen = seen[: len(keep), None, None]
        elif self.fault == "padding of the queries":
            keep = keep.mT
        elif self.fault == "padding of the next item":
            keep = keep.roll(1, 0)
        elif self.fault == "padding one late":
            keep = keep.roll(1, -1)
        elif self.fault == "no padding":
            keep = torch.ones_like(keep)
        seen = seen & keep
        return seen | (place == 0) & ~seen.any(-1, keepdim=True)  # each query keeps a key


OF_THE_MASK = ("", "late", "early", "reversed", "inverted", "over the heads", "over the batch")
OF_PADDING = ("padding of the queries", "padding of the next item", "padding one late", "no padding")


def test_a_wrong_mask_is_the_one_finding(try_all: Callable[..., None]) -> None:
    def check(case: tuple[Style, str, bool]) -> None:
        style, fault, padded = case
        torch.manual_seed(0)
        module, x = Mismasked(style).eval(), torch.randn(style.batch, style.new, style.embed)
        module.fault = fault
        given = {"keep": torch.ones(x.shape[:2], dtype=torch.bool)} if padded else {}
        intent = mha_inspect.Intent(causal=True, window=WINDOW if style.mask == "window" else None)
        intent = replace(intent, padding="keep", padding_true="keep") if padded else intent
        findings = mha_inspect.check(module, x, intent=intent, **given).findings
        expected = [] if not fault else ["padding" if fault in OF_PADDING else "causal"]
        assert [finding.check for finding in findings if finding.sure] == expected
        findings = mha_inspect.check(module, x, **given).findings
        assert [finding.check for finding in findings if finding.check != "parameters"] == expected

    masked = styles().filter(lambda style: style.mask and not style.cache and style.length > HEADS >= style.batch > 1)
    alone = st.tuples(masked, st.sampled_from(OF_THE_MASK), st.booleans())
    try_all(check, alone | st.tuples(masked, st.sampled_from(OF_PADDING), st.just(True)), 60)


class Detached(Planted):
    """Detaches its keys or its values."""

    def cached(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().cached(keys, values)
        return (keys.detach(), values) if self.fault == "key" else (keys, values.detach())


def test_what_is_detached_is_the_one_finding(try_all: Callable[..., None]) -> None:
    def check(case: tuple[Style, str]) -> None:
        style, fault = case
        torch.manual_seed(0)
        module, x = Detached(style).eval(), torch.randn(style.batch, style.new, style.embed)
        module.fault = fault
        name = "b" if fault == "key" else "c"
        says = f"{name}{'.weight' * (style.project == 'three')} projects the {fault} and gets no gradient"
        if style.project in ("packed", "beside"):
            start, *_, end = accumulate(count * style.head_dim for count in module.counts)
            first, last = (start, (start + end) // 2 - 1) if fault == "key" else ((start + end) // 2, end - 1)
            says = f"packed.weight projects the query, key and value and gets no gradient for features {first}–{last}"
        (finding,) = mha_inspect.check(module, x, only=["parameters"]).findings
        assert finding.sure
        assert finding.sentence.startswith(says)

    fresh = styles().filter(lambda style: not style.cache)
    try_all(check, st.tuples(fresh, st.sampled_from(("key", "value"))), 30)
