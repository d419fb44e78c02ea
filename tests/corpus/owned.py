"""Parameters that belong to heads in other ways: joined, one for each head, computed, added to, packed with more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mha_inspect.reports.trace import QKNorm

from .claims import HEAD_DIM, HEADS, WIDTH, Heads
from .entry import OUTPUT, Arguments, Entry, Truth, add, linears, register

B, N = 2, 7


def _tokens(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, WIDTH),), {}


def owned(name: str, make: Callable[[], nn.Module], **facts: Any) -> None:
    usual = {"heads": HEADS, "head_dim": HEAD_DIM, "given": _tokens, "sizes": ((B, N),), "ones": False}
    register(name, make, **usual | facts)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


class OfSides(nn.Module):
    """Attention of heads that `sides` makes, and `output` puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(WIDTH, WIDTH)

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError

    def output(self, contexts: Tensor) -> Tensor:
        return self.o(contexts.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        return self.output((q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v)


# -- joined ------------------------------------------------------------------------------------------------------------


class JoinedWeights(OfSides):
    """A parameter for each side, joined before the projection."""

    def __init__(self, in_einsum: bool) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 5) for _ in range(3))
        self.in_einsum = in_einsum

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        weights = [self.w_q, self.w_k, self.w_v]
        if self.in_einsum:
            return [split(side) for side in torch.einsum("bne,cde->cbnd", x, torch.stack(weights))]
        return [split(side) for side in F.linear(x, torch.cat(weights)).chunk(3, -1)]


class WeightsOfHeads(OfSides):
    """Every head has parameters of its own, which are joined before the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.randn(HEAD_DIM, WIDTH) / 5 for _ in range(3 * HEADS))

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        return [split(side) for side in F.linear(x, torch.cat([*self.w])).chunk(3, -1)]


class JoinedHeads(OfSides):
    """One projection for each head, or for several, whose results are joined."""

    def __init__(self, join: Callable[[list[Tensor]], Tensor], heads_of_each: Sequence[int] = (1,) * HEADS) -> None:
        super().__init__()
        widths = [HEAD_DIM * heads for heads in heads_of_each]
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(WIDTH, width) for width in widths) for _ in range(3))
        self.join = join

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        return [self.join([layer(x) for layer in side]) for side in (self.q, self.k, self.v)]


def of_each_head(order: Sequence[int]) -> dict[str, str]:
    rows = dict(OUTPUT)
    for letter in "qkv":
        for place, head in enumerate(order):
            rows[f"{letter}.{place}.weight"] = f"{letter} {head}: head_dim embed"
            rows[f"{letter}.{place}.bias"] = f"{letter} {head}: head_dim"
    return rows


W_OF_SIDES = OUTPUT | {f"w_{letter}": f"{letter}: (heads head_dim) embed" for letter in "qkv"}
W_OF_HEADS = OUTPUT | {
    f"w.{HEADS * side + head}": f"{letter} {head}: head_dim embed"
    for side, letter in enumerate("qkv")
    for head in range(HEADS)
}
owned("JoinedByCat", lambda: JoinedWeights(False), rows=W_OF_SIDES)
owned("JoinedByStack", lambda: JoinedWeights(True), rows=W_OF_SIDES, projected="qkv batch token (heads head_dim)")
owned("WeightsOfHeads", WeightsOfHeads, rows=W_OF_HEADS)
BY_HEAD = "batch heads token head_dim"
owned(
    "HeadsStacked",
    lambda: JoinedHeads(lambda heads: torch.stack(heads, 1)),
    rows=of_each_head(range(HEADS)),
    projected=BY_HEAD,
)
owned("HeadsJoined", lambda: JoinedHeads(lambda heads: split(torch.cat(heads, -1))), rows=of_each_head(range(HEADS)))
owned(
    "HeadsBackwards",
    lambda: JoinedHeads(lambda heads: torch.stack(heads[::-1], 1)),
    rows=of_each_head(range(HEADS)[::-1]),
    projected=BY_HEAD,
)


# -- the output --------------------------------------------------------------------------------------------------------


class Summed(Heads):
    """Heads are projected one by one and added up; the sum may begin with the input."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        contexts = self.scores(q, k).softmax(-1) @ v
        columns = self.o.weight.split(HEAD_DIM, 1)
        if self.way == "product":
            by_head = self.o.weight.view(WIDTH, HEADS, HEAD_DIM).permute(1, 2, 0)
            return (contexts @ by_head).sum(1) + self.o.bias
        total = x if self.way == "residual" else torch.zeros_like(x)
        for head in range(HEADS):
            total = total + contexts[:, head] @ columns[head].T
        return total + self.o.bias


owned("SummedByLoop", lambda: Summed("loop"), output="", absent=("concat",))
owned("SummedByProduct", lambda: Summed("product"), output="", axes={"concat": BY_HEAD.replace("token", "query")})


# -- computed ----------------------------------------------------------------------------------------------------------


class MergedLora(nn.Linear):
    def __init__(self, low: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down, self.up, self.low = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(WIDTH, 2)), low

    def forward(self, x: Tensor) -> Tensor:
        added = self.up @ self.down
        return F.linear(x, added if self.low else self.weight + added, self.bias)


class Reversed(nn.Linear):
    """The rows are picked from last to first."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(WIDTH - 1, -1, -1)
        return F.linear(x, self.weight[order], self.bias[order])


def with_query(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    class Computed(Heads):
        """The weight of the queries is computed."""

        def __init__(self) -> None:
            super().__init__()
            self.q = make()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
            return self.joined(self.scores(q, k).softmax(-1), v)

    return Computed


owned("SpectralNorm", with_query(lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))), rows=None)
owned("MergedLora", with_query(MergedLora), rows=None)
owned("LowRankQuery", with_query(lambda: MergedLora(low=True)), rows=None)
owned("RowsReversed", with_query(lambda: Reversed(WIDTH, WIDTH)), rows=None)


# -- added, and packed with more ---------------------------------------------------------------------------------------


class Adapted(OfSides):
    """LoRA for queries and values beside a fused projection; `way` is how what it gives is added."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.way = nn.Linear(WIDTH, 3 * WIDTH), way
        self.down_q, self.down_v = (nn.Linear(WIDTH, 2, bias=False) for _ in range(2))
        self.up_q, self.up_v = (nn.Linear(2, WIDTH, bias=False) for _ in range(2))

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        q, v, packed = self.up_q(self.down_q(x)), self.up_v(self.down_v(x)), self.qkv(x)
        if self.way == "in place":
            packed[..., :WIDTH] += q
            packed[..., -WIDTH:] += v
        else:
            packed = packed + torch.cat([q, torch.zeros_like(q), v], -1)
        return [split(side) for side in packed.chunk(3, -1)]


PACKED = OUTPUT | linears(qkv="qkv: (qkv heads head_dim) embed")
owned("AdaptedInPlace", lambda: Adapted("in place"), rows=PACKED, reads_arguments=False)
owned(
    "Adapted",
    lambda: Adapted("joined"),
    rows=PACKED,
    projected="batch token (qkv heads head_dim)",
    reads_arguments=False,
)


class WideValues(nn.Module):
    """LeViT: each head's query, key and value side by side, and values that are wider."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * 16), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, -1)).split([4, 4, 8], 3))
        return self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


class HeadsPicked(Heads):
    """Heads are taken in another order, of all sides alike."""

    def split(self, x: Tensor) -> Tensor:
        return super().split(x)[:, torch.tensor([2, 0, 3, 1])]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        return self.joined(self.scores(q, k).softmax(-1), v)


class BesideFeedForward(nn.Module):
    """PaLM: queries beside the rows of the feed-forward, one key and one value."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.o, self.down = nn.Linear(WIDTH, 24 + 12 + 80), nn.Linear(24, WIDTH), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, rest = self.fused(x).split((24, 6, 6, 80), -1)
        weights = (torch.einsum("bhid,bjd->bhij", split(q), k) / 6**0.5).softmax(-1)
        gate, up = rest.chunk(2, -1)
        context = torch.einsum("bhij,bjd->bhid", weights, v).transpose(1, 2).flatten(2)
        return self.o(context) + self.down(F.silu(gate) * up)


class TransposedConvolution(nn.Module):
    """The weight of a transposed convolution is `in out *kernel`: W_q has its heads in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.ConvTranspose1d(WIDTH, 3 * WIDTH, 1), nn.ConvTranspose1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(1, (HEADS, HEAD_DIM)).mT for side in self.qkv(x).chunk(3, 1))
        return self.o(((q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v).mT.flatten(1, 2))


class OwnSizes(nn.Module):
    """Keys and values of fewer heads, and values of a width of their own; nothing is square."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(15, 30), nn.Linear(15, 10), nn.Linear(15, 14), nn.Linear(42, 15)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t(x).unflatten(-1, (h, -1)).transpose(1, 2) for t, h in ((self.q, 6), (self.k, 2), (self.v, 2)))
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SharedKeysAndValues(nn.Module):
    """One projection for keys and values, each taking the whole of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = (nn.Linear(22, 22) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kv, q = (t.unflatten(-1, (2, 11)).transpose(1, 2) for t in (self.kv(x), self.q(x)))
        return self.o(((q @ kv.mT / 11**0.5).softmax(-1) @ kv).transpose(1, 2).flatten(2))


owned(
    "WideValues",
    WideValues,
    heads=3,
    head_dim=4,
    value_dim=8,
    rows=None,
    axes={
        f"{part}_proj": f"batch {token} (heads packed)" for part, token in (("q", "query"), ("k", "key"), ("v", "key"))
    },
)
owned("HeadsPicked", HeadsPicked, rows=None)
owned(
    "BesideFeedForward",
    BesideFeedForward,
    kv_heads=1,
    kind=("self", "grouped"),
    axes={"k_heads": "batch key head_dim", "v_heads": "batch key head_dim"},
    rows=None,
    returns_output=False,
)
owned(
    "TransposedConvolution",
    TransposedConvolution,
    given=lambda batch, length: ((torch.randn(batch, WIDTH, length),), {}),
    axes={
        **{name: f"batch embed {token}" for name, token in (("query", "query"), ("key", "key"), ("value", "key"))},
        "concat": "batch (heads head_dim) query",
        "output": "batch embed query",
    },
    projected="batch (heads head_dim) token",
    rows={
        "qkv.weight": "qkv: embed (qkv heads head_dim) 1",
        "qkv.bias": "qkv: (qkv heads head_dim)",
        "o.weight": "o: (heads head_dim) embed 1",
    },
    output="",
)
owned(
    "OwnSizes",
    OwnSizes,
    heads=6,
    kv_heads=2,
    head_dim=5,
    value_dim=7,
    kind=("self", "grouped"),
    given=lambda b, n: ((torch.randn(b, n, 15),), {}),
    rows=linears(
        q="q: (heads head_dim) embed",
        k="k: (kv_heads head_dim) embed",
        v="v: (kv_heads v_head_dim) embed",
        o="o: embed (heads v_head_dim)",
    ),
)
owned(
    "SharedKeysAndValues",
    SharedKeysAndValues,
    heads=2,
    head_dim=11,
    given=lambda b, n: ((torch.randn(b, n, 22),), {}),
    rows=None,
    findings=frozenset({"parameters"}),
)


# -- loops over heads that differ --------------------------------------------------------------------------------------


class HeadsInTurn(Heads):
    """Heads one after another, `batch query key` each, with weights that hang on the number of the head."""

    def __init__(self, weigh: Callable[[int, Tensor], Tensor], sizes: Sequence[int] = (6, 6, 6, 6)) -> None:
        super().__init__()
        self.weigh, self.sizes = weigh, list(sizes)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(*(side(x).split(self.sizes, -1) for side in (self.q, self.k, self.v)), strict=True)
        made = [self.weigh(at, q @ k.mT / q.shape[-1] ** 0.5) @ v for at, (q, k, v) in enumerate(parts)]
        return self.o(torch.cat(made, -1))


def every_second_causal(at: int, scores: Tensor) -> Tensor:
    if at % 2 == 0:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1)


ONE = Truth(
    1,
    None,
    HEAD_DIM,
    split="batch token head_dim",
    pairs="batch query key",
    projected="batch token (packed head_dim)",
    axes={"concat": "batch query (packed head_dim)"},
    joined=False,
)
MASKED = replace(ONE, kind=("self", "causal"), masked=True)


def in_turn(name: str, make: Callable[[], nn.Module], *truths: Truth) -> None:
    """Register heads that differ: those that are alike are an attention of their own."""
    add(Entry(name, make, _tokens, truths, sizes=((B, N),), ones=False, reads_arguments=False, returns_output=False))


in_turn(
    "UnlikeScales",
    lambda: HeadsInTurn(lambda at, s: (s * (at + 1)).softmax(-1)),
    *(replace(ONE, scale=(at + 1) * HEAD_DIM**-0.5) for at in range(HEADS)),
)
in_turn("EverySecondCausal", lambda: HeadsInTurn(every_second_causal), MASKED, ONE, MASKED, ONE)


class Biased(nn.Module):
    """Norms the projected queries, before or after they are split into heads, and the input of W_o."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head, self.qkv, self.out = by_head, nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm, self.last = nn.LayerNorm(4 if by_head else 12), nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q if self.by_head else self.norm(q)
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (q, k, v))
        context = ((self.norm(q) if self.by_head else q) @ k.mT / 2).softmax(-1) @ v
        return self.out(self.last(context.transpose(1, 2).flatten(2)))


class Gated(nn.Module):
    """Gates the context, or the values, by a projection of the input, which may be packed with others."""

    def __init__(self, kind: str, heads: int = 3) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.qkv, self.out = nn.Linear(12, 48 if kind == "packed" else 36), nn.Linear(12, 12)
        if kind != "packed":
            self.gate = nn.Linear(12, heads if kind == "by head" else 12)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, *packed = map(self.split, self.qkv(x).split(12, -1))
        gate = packed[0] if packed else self.split(self.gate(x))
        weights = (q @ k.mT / 2).softmax(-1)
        if self.kind == "values":
            return self.merged(weights @ (v * gate.sigmoid()))
        return self.merged((weights @ v) * gate.sigmoid())

    def merged(self, context: torch.Tensor) -> torch.Tensor:
        return self.out(context.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """A language model: its head is its embedding, its layers repeat, and it has a mask and a table."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 12), nn.Linear(12, 11, bias=False)
        self.head.weight = self.embed.weight
        self.positions = nn.Parameter(torch.zeros(5, 12))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(12, 3, 16, batch_first=True) for _ in range(depth))
        self.unused = nn.Linear(12, 12)
        self.register_buffer("mask", torch.ones(5, 5).tril())
        self.register_buffer("table", torch.zeros(5, 4, dtype=torch.float64), persistent=False)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class InTurn(nn.Module):
    """One matrix for queries, keys and values, whose rows are in the order of an einops pattern."""

    def __init__(self, order: str, *, by_matrix: bool = False) -> None:
        super().__init__()
        self.order, self.by_matrix = order, by_matrix
        self.weight, self.o = nn.Parameter(torch.randn(36, 12)), nn.Linear(12, 12)
        if by_matrix:
            self.weight = nn.Parameter(torch.randn(12, 36))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x @ self.weight if self.by_matrix else x @ self.weight.T
        q, k, v = rearrange(rows, f"b t ({self.order}) -> qkv b h t (half d)", h=3, qkv=3, half=2)
        return self.o(rearrange((q @ k.mT / 2).softmax(-1) @ v, "b h t d -> b t (h d)"))


_of_twelve: dict[str, Any] = {
    "heads": 3,
    "head_dim": 4,
    "given": lambda b, n: ((torch.randn(b, n, 12),), {}),
    "rows": None,
}
owned("NormOfHeads", lambda: Biased(True), **_of_twelve, qk_norm=QKNorm("layer", "head"), joined=False)
owned("NormOfAll", lambda: Biased(False), **_of_twelve, qk_norm=QKNorm("layer", "all"), joined=False, mixed=True)
owned("GateOfFeatures", lambda: Gated("by feature"), **_of_twelve, joined=False)
owned("GateOfHeads", lambda: Gated("by head"), **_of_twelve, joined=False)
owned("GateOfValues", lambda: Gated("values"), **_of_twelve)
owned("GatePacked", lambda: Gated("packed"), **_of_twelve, joined=False)
