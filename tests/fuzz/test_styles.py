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


NORMS: dict[str, type[nn.Module]] = {"rms": nn.RMSNorm, "rms of all": nn.RMSNorm, "layer": nn.LayerNorm}


def matrix(*shape: int, reads: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / reads**0.5)


class Composed(nn.Module):
    """Attention in one style. `weights` are those of its last forward, unless a fused kernel computed them."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = style
        self.counts = (HEADS, style.kv_heads, style.kv_heads)
        self.make_projections()
        self.norms = nn.ModuleList(NORMS.get(style.norm, nn.Identity)(width) for width in self.normed_widths())
        if style.position == "relative":
            self.table = nn.Parameter(torch.randn(64, HEADS))
        slots = PAST + style.new + SLOTS if style.cache == "in place" else PAST
        for name in ("keys", "values"):
            cache = torch.zeros(style.batch, style.kv_heads, slots, style.head_dim)
            cache[:, :, :PAST] = torch.randn(style.batch, style.kv_heads, PAST, style.head_dim)
            self.register_buffer(name, cache)
        rows = torch.arange(32.0)[:, None] * 10_000 ** (-torch.arange(0, style.rotated, 2) / max(style.rotated, 1))
        self.register_buffer("angles", rows)
        self.weights: Tensor | None = None

    def make_projections(self) -> None:
        embed, size = self.style.embed, self.style.head_dim
        match self.style.project:
            case "packed" | "beside":
                self.packed = nn.Linear(embed, sum(self.counts) * size)
            case "three":
                self.a, self.b, self.c = (nn.Linear(embed, count * size) for count in self.counts)
            case "by head":
                self.a, self.b, self.c = (matrix(count, embed, size, reads=embed) for count in self.counts)
            case "matrices":
                self.a, self.b, self.c = (matrix(embed, count * size, reads=embed) for count in self.counts)
        self.out: Any = nn.Linear(HEADS * size, embed)
        if self.style.merge == "by head":
            self.out = matrix(HEADS, size, embed, reads=embed)

    def normed_widths(self) -> tuple[int, int]:
        """Return over how many features the norms of queries and keys go."""
        size = self.style.head_dim
        return (HEADS * size, self.style.kv_heads * size) if self.style.norm == "rms of all" else (size, size)

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
        k, v = self.shared(k), self.shared(v)
        context = self.attended(q, k, v)
        if style.merge == "by head":
            return torch.einsum("bhnd,hde->bne", context, self.out)
        merged = rearrange(context, "b h n d -> b n (h d)")
        return self.out(merged if style.merge == "einops" else context.transpose(1, 2).reshape(merged.shape))

    def shared(self, heads: Tensor) -> Tensor:
        """Return key or value heads as often as there are query heads, unless the product groups them."""
        times = HEADS // self.style.kv_heads
        if self.style.share == "repeat":
            return heads.repeat_interleave(times, 1)
        if self.style.share == "expand":
            return heads[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
        return heads

    def visible(self, place: Tensor) -> Tensor:
        """Which keys are seen, where `place` is how far each lies before its query."""
        if self.style.mask == "":
            return torch.ones(place.shape, dtype=torch.bool)
        if self.style.mask == "window":
            return (place >= 0) & (place < WINDOW)
        return place >= 0

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        past = PAST if self.style.cache else 0
        place = torch.arange(q.shape[2])[:, None] + past - torch.arange(k.shape[2])
        seen, bias = self.visible(place), self.bias(place)
        if self.style.scale == "kernel":
            mask = seen if bias is None else bias.masked_fill(~seen, -torch.inf)
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=self.style.share == "group")
        scores = self.scores(q, k)
        if bias is not None:
            scores = scores + bias
        weights = SOFTMAXES[self.style.softmax](self.masked(scores, seen))
        self.weights = weights.detach()
        return self.average(weights, v)

    def bias(self, place: Tensor) -> Tensor | None:
        """Return what is added to the scores, `heads query key`."""
        if self.style.position == "alibi":
            return -place.abs() * 0.5 ** torch.arange(1.0, HEADS + 1)[:, None, None]
        if self.style.position == "relative":
            return self.table[place.clamp(-31, 31) + 31].permute(2, 0, 1)
        return None

    @property
    def is_grouped(self) -> bool:
        return self.style.share == "group" and self.style.kv_heads < HEADS

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Return scores, `batch heads query key`, scaled at one of three places."""
        root = self.style.head_dim**-0.5
        if self.style.scale == "query":
            q = q * root
        elif self.style.scale == "both":
            q, k = q * root**0.5, k * root**0.5
        if self.is_grouped:
            q = q.unflatten(1, (self.style.kv_heads, -1))
            products = torch.einsum("bgrnd,bgmd->bgrnm", q, k).flatten(1, 2)
        else:
            products = q @ k.mT
        return products * root if self.style.scale == "scores" else products

    def masked(self, scores: Tensor, seen: Tensor) -> Tensor:
        match self.style.mask:
            case "":
                return scores
            case "add":
                return scores + torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            case "where":
                return torch.where(seen, scores, torch.tensor(-1e9))
            case "lowest":
                return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return scores.masked_fill(~seen, -torch.inf)

    def average(self, weights: Tensor, v: Tensor) -> Tensor:
        if not self.is_grouped:
            return weights @ v
        weights = weights.unflatten(1, (self.style.kv_heads, -1))
        return torch.einsum("bgrnm,bgmd->bgrnd", weights, v).flatten(1, 2)


def truth(style: Style) -> dict[str, object]:
    """What the choices say."""
    cache = {"joined": (PAST, style.new, 0, "concatenated"), "in place": (PAST, style.new, SLOTS, "in place")}
    return {
        "heads": (HEADS, style.kv_heads, style.head_dim),
        "kind": kinds(style),
        "position": position_of(style),
        "norm": norm_of(style),
        "cache": cache.get(style.cache),
        "window": WINDOW if hides_by_window(style) else None,
        "bias": style.position in ("alibi", "relative"),
        "scale": round(style.head_dim**-0.5, 5),
    }


def kinds(style: Style) -> set[str]:
    kinds = {"self"}
    if style.new > 1 and style.mask:
        kinds.add("causal")
    if style.kv_heads < HEADS:
        kinds.add("grouped")
    return kinds


def position_of(style: Style) -> tuple[object, ...] | None:
    """Return kind, layout, rotated features, and the first position of queries and keys."""
    if style.position in ("alibi", "relative"):
        kind = "alibi" if style.position == "alibi" else "relative bias"
        return kind, None, None, None, None
    if not style.rotated:
        return None
    layout = "half" if style.position in ("half", "partial") else "interleaved"
    return "rotary", layout, style.rotated, style.offset, style.offset


def norm_of(style: Style) -> tuple[str, str] | None:
    if style.norm == "rms of all":
        return "rms", "all"
    return (style.norm, "head") if style.norm else None


def hides_by_window(style: Style) -> bool:
    """Return whether a window hides a key that a causal mask does not: one query shows no window."""
    return style.mask == "window" and style.new > 1 and bool(style.cache or style.new > WINDOW)


def said(attention: Any) -> dict[str, object]:
    """What a report says of the same."""
    position, norm, cache = attention.position, attention.qk_norm, attention.cache
    place = position and (position.kind, position.layout, position.dims, position.query_offset, position.key_offset)
    return {
        "heads": (attention.num_heads, attention.num_kv_heads, attention.head_dim),
        "kind": set(attention.kind),
        "position": place,
        "norm": norm and (norm.kind, norm.over),
        "cache": cache and (cache.past, cache.new, cache.empty, cache.way),
        "window": attention.window,
        "bias": attention.bias,
        "scale": round(attention.scale, 5),
    }


def intent_of(style: Style) -> mha_inspect.Intent:
    """Return what is meant: causal where there is a mask, in a window where it hides any key."""
    return mha_inspect.Intent(causal=bool(style.mask), window=WINDOW if hides_by_window(style) else None)


def assert_parameters_are_told(style: Style, parameters: Any) -> None:
    """Assert that each has a role, and that the rows of each head are those that its heads are cut from."""
    assert all(parameter.role for parameter in parameters)
    if style.project not in ("three", "packed"):
        return
    start = 0
    for side, name, count in zip("qkv", "abc", (HEADS, style.kv_heads, style.kv_heads), strict=True):
        name = "packed" if style.project == "packed" else name
        (row,) = [parameter for parameter in parameters if parameter.name == f"{name}.weight"]
        said = {piece.head: piece.rows for piece in row.heads if piece.part == f"W_{side}"}
        firsts = [start + head * style.head_dim for head in range(count)]
        assert said == {head: (first, first + style.head_dim) for head, first in enumerate(firsts)}, row.role
        start += count * style.head_dim if style.project == "packed" else 0


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
        assert_parameters_are_told(style, mha_inspect.params(module, x, per_head=True).parameters)
        intent = intent_of(style) if style.new > 1 else mha_inspect.Intent(causal=False)
        assert mha_inspect.check(module, x, intent=intent).findings == ()

    try_all(check, styles(), 16)


class Faulty(Composed):
    """Has one fault: in what it rotates, shares, masks, scales or lets gradients through."""

    fault = ""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        self.turned = 0
        self.keep = torch.ones(x.shape[:2], dtype=torch.bool) if keep is None else keep
        return super().forward(x)

    def rotated(self, x: Tensor) -> Tensor:
        """Rotate first the query, then the key."""
        self.turned += 1
        if self.fault == "key left alone" and self.turned == 2:
            return x
        if self.fault != "other layout" or self.turned == 1:
            return super().rotated(x)
        start = self.style.offset
        turn = interleaved if self.style.position == "half" else half
        return turn(x, self.angles[start : start + x.shape[2]])

    def cached(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.fault == "values rotated":
            values = super().rotated(values)
        keys, values = super().cached(keys, values)
        if self.fault == "key detached":
            return keys.detach(), values
        return keys, values.detach() if self.fault == "value detached" else values

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fault == "shared in turns":  # query head h uses key head h % heads
            shared = HEADS // self.style.kv_heads
            k, v = (heads[:, ::shared].repeat(1, shared, 1, 1) for heads in (k, v))
        return super().attended(q, k, v)

    def visible(self, place: Tensor) -> Tensor:
        if self.fault not in FAULTS["causal"] + FAULTS["padding"]:
            return super().visible(place)
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


FAULTS = {
    "rotary": ("key left alone", "other layout", "values rotated"),
    "grouped": ("shared in turns",),
    "causal": ("late", "early", "reversed", "inverted", "over the heads", "over the batch"),
    "padding": ("padding of the queries", "padding of the next item", "padding one late", "no padding"),
    "parameters": ("key detached", "value detached"),
}
"""A check, and the faults that it alone finds."""


def may_have(style: Style, check: str) -> bool:
    """Return whether faults of this check change what this style computes."""
    if check == "rotary":
        return style.position in ("half", "interleaved") and style.new > 1
    if check == "grouped":
        return style.share != "group" and style.kv_heads in (2, 3) and style.project != "by head"
    if check == "parameters":
        return not style.cache
    return bool(style.mask) and not style.cache and style.length > HEADS >= style.batch > 1


@st.composite
def faulty(draw: st.DrawFn) -> tuple[Style, str, str]:
    check = draw(st.sampled_from(sorted(FAULTS)))
    style = draw(styles().filter(lambda style: may_have(style, check)))
    return style, check, draw(st.sampled_from(FAULTS[check]))


def test_a_fault_is_the_one_finding(try_all: Callable[..., None]) -> None:
    def check(case: tuple[Style, str, str]) -> None:
        style, name, fault = case
        torch.manual_seed(0)
        module, x = Faulty(style).eval(), torch.randn(style.batch, style.new, style.embed)
        module.fault = fault
        if name == "parameters":
            (finding,) = mha_inspect.check(module, x, only=["parameters"]).findings
            assert finding.sure
            assert finding.sentence.startswith(without_gradient(module, fault.split()[0]))
            return
        given = {"keep": torch.ones(x.shape[:2], dtype=torch.bool)} if name == "padding" else {}
        intent = intent_of(style)
        if name == "padding":
            intent = replace(intent, padding="keep", padding_true="keep")
        declared = mha_inspect.check(module, x, intent=intent, **given).findings
        assert [finding.check for finding in declared if finding.sure] == [name]
        if name != "rotary":
            alone = mha_inspect.check(module, x, **given).findings
            assert [finding.check for finding in alone if finding.check != "parameters"] == [name]

    try_all(check, faulty(), 24)


def without_gradient(module: Faulty, side: str) -> str:
    """Return what is said of the parameter, or of the features of a packed one, that gets no gradient."""
    if module.style.project in ("packed", "beside"):
        # The keys' are the first half behind the queries'.
        start, *_, end = accumulate(count * module.style.head_dim for count in module.counts)
        middle = (start + end) // 2
        first, last = (start, middle - 1) if side == "key" else (middle, end - 1)
        return f"packed.weight projects the query, key and value and gets no gradient for features {first}–{last}"
    name = "b" if side == "key" else "c"
    name = f"{name}.weight" if module.style.project == "three" else name
    return f"{name} projects the {side} and gets no gradient"
