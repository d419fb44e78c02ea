"""Modules about which more is easily claimed than is true: attentions that are unusual in one point each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .entry import HEADS_IN_ROWS, OUTPUT, Arguments, Entry, Truth, add, attends, linears

WIDTH, HEADS, HEAD_DIM = 24, 4, 6
WITHOUT_KEY_BIASES = {name: axes for name, axes in HEADS_IN_ROWS.items() if name not in ("k.bias", "v.bias")}
"""A product along the sequence comes between the keys and their heads, and their biases are not the heads' alone."""


def tokens(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, WIDTH),), {}


def image(height: int, width: int) -> Callable[[int, int], Arguments]:
    return lambda batch, length: ((torch.randn(batch, WIDTH, height, width),), {})


def claims(**facts: Any) -> Any:
    return attends(**{"heads": HEADS, "head_dim": HEAD_DIM, "given": tokens, "sizes": ((2, 7),), **facts})


class Heads(nn.Module):
    """Self-attention, a part of which each module below does in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, HEADS, HEAD_DIM).transpose(1, 2)

    def joined(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.o((weights @ v).transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / HEAD_DIM**0.5


@claims(
    heads=1,
    head_dim=WIDTH,
    kind=("cross",),
    absent=("concat", "output"),
    split="batch token head_dim",
    pairs="batch key query",
    over="query",
    says=("The softmax is over the queries instead of the keys",),
    formulas={"weights": "softmax over the queries(scores)"},
    plain=False,
    lengths={"query": 3},
    rows=linears(**{part: f"{part}: (heads head_dim) embed" for part in "qkv"}),
    output="",
    ones=False,
)
class Slots(Heads):
    """Slot attention, one turn of it: slots compete for the inputs, and keys are the left factor."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.slots.expand(len(x), -1, -1))
        shared = (self.k(x) @ q.transpose(1, 2) * WIDTH**-0.5).softmax(-1) + 1e-8
        return (shared / shared.sum(1, keepdim=True)).transpose(1, 2) @ self.v(x)


@claims(reads_arguments=False)
class Normed(Heads):
    """Query and key are normed apart, and made of something narrower, of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.down_q, self.down_k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(
            self.split,
            (self.q(self.down_q(self.q_norm(x)).relu()), self.k(self.down_k(self.k_norm(x)).relu()), self.v(x)),
        )
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(lengths={"key": None}, rows=WITHOUT_KEY_BIASES, ones=False)
class FewerKeys(Heads):
    """Linformer: keys and values are projected to fewer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fewer = nn.Parameter(torch.randn(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        k, v = (torch.einsum("btd,tk->bkd", project(x), self.fewer) for project in (self.k, self.v))
        q, k, v = map(self.split, (self.q(x), k, v))
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(mixed=True, plain=False, says=("weights after the softmax (talking heads)",))
class NormedWeights(Heads):
    """DeepViT: the weights are mixed, and normed, by head."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.norm = nn.Parameter(torch.randn(HEADS, HEADS)), nn.LayerNorm(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        weights = torch.einsum("bhij,hg->bijg", self.scores(q, k).softmax(-1), self.mixed)
        return self.joined(self.norm(weights).permute(0, 3, 1, 2), v)


@claims(
    heads=1,
    head_dim=WIDTH,
    masked=True,
    split="batch windows token head_dim",
    pairs="batch windows query key",
    axes={
        "query": "batch (windows query) embed",
        "key": "batch positions embed",
        "value": "batch positions embed",
        "q_proj": "batch (windows query) (heads head_dim)",
        "k_proj": "batch positions (heads head_dim)",
        "v_proj": "batch positions (heads head_dim)",
        "concat": "batch (windows query) (heads head_dim)",
        "output": "batch (windows query) embed",
    },
    lengths={"query": 4, "key": 12},
    sizes=((2, 16),),
    ones=False,
)
class Near(Heads):
    """Windows of four, each of which sees those beside it: no key is too late for its query."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(1, (-1, 4)) for project in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1]).view(1, -1, 4)
        k, v, behind = (self.beside(one, fill) for one, fill in ((k, 0.0), (v, 0.0), (at[..., None], -1)))
        behind = behind.squeeze(-1)[:, :, None]
        scores = q @ k.transpose(-1, -2) * WIDTH**-0.5
        far = (behind < at[..., None] - 4) | (behind > at[..., None] + 4) | (behind < 0)
        return self.o((scores.masked_fill(far, -torch.inf).softmax(-1) @ v).flatten(1, 2))

    def beside(self, x: Tensor, fill: float) -> Tensor:
        around = functional.pad(x, (0, 0, 0, 0, 1, 1), value=fill)
        return torch.cat([around[:, :-2], x, around[:, 2:]], dim=2)


@claims(
    kind=("self", "over pieces of tokens"),
    projected="batch token embed",
    axes={"concat": "batch query embed"},
    joined=False,
    rows={},
    output="",
    findings=frozenset({"heads"}),
    sizes=((2, 7), (2, 8)),
)
class Mixing(Heads):
    """A view to heads without a transpose."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made.view(len(x), HEADS, -1, HEAD_DIM) for made in (self.q(x), self.k(x), self.v(x)))
        return self.o((self.scores(q, k).softmax(-1) @ v).view(x.shape))


@claims(projected="(batch token) (heads head_dim)", sizes=((3, 7),))
class Flat(Heads):
    """Tokens are flattened before they are projected."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        q, k, v = (
            made.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)
            for made in (self.q(flat), self.k(flat), self.v(flat))
        )
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(
    axes={
        "query": "batch embed query_1 query_2",
        "key": "batch embed key_1 key_2",
        "value": "batch embed key_1 key_2",
        "q_proj": "batch (heads head_dim) query_1 query_2",
        "k_proj": "batch (heads head_dim) key_1 key_2",
        "v_proj": "batch (heads head_dim) key_1 key_2",
        "k_heads": "batch heads head_dim key",
        "v_heads": "batch heads head_dim key",
        "context": "batch heads head_dim query",
        "concat": "batch (heads head_dim) query_1 query_2",
        "output": "batch embed query_1 query_2",
    },
    lengths={"query": 15, "key": 15},
    given=image(3, 5),
    rows=linears(packed="qkv: (qkv heads head_dim) embed 1 1", o="o: embed (heads head_dim) 1 1"),
    output="",
    ones=False,
)
class PackedConvolution(nn.Module):
    """One convolution gives queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.o = nn.Conv2d(WIDTH, 3 * WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(1, (HEADS, HEAD_DIM)).flatten(3) for part in self.packed(x).chunk(3, 1))
        weights = (q.transpose(-1, -2) @ k * HEAD_DIM**-0.5).softmax(-1)
        return self.o((v @ weights.transpose(-1, -2)).flatten(1, 2).view(x.shape))


class Nan(Heads):
    """A root of what may be below zero, in the queries alone."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x.sqrt()), self.k(x), self.v(x)))
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(kv_heads=2, tiled=True, kind=("self", "grouped"), findings=frozenset({"grouped"}))
class PickedKeys(nn.Module):
    """Two key heads, put side by side twice."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * HEAD_DIM), nn.Linear(WIDTH, 2 * HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), -1, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = (made.view(len(x), -1, 2, HEAD_DIM).transpose(1, 2) for made in (self.k(x), self.v(x)))
        k, v = (torch.cat([one, one], 1) for one in (k, v))
        weights = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class OverFeatures(Heads):
    """Features attend to features, over all positions, as in XCiT."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(made).mT for made in (self.q(x), self.k(x), self.v(x)))
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        return self.o(((q @ k.mT * 3).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2))


@claims(
    axes={
        "key": "batch (key positions) embed",
        "value": "batch (key positions) embed",
        "k_proj": "batch (key positions) (heads head_dim)",
        "v_proj": "batch (key positions) (heads head_dim)",
    },
    lengths={"key": 4},
    sizes=((2, 8),),
    ones=False,
)
class Means(Heads):
    """Keys and values are sums of two positions, divided by two: means."""

    def forward(self, x: Tensor) -> Tensor:
        k, v = (self.split(made).unflatten(2, (-1, 2)).sum(3) / 2 for made in (self.k(x), self.v(x)))
        return self.joined((self.split(self.q(x)) * HEAD_DIM**-0.5 @ k.mT).softmax(-1), v)


@claims(
    kv_heads=2,
    tiled=True,
    kind=("self", "grouped"),
    projected="batch token (packed head_dim)",
    split="batch token heads head_dim",
    rows=OUTPUT | linears(packed="qkv: heads head_dim | kv_heads head_dim | kv_heads head_dim"),
    findings=frozenset({"grouped"}),
)
class PackedKeys(nn.Module):
    """Four query heads and two of keys and values out of one matrix, the latter repeated one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.o = nn.Linear(WIDTH, 8 * HEAD_DIM), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.packed(x).unflatten(-1, (8, HEAD_DIM)).split((4, 2, 2), -2)
        k, v = (made[:, :, None].expand(-1, -1, 2, -1, -1).flatten(2, 3) for made in (k, v))
        weights = (torch.einsum("bihd,bjhd->bhij", q, k) * HEAD_DIM**-0.5).softmax(-1)
        return self.o(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))


@claims(
    axes={"k_heads": "batch heads query key head_dim", "v_heads": "batch heads query key head_dim"},
    rows=OUTPUT | linears(q="q: (heads head_dim) embed", kv="kv: (kv heads head_dim) embed"),
    partly=("edges.weight", "edges.bias"),
    reads_arguments=False,
)
class EdgeKeys(nn.Module):
    """A graph's attention: what is known of the edge between two nodes is added to the key and to the value."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.edges = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        edges = self.edges(x[:, :, None] * x[:, None]).unflatten(-1, (HEADS, HEAD_DIM)).movedim(3, 1)
        q, k, v = (
            made.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for made in (self.q(x), *self.kv(x).chunk(2, -1))
        )
        k, v = k[:, :, None] + edges, v[:, :, None] + edges
        weights = (torch.einsum("bhid,bhijd->bhij", q, k) * HEAD_DIM**-0.5).softmax(-1)
        return self.o(torch.einsum("bhij,bhijd->bhid", weights, v).transpose(1, 2).flatten(2))


@claims(kind=("cross",), lengths={"query": 5, "key": 12}, ones=False)
class Resampled(Heads):
    """Learned queries, made and projected before the keys are."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(len(x), -1, -1)
        q, both = self.split(self.q(latents)), torch.cat([x, latents], 1)
        return self.joined(self.scores(q, self.split(self.k(both))).softmax(-1), self.split(self.v(both)))


@claims(
    split="(batch windows) heads token head_dim",
    pairs="(batch windows) heads query key",
    projected="(batch windows) token (heads head_dim)",
    axes={
        "query": "batch embed (windows_1 query_1) (windows_2 query_2)",
        "key": "batch embed (windows_1 positions_1) (windows_2 positions_2)",
        "value": "batch embed (windows_1 positions_1) (windows_2 positions_2)",
        "concat": "(batch windows) query (heads head_dim)",
        "output": "(batch windows) query embed",
    },
    lengths={"query": 4, "key": 16, "windows": 6},
    given=image(4, 6),
    ones=False,
)
class HaloBlocks(Heads):
    """Blocks of an image that look beyond their own border: keys are unfolded."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2)
        around = functional.unfold(x, 4, padding=1, stride=2).unflatten(1, (WIDTH, -1))
        around = around.permute(0, 3, 2, 1).flatten(0, 1)
        q, k, v = (made.unflatten(-1, (HEADS, HEAD_DIM)) for made in (self.q(blocks), self.k(around), self.v(around)))
        q, k, v = (made.flatten(1, -3).transpose(1, 2) for made in (q, k, v))
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(
    kv_heads=1,
    value_dim=5,
    kind=("self", "grouped"),
    projected="batch token heads head_dim",
    split="batch token heads head_dim",
    pairs="batch query heads key",
    axes={
        "query": "batch embed query_1 query_2",
        "key": "batch embed key_1 key_2",
        "value": "batch embed key_1 key_2",
        "k_proj": "batch key (kv_heads head_dim)",
        "v_proj": "batch key (kv_heads v_head_dim)",
        "k_heads": "batch key head_dim",
        "v_heads": "batch key v_head_dim",
        "concat": "batch query heads v_head_dim",
        "output": "batch embed query",
    },
    lengths={"query": 15, "key": 15},
    given=image(3, 5),
    rows={"k": "k: embed (kv_heads head_dim)", "v": "v: embed (kv_heads v_head_dim)"},
    output="",
    ones=False,
)
class FoldedHeads(nn.Module):
    """One key head for all, after features that stand second: the heads are made by an einsum, beside the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Parameter(torch.randn(HEADS, HEAD_DIM, WIDTH)), nn.Parameter(torch.randn(HEADS, 5, WIDTH))
        self.k, self.v = nn.Parameter(torch.randn(WIDTH, HEAD_DIM)), nn.Parameter(torch.randn(WIDTH, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2).transpose(1, 2)
        q = torch.einsum("bnd,hkd->bnhk", x, self.q)
        weights = (torch.einsum("bnhk,bmk->bnhm", q, x @ self.k) * HEAD_DIM**-0.5).softmax(-1)
        return torch.einsum("bnhv,hvd->bdn", torch.einsum("bnhm,bmv->bnhv", weights, x @ self.v), self.o)


class AcrossDepth(nn.Module):
    """An average over what layers gave goes straight into the queries of the next: that is no W_o."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.next = Pick(), OneHead()

    def forward(self, x: Tensor) -> Tensor:
        return self.next(self.mixed(x))


class Pick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT * WIDTH**-0.5).softmax(-1) @ x


class OneHead(Heads):
    def forward(self, x: Tensor) -> Tensor:
        return self.o((self.q(x) @ self.k(x).mT * WIDTH**-0.5).softmax(-1) @ self.v(x))


@claims(
    axes={"query": "batch (positions query) embed", "q_proj": "batch (positions query) (heads head_dim)"},
    lengths={"query": 4},
    sizes=((2, 8),),
    ones=False,
)
class PooledQueries(Heads):
    """Fewer queries: the largest of two positions, feature by feature, after their projection."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(made(x)) for made in (self.q, self.k, self.v))
        return self.joined(self.scores(q.unflatten(2, (2, -1)).amax(2), k).softmax(-1), v)


@claims(partly=("more.bias", "more.weight"), reads_arguments=False)
class ProjectedTwice(Heads):
    """A second projection is added to the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x) + self.more(x.cumsum(1)), self.v(x)))
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(
    heads=1,
    head_dim=WIDTH,
    absent=("query", "key", "value", "q_proj", "k_proj", "v_proj", "concat", "output"),
    split="batch token head_dim",
    pairs="batch query key",
    rows={},
    output="",
    ones=False,
)
class Plain(nn.Module):
    """Attention of what comes in to itself, without any projection."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT / WIDTH**0.5).softmax(-1) @ x


@claims(
    split="(batch windows) heads token head_dim",
    pairs="(batch windows) heads query key",
    projected="(batch windows) token (heads head_dim)",
    axes={
        "query": "batch (windows_1 positions_1) (windows_2 positions_2) embed",
        "key": "batch (windows_1 key_1) (windows_2 key_2) embed",
        "value": "batch (windows_1 key_1) (windows_2 key_2) embed",
        "q_proj": "batch (windows_1 positions_1) (windows_2 positions_2) (heads head_dim)",
        "concat": "(batch windows) query (heads head_dim)",
        "output": "(batch windows) query embed",
    },
    lengths={"query": 9, "key": 9, "windows": 10},
    given=lambda batch, length: ((torch.randn(batch, 6, 15, WIDTH),), {}),
    ones=False,
)
class GlobalQueries(Heads):
    """Windows of an image attend with queries that are the same for every window, in `batch windows` order or not."""

    def __init__(self, windows_first: bool = False) -> None:
        super().__init__()
        self.windows_first = windows_first

    def forward(self, x: Tensor) -> Tensor:
        cut = x.unflatten(2, (-1, 3)).unflatten(1, (-1, 3)).transpose(2, 3)  # batch 2 5 3 3 embed
        rows = cut.flatten(0, 2).flatten(1, 2)
        queries = functional.adaptive_max_pool2d(self.q(x).movedim(-1, 1), (3, 3)).flatten(2).mT
        times = len(rows) // len(x)
        queries = queries.repeat(times, 1, 1) if self.windows_first else queries.repeat_interleave(times, 0)
        q, k, v = map(self.split, (queries, self.k(rows), self.v(rows)))
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(kind=("self", "causal"), masked=True)
class Lowered(Heads):
    """A causal mask that takes much off the scores where a key is barred, as Keras does."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        scores, allowed = self.scores(q, k), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.joined(torch.where(allowed, scores, scores - 1e9).softmax(-1), v)


class BothWays(Heads):
    """Two sides attend to each other by one product, each with values of its own: the second of what the first gave."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, :3], x[:, 3:]
        scores = self.scores(self.split(self.q(left)), self.split(self.k(right)))
        left = self.joined(scores.softmax(-1), self.split(self.v(right)))
        return self.joined(scores.mT.softmax(-1), self.split(self.v(left)))


@claims(
    kv_heads=2,
    kind=("self", "grouped"),
    axes={
        f"{part}_proj": f"batch {token} (kv_heads packed head_dim)"
        for part, token in (("q", "query"), ("k", "key"), ("v", "key"))
    },
    rows=OUTPUT,
    partly=("packed.weight", "packed.bias"),
)
class GroupedPieces(nn.Module):
    """Group by group in one matrix: two heads of queries, one of keys, one of values; the last two are picked."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.o = nn.Linear(WIDTH, 8 * HEAD_DIM), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.packed(x).unflatten(-1, (2, 4, HEAD_DIM))
        q, k, v = made[..., :-2, :], made[..., [-2], :], made[..., [-1], :]
        q, k, v = (one.expand(q.shape).flatten(2, 3).transpose(1, 2) for one in (q, k, v))
        return self.o(((q @ k.mT * HEAD_DIM**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


ONE_HEAD = Truth(1, None, WIDTH, split="batch token head_dim", pairs="batch query key")
TWO = Entry(
    "AcrossDepth",
    AcrossDepth,
    tokens,
    (replace(ONE_HEAD, absent=("value", "v_proj", "concat", "output")), ONE_HEAD),
    sizes=((2, 7),),
    ones=False,
)
add(TWO)
FIRST = Truth(HEADS, None, HEAD_DIM, axes={"query": "batch positions embed"}, lengths={"query": 3, "key": None})
LAST = replace(FIRST, lengths={"query": 4, "key": None})
add(replace(TWO, name="BothWays", make=BothWays, attentions=(FIRST, LAST)))
