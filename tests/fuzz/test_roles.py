"""Attention made of projections, gates, norms and caches in the layouts that people choose: the role of each parameter.

The truth is the choices themselves: which rows of which matrix are whose head, and what is scaled, added or gated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

import mha_inspect

EMBED, PAST, SLOTS = 14, 4, 16


@dataclass(frozen=True)
class Choices:
    heads: int
    kv_heads: int
    head_dim: int
    packed: str
    bias: bool
    norm: str
    norm_of: str
    normed: str
    gate: str
    function: str
    cache: str
    past: int
    length: int
    batch: int
    flat: bool
    way: str
    first: str

    @property
    def counts(self) -> dict[str, int]:
        """Heads of each side; a gate by head has one number for each."""
        sides = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        return sides | ({"g": self.heads} if self.gate else {})

    def width(self, side: str) -> int:
        return self.counts[side] * (1 if side == "g" and self.gate == "by head" else self.head_dim)


@st.composite
def choices(draw: st.DrawFn) -> Choices:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    heads = one_of(1, 2, 3, 6)
    kv_heads = one_of(*(count for count in (1, 2, 3, 6) if heads % count == 0))
    return Choices(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=one_of(3, 4, 5),
        packed=one_of("", "", "stacked", "by head") if heads == kv_heads else one_of("", "stacked"),
        bias=draw(st.booleans()),
        norm=one_of("", "layer", "by hand", "batch", "rms"),
        norm_of=one_of("heads", "each head", "all", "output"),
        normed=one_of("q", "k", "v"),
        gate=one_of("", "by feature", "by head"),
        function=one_of("sigmoid", "silu", "tanh", ""),
        cache=one_of("", "slice", "index", "joined"),
        past=one_of(0, PAST),
        length=one_of(3, 7, 8),
        batch=one_of(2, 3),
        flat=heads == 1 and draw(st.booleans()),
        way=one_of("linear", "linear", "convolution", "apart"),
        first=one_of("batch", "batch", "position"),
    )


class ByHand(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight + self.bias


class OverBatch(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view_as(x)


class Apart(nn.Linear):
    """Adds the bias in an operation of its own."""

    def forward(self, x: Tensor) -> Tensor:
        projected = x @ self.weight.T
        return projected if self.bias is None else projected + self.bias


class Convolution(nn.Conv1d):
    """Projects each position, with the features before the positions."""

    def __init__(self, width: int, features: int, bias: bool) -> None:
        super().__init__(width, features, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT).mT


WAYS: dict[str, Any] = {"linear": nn.Linear, "convolution": Convolution, "apart": Apart}
NORMS: dict[str, Callable[[int], nn.Module]] = {
    **{"": lambda width: nn.Identity(), "layer": nn.LayerNorm, "by hand": ByHand, "batch": OverBatch},
    "rms": nn.RMSNorm,
}


class Made(nn.Module):
    """Attention of these choices."""

    def __init__(self, of: Choices) -> None:
        super().__init__()
        self.of, inner = of, of.heads * of.head_dim
        if of.packed:
            self.packed = WAYS[of.way](EMBED, sum(map(of.width, of.counts)), bias=of.bias)
        else:
            self.sides = nn.ModuleDict({side: WAYS[of.way](EMBED, of.width(side), bias=of.bias) for side in of.counts})
        self.out = nn.Linear(inner, EMBED)
        widths = {"heads": of.head_dim, "each head": of.head_dim, "all": of.width(of.normed), "output": inner}
        self.norm = NORMS[of.norm](widths[of.norm_of])
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(of.batch, SLOTS, of.kv_heads, of.head_dim))

    def projected(self, x: Tensor) -> dict[str, Tensor]:
        of, widths = self.of, {side: self.of.width(side) for side in self.of.counts}
        if of.packed == "by head":
            parts = self.packed(x).unflatten(-1, (of.heads, -1)).split([w // of.heads for w in widths.values()], -1)
            return dict(zip(widths, (part.flatten(2) for part in parts), strict=True))
        if of.packed:
            return dict(zip(widths, self.packed(x).split([*widths.values()], -1), strict=True))
        return {side: project(x) for side, project in self.sides.items()}

    def cached(self, new: Tensor, name: str) -> Tensor:
        """Return `batch position head feature` with what is in a buffer from an earlier call."""
        slots, start, end = getattr(self, name), self.of.past, self.of.past + new.shape[1]
        if self.of.cache == "joined":
            return torch.cat([slots[:, :start], new], 1)
        if self.of.cache == "slice":
            slots[:, start:end] = new
        elif self.of.cache:
            slots.index_copy_(1, torch.arange(start, end), new)
        return slots[:, :end] if self.of.cache else new

    def forward(self, x: Tensor) -> Tensor:
        if self.of.first == "position":
            return self.attended(x.transpose(0, 1)).transpose(0, 1)
        return self.attended(x)

    def attended(self, x: Tensor) -> Tensor:
        of, parts = self.of, self.projected(x)
        if of.norm_of == "all":
            parts[of.normed] = self.norm(parts[of.normed])
        heads = {side: parts[side].unflatten(-1, (of.counts[side], -1)) for side in "qkv"}
        if of.norm_of == "heads":
            heads[of.normed] = self.norm(heads[of.normed])
        elif of.norm_of == "each head":
            heads[of.normed] = torch.cat([self.norm(head) for head in heads[of.normed].split(1, 2)], 2)
        context = self.average(heads["q"], self.cached(heads["k"], "keys"), self.cached(heads["v"], "values"))
        if of.gate:
            context = context * self.gate(parts["g"])
        merged = context.flatten(2)
        return self.out(self.norm(merged) if of.norm_of == "output" else merged)

    def average(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return contexts of causal attention; all tensors are `batch token heads head_dim`."""
        of = self.of
        if of.flat:
            return self.softmax(q.squeeze(2), k.squeeze(2), v.squeeze(2))[:, :, None]
        k, v = (side.repeat_interleave(of.heads // of.kv_heads, 2) for side in (k, v))
        return self.softmax(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)

    def softmax(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(k.shape[-2] - q.shape[-2])
        scores = (q @ k.mT / self.of.head_dim**0.5).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v

    def gate(self, x: Tensor) -> Tensor:
        """Return the factor of each feature, or of each head: `batch token heads head_dim`."""
        of = self.of
        gate = getattr(F, of.function)(x) if of.function else x
        return gate.unflatten(-1, (of.heads, -1))


def dims(stage: Any) -> set[str]:
    """The dimensions of a stage in any order, as a convolution has the features before the positions."""
    return set(re.findall(r"\([^)]*\)|\S+", stage.axes))


def rows(of: Choices, side: str) -> dict[int, tuple[int, int]]:
    """The first row of each head in the matrix of its side, and the row behind its last."""
    size = of.width(side) // of.counts[side]
    sides = list(of.counts)
    before = sides[: sides.index(side)]
    if of.packed == "by head":
        step = sum(of.width(packed) // of.heads for packed in sides)
        start = sum(of.width(packed) // of.heads for packed in before)
    else:
        step = size
        start = sum(of.width(packed) for packed in before) if of.packed else 0
    firsts = [start + head * step for head in range(of.counts[side])]
    return {head: (first, first + size) for head, first in enumerate(firsts)}


def assert_rows_are_told(of: Choices, parameters: dict[str, Any]) -> None:
    """Assert which rows of the projections are said to be whose."""
    pieces = [(name, piece) for name, row in parameters.items() for piece in row.heads or ()]
    for side in of.counts:
        name = "packed" if of.packed else f"sides.{side}"
        kinds = {"W": "weight", "b": "bias"} if of.bias else {"W": "weight"}
        for kind, suffix in kinds.items():
            parameter, part = f"{name}.{suffix}", f"{kind}_{side}"
            rows_by_head = {piece.head: piece.rows for n, piece in pieces if n == parameter and piece.part == part}
            assert rows_by_head == rows(of, side), (side, kind, parameters[parameter].role)


def assert_norm_is_told(of: Choices, parameters: dict[str, Any]) -> None:
    """Assert what the norm's parameters are said to scale and to be added to."""
    if of.norm == "":
        return
    place = "input of the projection to the output"
    if of.norm_of != "output":
        normed = {"q": "queries", "k": "keys", "v": "values"}[of.normed]
        place = f"{normed} after their projection"
    weight = parameters["norm.weight"]
    assert weight.role.startswith(f"scales the {place}"), weight.role
    assert weight.axes == axes_of_norm(of)
    if of.norm != "rms":
        bias = parameters["norm.bias"]
        assert bias.role.startswith(f"added to the {place}"), bias.role
        assert bias.axes == axes_of_norm(of)


def axes_of_norm(of: Choices) -> str:
    if of.norm_of in ("heads", "each head") and of.counts[of.normed] > 1:
        return "head_dim"
    is_of_keys = of.norm_of != "output" and of.normed != "q"
    return "(kv_heads head_dim)" if is_of_keys and of.kv_heads < of.heads else "(heads head_dim)"


def assert_stages_are_told(of: Choices, attention: Any) -> None:
    stages = {stage.name: stage for stage in attention.stages}
    features = "(heads head_dim)"
    features_of_keys = features if of.kv_heads == of.heads else "(kv_heads head_dim)"
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (of.heads, of.kv_heads, of.head_dim)
    if not of.packed:
        assert dims(stages["q_proj"]) == {"batch", "query", features}
        assert dims(stages["k_proj"]) == dims(stages["v_proj"]) == {"batch", "key", features_of_keys}
    assert dims(stages["q_proj"]) > {"batch", "query"}
    assert dims(stages["k_proj"]) > {"batch", "key"}, stages["k_proj"].axes
    assert dims(stages["concat"]) == {"batch", "query", features}
    word = f"gate ({of.function})" if of.function else "gate"
    assert (word in stages["concat"].formula) == bool(of.gate), stages["concat"].formula
    cache = attention.cache
    assert (cache and (cache.past, cache.new)) == ((of.past, of.length) if of.cache and of.past else None)


def test_roles(try_all: Callable[..., None]) -> None:
    def check(of: Choices) -> None:
        torch.manual_seed(0)
        module, x = Made(of).eval(), torch.randn(of.batch, of.length, EMBED)
        if of.first == "position":
            x = x.transpose(0, 1)
        parameters = {row.name: row for row in mha_inspect.params(module, x, per_head=True).parameters}
        assert_rows_are_told(of, parameters)
        assert_norm_is_told(of, parameters)
        assert parameters["out.weight"].axes == "embed (heads head_dim)"
        (attention,) = mha_inspect.trace(module, x).attentions
        assert_stages_are_told(of, attention)
        intent = mha_inspect.Intent(causal=True, batch_axis=1 if of.first == "position" else 0)
        assert mha_inspect.check(module, x, intent=intent).findings == ()

    try_all(check, choices(), 24)
