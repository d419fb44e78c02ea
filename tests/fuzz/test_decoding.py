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
from mha_inspect.layers.spec import Show
from mha_inspect.questions.decode import decoded
from mha_inspect.running.subject import Subject

from .test_styles import ROTATIONS

EMBED, HEADS, SLOTS, PAGE, RING, PROMPT, STEPS = 20, 4, 16, 4, 4, 4, 3
LENGTH = PROMPT + STEPS
RETURNED = ("joined", "features side by side")
"""Stores that a call gives back, and the next call is given."""
KEPT = ("list", "slice", "index_copy_", "ring", "pages")
"""Stores in the module."""


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

    store, rotation = one_of(*RETURNED, *KEPT), one_of("", *ROTATIONS)
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
        start=one_of("number", "tensor") if store in KEPT else one_of("cache", "cache", "number"),
        layers=one_of(1, 2, 3),
        batch=one_of(1, 2),
    )


@dataclass(frozen=True)
class Stored:
    """What a call reads after it stored its keys and values."""

    keys: Tensor
    """`batch kv_heads slot head_dim`."""
    values: Tensor
    positions: Tensor
    """The position of the token in each slot."""
    past: Any = None
    """What the next call is given."""


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
        slots = RING if loop.store == "ring" else SLOTS
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(loop.batch, loop.kv_heads, slots, size), persistent=False)
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

    def forward(self, x: Tensor, past: Any, places: Tensor) -> tuple[Tensor, Any]:
        loop = self.loop
        b, n, _ = x.shape
        projected = self.qkv[0](x).split(self.sizes, -1) if loop.packed else [make(x) for make in self.qkv]
        q, k, v = (part.view(b, n, -1, loop.head_dim).transpose(1, 2) for part in projected)
        q, k = self.norms[0](q), self.norms[1](k)
        q = self.turned(q, places)
        k = k if loop.late else self.turned(k, places)
        stored = STORES[loop.store](self, k, v, past, places)
        k = self.turned(stored.keys, stored.positions) if loop.late else stored.keys
        k = k.repeat_interleave(HEADS // loop.kv_heads, 1)
        v = stored.values.repeat_interleave(HEADS // loop.kv_heads, 1)
        apart = places[:, None] - stored.positions
        seen = (apart >= 0) & (apart < (loop.window or SLOTS))
        if loop.mask == "kernel":
            context = nn.functional.scaled_dot_product_attention(q, k, v, seen)
        else:
            scores = q @ k.mT * loop.head_dim**-0.5
            if loop.mask == "add":
                scores = scores + torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            else:
                scores = scores.masked_fill(~seen, -torch.inf)
            context = scores.softmax(-1) @ v
        return self.o(context.transpose(1, 2).reshape(b, n, -1)), stored.past


def joined(layer: Layer, k: Tensor, v: Tensor, past: Any, places: Tensor) -> Stored:
    if past is not None:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return Stored(k, v, torch.arange(k.shape[2]), past=(k, v))


def with_features_side_by_side(layer: Layer, k: Tensor, v: Tensor, past: Any, places: Tensor) -> Stored:
    """Give back `batch kv_heads token (2 head_dim)`."""
    both = torch.cat([k, v], -1)
    if past is not None:
        both = torch.cat([past, both], 2)
    keys, values = both.split(k.shape[-1], -1)
    return Stored(keys, values, torch.arange(both.shape[2]), past=both)


def in_list(layer: Layer, k: Tensor, v: Tensor, past: Any, places: Tensor) -> Stored:
    if places[0] == 0:
        layer.kept = []
    layer.kept.append((k, v))
    keys = torch.cat([pair[0] for pair in layer.kept], 2)
    values = torch.cat([pair[1] for pair in layer.kept], 2)
    return Stored(keys, values, torch.arange(keys.shape[2]))


def in_pages(layer: Layer, k: Tensor, v: Tensor, past: Any, places: Tensor) -> Stored:
    rows, within, stop = layer.table[:, places // PAGE], places % PAGE, int(places[-1]) + 1
    read = []
    for pages, new in ((layer.key_pages, k), (layer.value_pages, v)):
        pages[rows, within] = new.transpose(1, 2)
        read.append(pages[layer.table].flatten(1, 2).transpose(1, 2)[:, :, :stop])
    return Stored(*read, torch.arange(stop))


def in_ring(layer: Layer, k: Tensor, v: Tensor, past: Any, places: Tensor) -> Stored:
    new = places[-RING:]
    layer.keys[:, :, new % RING], layer.values[:, :, new % RING] = k[:, :, -RING:], v[:, :, -RING:]
    if len(places) > 1:  # a prompt sees itself
        return Stored(k, v, places)
    newest = torch.arange(int(places[-1]) + 1)[-RING:]
    return Stored(layer.keys, layer.values, torch.full((RING,), SLOTS).scatter(0, newest % RING, newest))


def in_slice(layer: Layer, k: Tensor, v: Tensor, past: Any, places: Tensor) -> Stored:
    start, stop = int(places[0]), int(places[-1]) + 1
    layer.keys[:, :, start:stop], layer.values[:, :, start:stop] = k, v
    return Stored(layer.keys[:, :, :stop], layer.values[:, :, :stop], torch.arange(stop))


def by_index_copy(layer: Layer, k: Tensor, v: Tensor, past: Any, places: Tensor) -> Stored:
    layer.keys.index_copy_(2, places, k)
    layer.values.index_copy_(2, places, v)
    return Stored(layer.keys, layer.values, torch.arange(SLOTS))


STORES: dict[str, Callable[[Layer, Tensor, Tensor, Any, Tensor], Stored]] = {
    "joined": joined,
    "features side by side": with_features_side_by_side,
    "list": in_list,
    "slice": in_slice,
    "index_copy_": by_index_copy,
    "ring": in_ring,
    "pages": in_pages,
}


class Decoder(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop, self.layers = loop, nn.ModuleList(Layer(loop) for _ in range(loop.layers))

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
        keys = None if past is None else past[0] if isinstance(past[0], Tensor) else past[0][0]
        start = 0 if keys is None else keys.shape[2]
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


def decoder_of(loop: Loop) -> tuple[Decoder, dict[str, Any]]:
    """Return a decoder, and further arguments of a forward over all tokens."""
    if loop.store in KEPT and loop.start == "tensor":
        return Placed(loop), {"input_pos": torch.arange(LENGTH)}
    if loop.store in KEPT:
        return Holding(loop), {}
    if loop.start == "number":
        return Numbered(loop), {}
    return Returning(loop), {}


def arguments(module: Decoder, start: int, stop: int, past: Any) -> dict[str, Any]:
    """Return what a call takes beside its tokens."""
    given: dict[str, Any] = {"past": past} if module.loop.store in RETURNED else {}
    if isinstance(module, Placed):
        given["input_pos"] = torch.arange(start, stop)
    elif not isinstance(module, Returning):
        given["start_pos"] = start
    return given


def call(module: Decoder, x: Tensor) -> None:
    """Run the loop by hand."""
    past = None
    for start, stop in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, LENGTH))]:
        result = module(x[:, start:stop], **arguments(module, start, stop, past))
        past = result[1] if isinstance(result, tuple) else None


def truth(loop: Loop) -> dict[str, object]:
    """What the choices say of the last step."""
    return {
        "heads": (HEADS, loop.kv_heads, loop.head_dim),
        "kind": {"self", "grouped"} if loop.kv_heads < HEADS else {"self"},
        "cache": (RING - 1 if loop.store == "ring" else LENGTH - 1, 1, empty_slots(loop), way_of_store(loop)),
        "position": position_of(loop),
    }


def empty_slots(loop: Loop) -> int:
    """Return how many slots the last step reads that have no token."""
    return SLOTS - LENGTH if loop.store == "index_copy_" else 0


def way_of_store(loop: Loop) -> str:
    if loop.store in (*RETURNED, "list"):
        return "concatenated"
    return "paged" if loop.store == "pages" else "in place"


def position_of(loop: Loop) -> tuple[object, ...] | None:
    """Return kind, layout, rotated features, and the first position of queries and keys in the last step."""
    if not loop.rotation:
        return None
    dims = loop.head_dim // 4 * 2 if loop.rotation == "partial" else loop.head_dim
    layout = "half" if loop.rotation in ("half", "partial") else "interleaved"
    return "rotary", layout, dims, LENGTH - 1, 0 if loop.late else LENGTH - 1


def said(attention: Any) -> dict[str, object]:
    """What a report says of the same."""
    position, cache = attention.position, attention.cache
    place = position and (position.kind, position.layout, position.dims, position.query_offset, position.key_offset)
    return {
        "heads": (attention.num_heads, attention.num_kv_heads, attention.head_dim),
        "kind": set(attention.kind),
        "cache": cache and (cache.past, cache.new, cache.empty, cache.way),
        "position": place,
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
        assert [said(attention) for attention in trace.attentions] == [truth(loop)] * loop.layers
        with torch.no_grad(), mha_inspect.recording() as block:
            call(module, x)
        assert [said(attention) for attention in block.trace.attentions[-loop.layers :]] == [truth(loop)] * loop.layers
        steps = block.trace.steps
        assert steps is not None
        assert [(row.queries, row.past) for row in steps] == [(row.queries, row.past) for row in trace.steps]

    try_all(check, loops(), 8)
