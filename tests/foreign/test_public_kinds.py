"""Kinds of attention in public repositories: memories of earlier tokens, windows in some layers, cached latents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import Intent, check, recording, trace

B, N, HEADS, HEAD_DIM, MEMORY, LATENT = 2, 7, 3, 4, 5, 6
WIDTH = HEADS * HEAD_DIM
X = torch.randn(B, N, WIDTH, generator=torch.Generator().manual_seed(0))


class Packed(nn.Module):
    """Causal attention with one projection for queries, keys and values."""

    def __init__(self, window: int = N + MEMORY) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.o, self.window = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), window

    def turn(self, heads: Tensor) -> Tensor:
        """Do nothing to the queries or keys, `batch head position feature`."""
        return heads

    turn_key = turn

    def sees(self, back: Tensor) -> Tensor:
        """Return whether a query sees a key that is so many positions back."""
        return (back >= 0) & (back < self.window)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (q, k, v))
        scores = self.turn(q) @ self.turn_key(k).mT / HEAD_DIM**0.5
        queries, keys = scores.shape[-2:]
        back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        weights = scores.masked_fill(~self.sees(back), -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.qkv(x).chunk(3, -1))


class Complex(Packed):
    """Llama: pairs of features are rotated as complex numbers."""

    def turn(self, heads: Tensor) -> Tensor:
        angles = torch.arange(heads.shape[-2])[:, None] * torch.tensor([1.0, 0.3])
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    turn_key = turn


class Stretched(Packed):
    """YaRN: the tables of cosines and sines are multiplied by a factor."""

    def turn(self, heads: Tensor) -> Tensor:
        angles = (torch.arange(heads.shape[-2])[:, None] * torch.tensor([1.0, 0.3])).repeat(1, 2)
        one, other = heads.chunk(2, -1)
        return heads * (1.2 * angles.cos()) + torch.cat([-other, one], -1) * (1.2 * angles.sin())

    turn_key = turn


class XPos(Complex):
    """xPos: queries grow with their position, and keys shrink."""

    def grown(self, heads: Tensor, sign: int) -> Tensor:
        length = torch.arange(heads.shape[-2])[:, None]
        table = torch.polar(torch.tensor([0.9, 0.95]) ** (sign * length), length * torch.tensor([1.0, 0.3]))
        return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2))) * table).flatten(-2)

    def turn(self, heads: Tensor) -> Tensor:
        return self.grown(heads, -1)

    def turn_key(self, heads: Tensor) -> Tensor:
        return self.grown(heads, 1)


class OnlyQueries(Stretched):
    turn_key = Packed.turn


class Holes(Packed):
    """A mask that hides every third key of the past."""

    def sees(self, back: Tensor) -> Tensor:
        return (back >= 0) & (back % 3 != 2)


class Memory(Packed):
    """Transformer-XL: the hidden states of earlier tokens are projected too, and their queries are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(B, MEMORY, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(torch.cat([self.memory, x], 1)).chunk(3, -1)
        return self.attend(q[:, MEMORY:], k, v)


class Late(Memory):
    """The same, where a query sees one key of the future."""

    def sees(self, back: Tensor) -> Tensor:
        return back >= -1


class Picked(Packed):
    """Informer: some queries attend, and the others take the mean of the values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        context = v.mean(2, keepdim=True).expand_as(v).clone()
        context[:, :, [1, 4]] = (q[:, :, [1, 4]] @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v
        return self.o(context.transpose(1, 2).flatten(2))


class NoMemory(Packed):
    """The same, with queries from the new tokens alone, before there is a memory."""

    def forward(self, x: Tensor) -> Tensor:
        _, k, v = self.qkv(torch.cat([x.new_empty(0), x], 1)).chunk(3, -1)
        return self.attend(self.qkv(x).chunk(3, -1)[0], k, v)


class Latents(Packed):
    """Multi-head latent attention, which caches what keys and values are projected from."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.q = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(LATENT, WIDTH) for _ in range(2))
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        latents = self.down(x) if self.past is None else torch.cat([self.past, self.down(x)], 1)
        self.past = latents
        return self.attend(self.q(x), self.k(latents), self.v(latents))


@pytest.mark.parametrize(
    ("module", "sight"),
    [
        (Complex(), "causal"),
        (Stretched(), "causal"),
        (XPos(), "causal"),
        (Packed(window=3), "causal, a window of 3"),
        (Memory(), "causal"),
        (NoMemory(), "causal"),
    ],
    ids=lambda case: type(case).__name__ if isinstance(case, nn.Module) else None,
)
def test_nobody_who_is_right_is_accused(module: nn.Module, sight: str) -> None:
    report = check(module, X, intent=Intent(causal=True))
    assert (report.findings, {fact.sentence for fact in report.facts if fact.picture}) == ((), {sight})
    assert {"causal", "parameters"} <= {passed.check for passed in report.held}


@pytest.mark.parametrize(
    ("module", "name"), [(OnlyQueries(), "rotary"), (Holes(), "causal"), (Late(), "causal")], ids=lambda case: None
)
def test_their_mistakes_are_found(module: nn.Module, name: str) -> None:
    assert [finding.check for finding in check(module, X, intent=Intent(causal=True)).findings] == [name]


def test_rows_that_are_no_contexts_are_no_attentions() -> None:
    formulas = {stage.name: stage.formula for stage in trace(Picked(), X).attentions[0].stages}
    assert formulas["concat"] == "context in heads, beside other positions"


@pytest.mark.parametrize("kind", [Memory, NoMemory])
def test_keys_of_a_memory_and_of_the_tokens_are_self_attention(kind: type[Packed]) -> None:
    (one,) = trace(kind(), X).attentions
    assert one.kind == ("self", "causal")


def test_latents_that_an_earlier_call_made_are_the_past() -> None:
    module = Latents()
    with recording() as seen:
        for part in X.split([5, 2], 1):
            module(part)
    caches = [one.cache and (one.cache.past, one.cache.new) for one in seen.trace.attentions]
    assert (caches, [one.kind for one in seen.trace.attentions]) == ([None, (5, 2)], [("self", "causal")] * 2)


@pytest.mark.parametrize(("kind", "brief"), [(Packed, "none here"), (Complex, None), (XPos, None)])
def test_a_check_is_absent_where_there_is_nothing_to_check(kind: type[Packed], brief: str | None) -> None:
    briefs = {skipped.check: skipped._brief for skipped in check(kind(), X).left_out}
    assert (briefs["grouped"], briefs.get("rotary")) == ("none here", brief)


class ReturnsCache(Packed):
    """Wenet: keys and values come back side by side, in heads, and before they are split; the queries too."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = [side.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (k, v)]
        scores = q.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) @ heads[0].mT / HEAD_DIM**0.5
        out = self.o((scores.softmax(-1) @ heads[1]).transpose(1, 2).flatten(2))
        return out, torch.cat(heads, -1), heads[0], v, q


def test_keys_and_values_that_come_back_are_named_as_keys() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), ReturnsCache())
    assert [returned.axes for returned in trace(module, X).returns] == [
        "batch query embed",
        "batch heads key (2 head_dim)",
        "batch heads key head_dim",
        "batch key (heads head_dim)",
        "batch query (heads head_dim)",
    ]


class Written(Packed):
    """Gemma: heads are split while packed, rotated as complex halves, and written into slots of a buffer."""

    start = MEMORY

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(B, MEMORY + N + 2, HEADS, HEAD_DIM))

    def halves(self, heads: Tensor) -> Tensor:
        angles = torch.arange(self.start, self.start + N)[:, None, None] * torch.tensor([1.0, 0.3])
        pairs = torch.view_as_complex(torch.stack(heads.chunk(2, -1), -1))
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
        return torch.cat(turned.chunk(2, -1), -2).flatten(-2)

    def stored(self, x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, HEAD_DIM)).split(HEADS, 2)
        slots = torch.arange(self.start, self.start + N)
        return self.halves(q), self.keys.index_copy_(1, slots, self.halves(k)), self.values.index_copy_(1, slots, v)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*(side.flatten(2) for side in self.stored(x)))


class WrittenLatents(Written):
    """DeepSeek: keys and values of one matrix, keys beside a rotated part, in slots that are assigned as a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, LATENT + 2)
        self.up = nn.Linear(LATENT, HEADS * (HEAD_DIM - 2 + HEAD_DIM))

    def stored(self, x: Tensor) -> tuple[Tensor, ...]:
        latent, shared = self.down(x).split([LATENT, 2], -1)
        k, v = self.up(latent).unflatten(-1, (HEADS, -1)).split([HEAD_DIM - 2, HEAD_DIM], -1)
        end = self.start + N
        self.keys[:, self.start : end] = torch.cat([k, shared[:, :, None].expand(-1, -1, HEADS, -1)], -1)
        self.values[:, self.start : end] = v
        return self.q(x).unflatten(-1, (HEADS, -1)), self.keys[:, :end], self.values[:, :end]


@pytest.mark.parametrize("start", [0, MEMORY])
@pytest.mark.parametrize(("kind", "features"), [(Written, "(qkv heads head_dim)"), (WrittenLatents, "(heads packed)")])
def test_keys_that_are_written_into_a_cache_are_named_whole(kind: type[Written], features: str, start: int) -> None:
    module = kind()
    module.start = start
    axes = {stage.name: stage.axes for stage in trace(module, X).attentions[0].stages}
    assert axes["k_proj"] == axes["v_proj"] == f"batch key {features}"
    assert axes["k_heads"] == axes["v_heads"] == "batch heads key head_dim"


class NonCausalAttention(Packed):
    """Bark: the name of the class says what the attention is not."""

    def sees(self, back: Tensor) -> Tensor:
        return back == back


class CausalAttention(NonCausalAttention):
    """Its name is not true."""


class Padded(Packed):
    """d2l: one query, and items of which the last keys are padding."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q[:, -1:] @ k.mT / WIDTH**0.5).masked_fill(LENGTHS[:, None, None] <= torch.arange(N), -torch.inf)
        return self.o(scores.softmax(-1) @ v)


LENGTHS = torch.tensor([N, 5])


@pytest.mark.parametrize(("kind", "found"), [(NonCausalAttention, []), (CausalAttention, ["causal"])])
def test_a_name_that_denies_a_mask_expects_none(kind: type[Packed], found: list[str]) -> None:
    assert [finding.check for finding in check(kind(), X).findings] == found


def test_keys_that_single_queries_see_are_counted() -> None:
    sights = [fact.sentence for fact in check(Padded(), X).facts if fact.name == "who sees whom"]
    assert sights == [f"every query sees 5 to {N} of {N} keys"]


class Turned(nn.Module):
    """PointerNet and SAM 2: the batch is put behind the positions, or before them, inside."""

    def __init__(self, batch_first: bool | None) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS)
        if batch_first is not None:
            self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.inner.batch_first else x.transpose(0, 1)
        return self.inner(x, x, x)[0].transpose(0, 1)


@pytest.mark.parametrize(("batch_first", "found"), [(None, []), (False, [False])])
def test_the_layout_inside_is_no_proof_of_the_layout_outside(
    batch_first: bool | None, found: list[bool], tmp_path: Path, invoke: Callable[..., Any]
) -> None:
    lines = f"from {__name__} import Turned, X\n\n\ndef made():\n    return Turned({batch_first}), (X,)\n"
    (tmp_path / "made.py").write_text(lines, encoding="utf-8")
    code, out, err = invoke("check", f"{tmp_path / 'made.py'}:made", "--json")
    assert code == 0, err
    assert [finding["sure"] for finding in json.loads(out)["findings"] if finding["check"] == "batch"] == found
