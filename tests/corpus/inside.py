"""What happens between projections and weights: positions, norms of queries and keys, windows and biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.reports.trace import Position, QKNorm

from .entry import Arguments, register

B, T, E, H, KV, D = 2, 6, 64, 4, 2, 16
PLACES = torch.arange(T)
DISTANCE = PLACES[:, None] - PLACES
FUTURE = DISTANCE < 0
X = torch.randn(B, T, E, generator=torch.Generator().manual_seed(1))
Pair = tuple[Tensor, Tensor]


class Attend(nn.Module):
    """Grouped attention that does something to queries and keys, and to scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(E, E), nn.Linear(E, KV * D), nn.Linear(E, KV * D), nn.Linear(E, E)
        self.learned = nn.Parameter(torch.rand(T, D))
        self.table = nn.Embedding(2 * T, H)
        angle = angles(start=1 - T, length=2 * T - 1, dims=E).flip(0)
        self.sinusoids = torch.cat((angle.sin(), angle.cos()), -1)[None]

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        q, k, v = (self.heads(of(x)) for of in (self.q, self.k, self.v))
        q, k = self.positions(q, k, *more)
        k, v, mask = self.cached(k, v)
        k, v = k.repeat_interleave(H // KV, 1), v.repeat_interleave(H // KV, 1)
        scores = self.scores(q @ k.mT / math.sqrt(D))
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, D)).transpose(1, 2)

    def positions(self, q: Tensor, k: Tensor, *more: Tensor) -> Pair:
        return q, k

    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return k, v, None

    def scores(self, scores: Tensor) -> Tensor:
        return scores


def angles(start: int = 0, length: int = T, dims: int = D) -> Tensor:
    frequencies = 1 / 10000 ** (torch.arange(0, dims, 2) / dims)
    return torch.outer(torch.arange(start, start + length), frequencies)


def halves(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    angle = torch.cat((angle, angle), -1)
    return x * angle.cos() + torch.cat((-b, a), -1) * angle.sin()


def halves_apart(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


def neighbours(x: Tensor, angle: Tensor) -> Tensor:
    angle = angle.repeat_interleave(2, -1)
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * angle.cos() + turned * angle.sin()


def stacked(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(-2)


def sorted_halves(x: Tensor, angle: Tensor) -> Tensor:
    """DeepSeek: neighbours are brought into halves first."""
    return halves(x.unflatten(-1, (-1, 2)).mT.flatten(-2), angle)


def halves_as_complex(x: Tensor, angle: Tensor) -> Tensor:
    """Gemma: halves become the parts of complex numbers, and halves again."""
    turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones(()), angle)
    return torch.cat(torch.view_as_real(turned).chunk(2, -1), -2).flatten(-2)


def matrices(angle: Tensor) -> Tensor:
    """Return a matrix for each position with a rotation of each pair of neighbours on its diagonal."""
    rotations = angle.new_zeros(len(angle), 2 * angle.shape[-1], 2 * angle.shape[-1])
    pairs = torch.arange(0, 2 * angle.shape[-1], 2)
    rotations[:, pairs, pairs] = rotations[:, pairs + 1, pairs + 1] = angle.cos()
    rotations[:, pairs, pairs + 1], rotations[:, pairs + 1, pairs] = -angle.sin(), angle.sin()
    return rotations


def by_matrices(x: Tensor, angle: Tensor) -> Tensor:
    return torch.einsum("bhnd,ned->bhne", x, matrices(angle))


def by_columns(x: Tensor, angle: Tensor) -> Tensor:
    return (matrices(angle) @ x[..., None]).squeeze(-1)


def by_other_matrices(x: Tensor, angle: Tensor) -> Tensor:
    others = torch.linspace(0, 9, T * D * D).sin().view(T, D, D)
    return torch.einsum("bhnd,ned->bhne", x, matrices(angle) + others)


def half_written(x: Tensor, angle: Tensor) -> Tensor:
    turned = x.clone()
    turned[..., ::2] = x[..., ::2] * angle.cos() - x[..., 1::2] * angle.sin()
    return turned


def swapped(x: Tensor, angle: Tensor) -> Tensor:
    """Neighbours are swapped by one matrix for all positions."""
    angle = angle.repeat_interleave(2, -1)
    return x * angle.cos() + x @ matrices(torch.full((1, x.shape[-1] // 2), torch.pi / 2))[0].mT * angle.sin()


def overwritten(x: Tensor, angle: Tensor) -> Tensor:
    """The projection itself is written, and features before it are read from a copy."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].clone(), x[..., half:].clone()
    x[..., :half] = a * angle.cos() - b * angle.sin()
    x[..., half:].copy_(b * angle.cos() + a * angle.sin())
    return x


def multiplied(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    angle = torch.cat((angle, angle), -1)
    turned = torch.cat((-b, a), -1) * angle.sin()
    return x.clone().mul_(angle.cos()).add_(turned)


def both(turn: Callable[[Tensor, Tensor], Tensor], start: int = 0) -> Any:
    return lambda self, q, k: (turn(q, angles(start)), turn(k, angles(start)))


def first_dims(self: Attend, q: Tensor, k: Tensor) -> Pair:
    """GPT-NeoX, Phi: a part of the features is rotated."""
    q, k = (torch.cat((halves(x[..., :4], angles(dims=4)), x[..., 4:]), -1) for x in (q, k))
    return q, k


LONG = angles(length=50)


def from_table(self: Attend, q: Tensor, k: Tensor) -> Pair:
    return halves_apart(q, LONG[5 : 5 + T]), halves_apart(k, LONG[5 : 5 + T])


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def centred(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()


def alibi(self: Attend, scores: Tensor) -> Tensor:
    return (scores - 2.0 ** -torch.arange(1, H + 1)[:, None, None] * DISTANCE).masked_fill(FUTURE, -torch.inf)


def alibi_of_some_heads(self: Attend, scores: Tensor) -> Tensor:
    return scores - torch.arange(H)[:, None, None] / H * DISTANCE.abs()


def with_method(**methods: Any) -> nn.Module:
    torch.manual_seed(0)
    return type("Own", (Attend,), methods)().eval()


def rotary(layout: Any, dims: int = D, query: int | None = 0, key: int | None = 0) -> Position:
    return Position("rotary", layout, dims, query, key)


def from_tables_written_in_place(self: Attend, q: Tensor, k: Tensor) -> Pair:
    """As models with positions in time, height and width do it: every second angle is that of another direction."""
    times, heights = (torch.stack([angles(3), angles(3)]).expand(2, T, D // 2) * 1.0).unbind(0)
    times[..., 1::2] = heights[..., 1::2]
    table = torch.empty(2, T, D)
    table[0], table[1, :, : D // 2] = torch.cat((times, times), -1).cos(), times.sin()
    table[1, :, D // 2 :] = times.sin()
    return tuple(x * table[0] + torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * table[1] for x in (q, k))


def joined_with_the_rest(x: Tensor, angle: Tensor) -> Tensor:
    a, b, rest = x.split([2, 2, x.shape[-1] - 4], -1)
    cos, sin = angle[:, :2].cos(), angle[:, :2].sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


ROTATED = {
    "the first features, joined with the rest in one step": (both(joined_with_the_rest), rotary("half", 4)),
    "halves": (both(halves), rotary("half")),
    "neighbours, each computed": (both(stacked, 3), rotary("interleaved", query=3, key=3)),
    "halves as complex numbers": (both(halves_as_complex), rotary("half")),
    "neighbours, brought into halves": (both(sorted_halves), rotary("interleaved")),
    "the first features": (first_dims, rotary("half", 4)),
    "from a table": (from_table, rotary("half", query=5, key=5)),
    "from tables written in place": (from_tables_written_in_place, rotary("half", query=3, key=3)),
    "the query alone": (lambda self, q, k: (halves(q, angles()), k), rotary("half", key=None)),
    "by matrices": (both(by_matrices, 5), rotary("interleaved", query=5, key=5)),
    "by matrices from the left": (both(by_columns), rotary("interleaved")),
    "swapped by a matrix": (both(swapped), rotary("interleaved")),
    "overwritten": (both(overwritten), rotary("half")),
    "multiplied in place": (both(multiplied), rotary("half")),
    "after a norm": (lambda self, q, k: (halves(rms(q), angles()), halves(rms(k), angles())), rotary("half")),
}


NORMS = {
    "rms": (lambda self, q, k: (rms(q), rms(k) * self.learned), QKNorm("rms", "head")),
    "layer": (lambda self, q, k: (centred(q), centred(k)), QKNorm("layer", "head")),
    "l2": (lambda self, q, k: (F.normalize(q, dim=-1) * 10, F.normalize(k, dim=-1)), QKNorm("l2", "head")),
    "rms by a length": (lambda self, q, k: (F.normalize(q, dim=-1) * D**0.5, k), QKNorm("rms", "head")),
}


SCORES = {
    "alibi": (alibi, "alibi", "mask(scores + bias)"),
    "alibi of some heads": (alibi_of_some_heads, "alibi", "scores + bias"),
    "T5": (
        lambda self, s: s + self.table(DISTANCE.clamp(-4, 4) + 4).permute(2, 0, 1),
        "relative bias",
        "scores + bias",
    ),
    "Swin, shifted": (
        lambda self, s: s + torch.linspace(0, 1, T * T).sin().view(T, T) + torch.where(DISTANCE > 2, -100.0, 0.0),
        None,
        "scores + bias + mask",
    ),
}


def by_query(self: Attend, positions: Tensor) -> Tensor:
    """Return scores of a query with distances, after it was kept by `remembered`."""
    return torch.einsum("bhqd,qkd->bhqk", self.kept, positions)


def remembered(self: Attend, q: Tensor, k: Tensor) -> Pair:
    self.kept = q
    return q, k


def shifted(self: Attend, scores: Tensor) -> Tensor:
    """Transformer-XL: the projections of sinusoids, by distance."""
    angle = angles(length=2 * T - 1, dims=E)
    far = self.heads(self.q(torch.cat((angle.sin(), angle.cos()), -1)[None]))
    return scores + (self.kept @ far.mT).gather(-1, (DISTANCE + T - 1).expand(B, H, T, T))


def padded_and_cut(self: Attend, scores: Tensor) -> Tensor:
    """Conformer: sinusoids that the module keeps as they are, shifted by a view."""
    far = self.kept @ self.heads(self.q(self.sinusoids.expand(B, -1, -1))).mT
    shifted = torch.cat((far.new_zeros(B, H, T, 1), far), -1).view(B, H, 2 * T, T)[:, :, 1:].reshape(far.shape)
    return scores + shifted[..., :T]


RELATIVE = {
    "Conformer": padded_and_cut,
    "BERT": lambda self, scores: scores + by_query(self, self.learned[DISTANCE.clamp(-2, 2) + 2]),
    "Transformer-XL": shifted,
}
WINDOWS = {
    "three back": (FUTURE | (DISTANCE >= 3), 3),
    "one to each side": (DISTANCE.abs() > 1, 2),
    "pieces": (PLACES[:, None] // 3 != PLACES // 3, None),
}


NOTHING: dict[str, dict[str, Any]] = {
    "learned positions are added": {"positions": lambda self, q, k: (q + self.learned, k + self.learned)},
    "dropout": {"positions": lambda self, q, k: (F.dropout(q), F.dropout(k)), "scores": lambda self, s: F.dropout(s)},
    "a learned gain": {"positions": lambda self, q, k: (q * self.learned[0], k * 0.3)},
    "a number for each position": {"positions": lambda self, q, k: (q * PLACES.add(1).log()[:, None], k)},
    "a number for each feature and position": {"positions": lambda self, q, k: (q * angles().cos().repeat(1, 2), k)},
    "a gate": {"positions": lambda self, q, k: (q * self.heads(self.q(X * 2)).sigmoid(), k)},
    "the same rotation everywhere": {
        "positions": lambda self, q, k: (halves(q, angles(1, 1)), halves(k, angles(1, 1)))
    },
    "by other matrices": {"positions": both(by_other_matrices)},
    "half of the features are written": {"positions": both(half_written)},
    "the largest score is taken off": {"scores": lambda self, scores: scores - scores.amax(-1, True).expand_as(scores)},
    "padding that is added": {"scores": lambda self, s: s + (PLACES > 3) * torch.finfo(torch.float32).min},
    "keys that are learned": {
        "cached": lambda self, k, v: (
            *(torch.cat((self.learned[:2].expand(B, KV, 2, D), x), 2) for x in (k, v)),
            None,
        ),
    },
    "keys of zeros": {"cached": lambda self, k, v: (*(F.pad(x, (0, 0, 0, 1)) for x in (k, v)), None)},
    "keys of another text": {
        "cached": lambda self, k, v: (
            *(
                torch.cat((x, self.heads(nn.functional.linear(X[:, :3] * 2, self.o.weight[: KV * D]))), 2)
                for x in (k, v)
            ),
            None,
        ),
    },
}


def tokens(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, E),), {}


CAUSAL = {"kind": ("self", "causal", "grouped")}
FACTS: dict[str, dict[str, Any]] = {
    "rotated: after a norm": {"qk_norm": QKNorm("rms", "head")},
    "rotated: the query alone": {"findings": frozenset({"rotary"})},
    "rotated: neighbours, brought into halves": {
        "axes": {
            "q_proj": "batch query (heads head_dim_2 head_dim_1)",
            "k_proj": "batch key (kv_heads head_dim_2 head_dim_1)",
        }
    },
    "normed: l2": {"scale": 10 * D**-0.5},
    "normed: rms by a length": {"scale": 1.0},  # a length of √head_dim is beside the norm here, and in the scale
    "normed: all heads": {"mixed": True},
    "biased: alibi": CAUSAL,
    "masked: three back": CAUSAL,
    "nothing: dropout": {
        "masked": True,
        "plain": False,
        "returns_output": False,
        "findings": frozenset({"repeat"}),
    },
    "nothing: a learned gain": {"scale": 0.3 * D**-0.5, "early": 0.3},
    "nothing: the same rotation everywhere": {"findings": frozenset({"rotary"})},
    "nothing: half of the features are written": {"findings": frozenset({"rotary"}), "rows": None},
    "nothing: padding that is added": {"masked": True},
    "nothing: keys that are learned": {"lengths": {"key": None}},
    "nothing: keys of zeros": {"lengths": {"key": None}},
    "nothing: keys of another text": {"lengths": {"key": None}, "returns_output": False},
}
"""Facts of single entries, beside those of their table."""


def attends_with(name: str, methods: dict[str, Any], **facts: Any) -> None:
    """Register the attention with other steps."""
    usual = {"heads": H, "kv_heads": KV, "head_dim": D, "kind": ("self", "grouped"), "given": tokens}
    usual |= {"sizes": ((B, T),), "reads_arguments": False, "ones": False}
    register(name, partial(with_method, **methods), **usual | facts | FACTS.get(name, {}))


def hides(masked: Tensor) -> Any:
    return lambda self, scores: scores.masked_fill(masked, -torch.inf)


for name, (positions, position) in ROTATED.items():
    attends_with(f"rotated: {name}", {"positions": positions}, position=position)
for name, (positions, qk_norm) in NORMS.items():
    attends_with(f"normed: {name}", {"positions": positions}, qk_norm=qk_norm)
of_all_heads = {"heads": lambda self, x: rms(x).unflatten(-1, (-1, D)).transpose(1, 2)}
attends_with("normed: all heads", of_all_heads, qk_norm=QKNorm("rms", "all"))
for name, (scores, kind, formula) in SCORES.items():
    position = kind and Position(kind)
    facts = {"bias": True, "masked": True, "formulas": {"masked_scores": formula}}
    attends_with(f"biased: {name}", {"scores": scores}, position=position, **facts)
for name, scores in RELATIVE.items():
    methods = {"positions": remembered, "scores": scores}
    attends_with(f"relative: {name}", methods, position=Position("relative bias"), bias=True, masked=True)
for name, (masked, window) in WINDOWS.items():
    attends_with(f"masked: {name}", {"scores": hides(masked)}, window=window, masked=True)
for name, methods in NOTHING.items():
    attends_with(f"nothing: {name}", methods)
