"""Decode loops made of the choices that people make: how keys are stored, where positions come from, what is masked.

The truth is the choices themselves, and the module's own forward over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import mha_inspect
from mha_inspect.answers.decode import decoded
from mha_inspect.layers.spec import Show
from mha_inspect.running.subject import Subject

from .test_styles import ROTATIONS

EMBED, HEADS, SLOTS, PAGE, PROMPT, STEPS = 20, 4, 16, 4, 4, 3
LENGTH = PROMPT + STEPS
RETURNED = ("joined", "joined by token", "one tensor", "features side by side")
HELD = ("list", "slice", "by token", "one buffer", "all slots", "index_copy_", "index_put_", "ring", "pages")


@dataclass(frozen=True)
class Loop:
    store: str
    packed: bool
    norm: bool
    kv_heads: int
    head_dim: int
    rotation: str
    late: bool
    mask: str
    start: str
    layers: int
    batch: int

    @property
    def window(self) -> int | None:
        return 4 if self.mask == "window" or self.store == "ring" else None


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    store, rotation = one_of(*RETURNED, *HELD), one_of("", *ROTATIONS)
    return Loop(
        store=store,
        packed=one_of(False, True),
        norm=one_of(False, True),
        kv_heads=one_of(HEADS, 2, 1),
        head_dim=one_of(6, 8),
        rotation=rotation,
        # A ring forgets where its keys were.
        late=bool(rotation) and store != "ring" and one_of(False, False, True),
        mask=one_of("fill", "add", "kernel", "window"),
        start=one_of("number", "tensor") if store in HELD else one_of("cache", "cache", "number"),
        layers=one_of(1, 2, 3),
        batch=one_of(1, 2),
    )


class Layer(nn.Module):
    """Attention whose cache is returned, or held in buffers."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop = loop
        size = loop.head_dim
        self.sizes = [heads * size for heads in (HEADS, loop.kv_heads, loop.kv_heads)]
        widths = [sum(self.sizes)] if loop.packed else self.sizes
        self.qkv, self.o = nn.ModuleList(nn.Linear(EMBED, n) for n in widths), nn.Linear(HEADS * size, EMBED)
        self.norms = nn.ModuleList(nn.RMSNorm(size) if loop.norm else nn.Identity() for _ in range(2))
        slots = 4 if loop.store == "ring" else SLOTS
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(loop.batch, loop.kv_heads, slots, size), persistent=False)
            rows = torch.zeros(loop.batch, slots, loop.kv_heads, size)
            self.register_buffer(f"{name[:-1]}_rows", rows, persistent=False)
        self.register_buffer("both", torch.zeros(2, loop.batch, SLOTS, loop.kv_heads, size), persistent=False)
        pages = (SLOTS // PAGE * loop.batch, PAGE, loop.kv_heads, size)
        self.register_buffer("key_pages", torch.zeros(pages), persistent=False)
        self.register_buffer("value_pages", torch.zeros(pages), persistent=False)
        table = torch.arange(SLOTS // PAGE * loop.batch).flip(0).view(loop.batch, -1)
        self.register_buffer("table", table, persistent=False)
        dims = size // 4 * 2 if loop.rotation == "partial" else size
        angles = torch.arange(32.0)[:, None] * 100 ** (-torch.arange(0, dims, 2) / dims)
        self.register_buffer("angles", angles, persistent=False)
        self.kept: list[tuple[Tensor, Tensor]] = []

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        turn = ROTATIONS.get(self.loop.rotation)
        return x if turn is None else turn(x, self.angles[places])

    def stored(self, k: Tensor, v: Tensor, past: Any, places: Tensor) -> tuple[Tensor, Tensor, Any, Tensor]:
        """Return the keys and values of all slots that are read, what is given back, and each slot's position."""
        store, stop = self.loop.store, int(places[-1]) + 1
        if store == "one tensor":
            both = torch.stack([k, v])
            both = both if past is None else torch.cat([past, both], 3)
            return both[0], both[1], both, torch.arange(stop)
        if store == "features side by side":
            both = torch.cat([k, v], -1)
            both = both if past is None else torch.cat([past, both], 2)
            return *both.split(k.shape[-1], -1), both, torch.arange(stop)
        if store in ("joined", "joined by token"):
            if store == "joined by token":
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            axis = 1 if store == "joined by token" else 2
            if past is not None:
                k, v = torch.cat([past[0], k], axis), torch.cat([past[1], v], axis)
            past = k, v
            if store == "joined by token":
                k, v = k.transpose(1, 2), v.transpose(1, 2)
            return k, v, past, torch.arange(stop)
        if store == "list":
            self.kept = [*(self.kept if stop > k.shape[2] else []), (k, v)]
            return *(torch.cat(each, 2) for each in zip(*self.kept, strict=True)), None, torch.arange(stop)
        if store == "pages":
            rows, within = self.table[:, places // PAGE], places % PAGE
            self.key_pages[rows, within] = k.transpose(1, 2)
            self.value_pages[rows, within] = v.transpose(1, 2)
            k, v = (each[self.table].flatten(1, 2).transpose(1, 2) for each in (self.key_pages, self.value_pages))
            return k[:, :, :stop], v[:, :, :stop], None, torch.arange(stop)
        if store == "ring":
            held = torch.arange(stop)[-4:]
            new = places[-4:]
            self.keys[:, :, new % 4], self.values[:, :, new % 4] = k[:, :, -4:], v[:, :, -4:]
            if len(places) > 1:  # a prompt sees itself
                return k, v, None, places
            return self.keys, self.values, None, torch.full((4,), SLOTS).scatter(0, held % 4, held)
        if store in ("by token", "one buffer"):
            whole = self.both if store == "one buffer" else (self.key_rows, self.value_rows)
            for buffer, new in zip(whole, (k, v), strict=True):
                buffer[:, int(places[0]) : stop] = new.transpose(1, 2)
            k, v = (buffer[:, :stop].transpose(1, 2) for buffer in whole)
            return k, v, None, torch.arange(stop)
        for buffer, new in ((self.keys, k), (self.values, v)):
            if store == "index_copy_":
                buffer.index_copy_(2, places, new)
            elif store == "index_put_":
                buffer[:, :, places] = new
            else:
                buffer[:, :, int(places[0]) : stop] = new
        if store == "slice":
            return self.keys[:, :, :stop], self.values[:, :, :stop], None, torch.arange(stop)
        return self.keys, self.values, None, torch.arange(SLOTS)

    def seen(self, apart: Tensor) -> Tensor:
        """Return which query sees which key, from the distance between them."""
        return (apart >= 0) & (apart < (self.loop.window or SLOTS))

    def forward(self, x: Tensor, past: Any, places: Tensor) -> tuple[Tensor, Any]:
        loop = self.loop
        b, n, _ = x.shape
        made = self.qkv[0](x).split(self.sizes, -1) if loop.packed else [make(x) for make in self.qkv]
        q, k, v = (part.view(b, n, -1, loop.head_dim).transpose(1, 2) for part in made)
        q, k = self.norms[0](q), self.norms[1](k)
        q = self.turned(q, places)
        k = k if loop.late else self.turned(k, places)
        k, v, past, slots = self.stored(k, v, past, places)
        k = self.turned(k, slots) if loop.late else k
        k, v = (each.repeat_interleave(HEADS // loop.kv_heads, 1) for each in (k, v))
        seen = self.seen(places[:, None] - slots)
        if loop.mask == "kernel":
            context = nn.functional.scaled_dot_product_attention(q, k, v, seen)
        else:
            scores = q @ k.mT * loop.head_dim**-0.5
            if loop.mask == "add":
                scores = scores + torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            else:
                scores = scores.masked_fill(~seen, -torch.inf)
            context = scores.softmax(-1) @ v
        return self.o(context.transpose(1, 2).reshape(b, n, -1)), past


class Decoder(nn.Module):
    def __init__(self, loop: Loop, kind: type[Layer] = Layer) -> None:
        super().__init__()
        self.loop, self.layers = loop, nn.ModuleList(kind(loop) for _ in range(loop.layers))

    def run(self, x: Tensor, pasts: Any, places: Tensor) -> tuple[Tensor, Any]:
        kept = []
        for layer, past in zip(self.layers, pasts or [None] * len(self.layers), strict=True):
            y, new = layer(x, past, places)
            x = x + y
            kept.append(new)
        return x, kept


class Returning(Decoder):
    """The cache knows how many tokens came before."""

    def forward(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        sizes = {"one tensor": 3, "joined by token": 1}
        first = None if past is None else past[0] if isinstance(past[0], Tensor) else past[0][0]
        start = 0 if first is None else first.shape[sizes.get(self.loop.store, 2)]
        return self.run(x, past, torch.arange(start, start + x.shape[1]))


class Numbered(Decoder):
    """The caller says where the tokens start."""

    def forward(self, x: Tensor, past: Any = None, start_pos: int = 0) -> tuple[Tensor, Any]:
        return self.run(x, past, torch.arange(start_pos, start_pos + x.shape[1]))


class Holding(Decoder):
    """The caller says where the tokens start, and the cache is in buffers."""

    def forward(self, x: Tensor, start_pos: int = 0) -> Tensor:
        return self.run(x, None, torch.arange(start_pos, start_pos + x.shape[1]))[0]


class Placed(Decoder):
    """The caller gives the position of each token, and the cache is in buffers."""

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        return self.run(x, None, input_pos)[0]


def decoder_of(loop: Loop, kind: type[Layer] = Layer) -> tuple[Decoder, dict[str, Any]]:
    """Return a decoder, and further arguments of a forward over all tokens."""
    if loop.store in HELD:
        tensor = loop.start == "tensor"
        return (Placed(loop, kind), {"input_pos": torch.arange(LENGTH)}) if tensor else (Holding(loop, kind), {})
    return (Numbered if loop.start == "number" else Returning)(loop, kind), {}


def arguments(module: Decoder, start: int, stop: int, past: Any) -> dict[str, Any]:
    """Return what a call takes beside its tokens."""
    given: dict[str, Any] = {"past": past} if module.loop.store in RETURNED else {}
    if isinstance(module, Placed):
        given["input_pos"] = torch.arange(start, stop)
    elif not isinstance(module, Returning):
        given["start_pos"] = start
    return given


def called(module: Decoder, x: Tensor, length: int = LENGTH) -> Any:
    """Run the loop by hand up to a token, and return the cache."""
    past = None
    for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, length))]:
        result = module(x[:, start:stop], **arguments(module, start, stop, past))
        past = result[1] if isinstance(result, tuple) else None
    return past


def truth(loop: Loop) -> dict[str, object]:
    """What the choices say of the last step."""
    past, empty = LENGTH - 1, 0
    way = "concatenated" if loop.store in (*RETURNED, "list") else "paged" if loop.store == "pages" else "in place"
    if loop.store == "ring":
        past = 3
    elif loop.store in ("all slots", "index_copy_", "index_put_"):
        empty = SLOTS - LENGTH
    position = None
    if loop.rotation:
        dims = loop.head_dim // 4 * 2 if loop.rotation == "partial" else loop.head_dim
        layout = "half" if loop.rotation in ("half", "partial") else "interleaved"
        position = "rotary", layout, dims, LENGTH - 1, 0 if loop.late else LENGTH - 1
    return {
        "heads": (HEADS, loop.kv_heads, loop.head_dim),
        "kind": {"self", *["grouped"] * (loop.kv_heads < HEADS)},
        "cache": (past, 1, empty, way),
        "position": position,
    }


def said(attention: Any) -> dict[str, object]:
    """What a report says of the same."""
    position, cache = attention.position, attention.cache
    return {
        "heads": (attention.num_heads, attention.num_kv_heads, attention.head_dim),
        "kind": set(attention.kind),
        "cache": cache and (cache.past, cache.new, cache.empty, cache.way),
        "position": position
        and (position.kind, position.layout, position.dims, position.query_offset, position.key_offset),
    }


def test_decode_loops(try_all: Callable[..., None]) -> None:
    def check(loop: Loop) -> None:
        torch.manual_seed(0)
        module, kwargs = decoder_of(loop)
        x = torch.randn(loop.batch, LENGTH, EMBED)
        trace, _ = decoded(Subject(module.eval(), (x,), kwargs, seed=0, grad=False), Show(), STEPS)
        assert [(row.queries, row.new) for row in trace.steps] == [(PROMPT, PROMPT), *[(1, 1)] * STEPS]
        pasts = [0, *range(PROMPT, LENGTH)] if loop.store != "ring" else [0, 3, 3, 3]
        assert [row.past for row in trace.steps] == pasts
        assert trace.decode.verdict != "differs"
        assert [said(each) for each in trace.attentions] == [truth(loop)] * loop.layers
        with torch.no_grad(), mha_inspect.recording() as block:
            called(module, x)
        assert [said(each) for each in block.trace.attentions[-loop.layers :]] == [truth(loop)] * loop.layers
        steps = block.trace.steps
        assert steps is not None
        assert [(row.queries, row.past) for row in steps] == [(row.queries, row.past) for row in trace.steps]

    try_all(check, loops(), 40)


class Faulty(Layer):
    """Goes wrong behind a cache."""

    fault = ""

    def forward(self, x: Tensor, past: Any, places: Tensor) -> tuple[Tensor, Any]:
        self.rotated = 0
        return super().forward(x, past, places)

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        self.rotated += 1  # the query comes first
        if self.fault == "query from zero" and self.rotated == 1:
            places = places - places[0]
        if self.fault == "key left alone" and self.rotated == 2:
            return x
        return super().turned(x, places + (self.fault == "key ahead" and self.rotated == 2))

    def stored(self, k: Tensor, v: Tensor, past: Any, places: Tensor) -> tuple[Tensor, Tensor, Any, Tensor]:
        if self.fault == "over the last slot" and int(places[0]) > 0 and self.loop.store not in ("ring", "list"):
            places, axis = places - 1, {"one tensor": 3, "joined by token": 1}.get(self.loop.store, 2)
            if past is not None:
                cut = [each.narrow(axis, 0, int(places[0])) for each in (past if type(past) is tuple else [past])]
                past = tuple(cut) if type(past) is tuple else cut[0]
        k, v, past, slots = super().stored(k, v, past, places)
        return k, v.roll(1, 2) if self.fault == "values late" else v, past, slots

    def seen(self, apart: Tensor) -> Tensor:
        if self.fault == "aligned top left":
            return torch.ones(apart.shape, dtype=torch.bool).tril()
        if self.fault == "own key hidden":
            return super().seen(apart) & (apart != 0)
        return super().seen(apart) | (self.fault == "slots open")


EXPECTED = {
    "": [],
    "values late": ["cache"],
    "own key hidden": ["causal"],
    "aligned top left": ["causal"],
    "slots open": ["cache"],
    "query from zero": ["rotary"],
    "key ahead": ["rotary"],
    "key left alone": ["rotary"],
    "over the last slot": ["rotary", "causal", "cache"],  # positions that count slots are wrong too
}
"""A fault to the checks that find it."""


def test_a_fault_behind_a_cache_is_the_one_finding(try_all: Callable[..., None]) -> None:
    def check(case: tuple[Loop, str, int]) -> None:
        loop, fault, new = case
        start = LENGTH - (1 if loop.store == "ring" or fault == "slots open" else new)
        torch.manual_seed(0)
        module, _ = decoder_of(loop, Faulty)
        x = torch.randn(loop.batch, LENGTH, EMBED)
        with torch.no_grad():
            past = called(module.eval(), x, start)
        for layer in module.layers:
            layer.fault = fault  # type: ignore[assignment]
        given = arguments(module, start, LENGTH, past)
        report = mha_inspect.check(module, x[:, start:], intent=mha_inspect.Intent(causal=True), **given)
        empty = truth(loop)["cache"][2]  # type: ignore[index]
        absent = (fault == "slots open" and not empty) or (EXPECTED[fault] == ["rotary"] and not loop.rotation)
        # One pair of features has one cosine at one position, and a matrix for each pair is no table of cosines.
        unknown = loop.rotation == "matrices" or (loop.rotation == "partial" and start == LENGTH - 1)
        absent |= fault == "key left alone" and unknown
        absent |= fault == "over the last slot" and loop.store in ("ring", "list")
        expected = [] if absent else EXPECTED[fault]
        # A value in a slot that is masked out has no gradient.
        found = [finding.check for finding in report.findings if finding.check != "parameters" or not expected]
        if fault == "over the last slot" and expected:
            assert found
            assert {*found} <= {*expected}
        else:
            assert found == expected
        assert fault != "aligned top left" or any("top left" in finding.sentence for finding in report.findings)

    try_all(check, st.tuples(loops(), st.sampled_from([*EXPECTED]), st.sampled_from((1, 2))), 120)
