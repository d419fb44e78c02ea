"""Attention as published code has it: additive, without a softmax, to memories, of two streams, in slots of a cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.reports.trace import Cache, Position, QKNorm

from .claims import HEAD_DIM, HEADS, WIDTH, Heads, claims
from .entry import (
    FOLDED,
    HEADS_IN_ROWS,
    KV_HEADS_IN_ROWS,
    ONE_HEAD_AT_A_TIME,
    OUTPUT,
    Arguments,
    linears,
    register,
    weights,
)

B, N = 2, 7

# -- scores that are no dot products -----------------------------------------------------------------------------------


class Additive(nn.Module):
    """Bahdanau's: `v · tanh(W q + U k)`, and a matrix for the values."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.score = nn.Linear(24, 19), nn.Linear(24, 19), nn.Linear(24, 17), nn.Linear(19, 1)
        self.causal = causal

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.score((q[:, :, None] + k[:, None]).tanh()).squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.q(x), self.k(x))
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -math.inf).triu(1)
        return scores.softmax(-1) @ self.v(x)

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        return self.score.double()((q + k).tanh()).squeeze(-1)


class AdditiveKeyFirst(Additive):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.score((k[:, :, None] + q[:, None]).tanh()).squeeze(-1).mT


class AdditiveByAVector(Additive):
    """The numbers that reduce the features are a parameter, not a layer."""

    def __init__(self) -> None:
        super().__init__()
        del self.score
        self.vector = nn.Parameter(torch.randn(19))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q[:, :, None] + k[:, None]).tanh() @ self.vector

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        return (q + k).tanh() @ self.vector.double()


class SideBySide(Additive):
    """Luong's concat."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.score = nn.Linear(38, 23), nn.Linear(23, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        n, m = q.shape[1], k.shape[1]
        pairs = torch.cat([q[:, :, None].expand(-1, -1, m, -1), k[:, None].expand(-1, n, -1, -1)], -1)
        return self.score(self.both(pairs).tanh()).squeeze(-1)

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        both = torch.cat(torch.broadcast_tensors(q, k), -1)
        return self.score.double()(self.both.double()(both).tanh()).squeeze(-1)


class Distance(Additive):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -((q[:, :, None] - k[:, None]) ** 2).sum(-1)

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).square().sum(-1)


def additive(name: str, make: Callable[[], nn.Module], formula: str, **facts: Any) -> None:
    usual: dict[str, Any] = {
        "heads": 1,
        "head_dim": 19,
        "value_dim": 17,
        "scale": None,
        "pair": True,
        "split": "batch token head_dim",
        "pairs": "batch query key",
        "absent": ("concat", "output"),
        "says": ("The scores are additive",),
        "formulas": {"scores": formula},
        "rows": linears(**{part: f"{part}: (heads head_dim) embed" for part in "qk"})
        | linears(v="v: (heads v_head_dim) embed"),
        "output": "",
        "given": lambda batch, length: ((torch.randn(batch, length, WIDTH),), {}),
        "sizes": ((B, N),),
    }
    register(name, make, **usual | facts)


additive("Additive", Additive, "W · tanh(q_heads + k_heads)")
additive(
    "AdditiveCausal", lambda: Additive(causal=True), "W · tanh(q_heads + k_heads)", kind=("self", "causal"), masked=True
)
additive("AdditiveByAVector", AdditiveByAVector, "W · tanh(q_heads + k_heads)")
additive("AdditiveKeyFirst", AdditiveKeyFirst, "W · tanh(k_heads + q_heads)")
additive("SideBySide", SideBySide, "W · tanh(W · [q_heads, k_heads])")
additive("Distance", Distance, "Σ pow(q_heads - k_heads)", masked=True)


# -- weights without a softmax -----------------------------------------------------------------------------------------


class Weighed(Heads):
    """Weights by a function of the scores."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        return self.joined(self.weigh(self.scores(q, k)), v)


def softmax1(scores: Tensor) -> Tensor:
    exponentials = scores.exp()
    return exponentials / (1 + exponentials.sum(-1, keepdim=True))


def sparsemax(scores: Tensor) -> Tensor:
    ordered, _ = scores.sort(-1, descending=True)
    ranks, sums = torch.arange(1, scores.shape[-1] + 1), ordered.cumsum(-1)
    count = (1 + ranks * ordered > sums).sum(-1, keepdim=True)
    return (scores - (sums.gather(-1, count - 1) - 1) / count).clamp(min=0)


def below(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:]).tril()


def distance(scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    return (places[:, None] - places).abs()


def divided(numbers: Tensor) -> Tensor:
    return numbers / numbers.sum(-1, keepdim=True)


def opposite(scores: Tensor) -> Tensor:
    """The further apart, the more weight: the scores are taken off their largest."""
    return (scores.amax(-1, keepdim=True).expand_as(scores) - scores).softmax(-1)


def weighed(name: str, weigh: Callable[[Tensor], Tensor], **facts: Any) -> None:
    """Register weights that are no softmax of the scores; `weigh` of the scores is what they have to be."""
    claims_of = {"heads": HEADS, "head_dim": HEAD_DIM, "given": _tokens, "sizes": ((B, N),), "ones": False}
    register(f"weighed: {name}", lambda: Weighed(weigh), **claims_of | {"weigh": weigh} | facts)


def _tokens(batch: int, length: int) -> Arguments:
    return (torch.randn(batch, length, WIDTH),), {}


NO_SOFTMAX: dict[str, Any] = {"softmax": False, "over": "", "says": ("without a softmax",)}
weighed("softmax1", softmax1, **NO_SOFTMAX, formulas={"weights": "exp(scores) / …"})
weighed("sparsemax", sparsemax, **NO_SOFTMAX | {"over": "key"}, formulas={"weights": "clamp(scores - …)"})
weighed("sigmoid", lambda s: (s - math.log(N)).sigmoid(), **NO_SOFTMAX, formulas={"weights": "sigmoid(scores - 1.946)"})
weighed("relu", lambda s: s.relu() / N, **NO_SOFTMAX, formulas={"weights": "relu(scores) / 7"})
weighed(
    "relu, masked afterwards",
    lambda s: s.relu() * below(s),
    **NO_SOFTMAX,
    kind=("self", "causal"),
    formulas={"weights": "mask(relu(scores))"},
)
weighed(
    "relu of a triangle",
    lambda s: s.relu().tril() / N,
    **NO_SOFTMAX,
    kind=("self", "causal"),
    formulas={"weights": "mask(relu(scores)) / 7"},
)
weighed(
    "a sine of the next number",
    lambda s: (s + 1).sin().softmax(-1),
    masked=True,
    formulas={"masked_scores": "sin(scores + 1)"},
)
weighed(
    "a softplus",
    lambda s: (1 + s.exp()).log().softmax(-1),
    masked=True,
    formulas={"masked_scores": "log(exp(scores) + 1)"},
)
weighed(
    "decayed and masked",
    lambda s: divided(s.exp() * below(s) * 0.8 ** distance(s)),
    kind=("self", "causal"),
    softmax=False,
    bias=True,
    formulas={"weights": "softmax(mask(scores + bias))"},
)
weighed(
    "guarded and masked",
    lambda s: (s.exp() * below(s)) / ((s.exp() * below(s)).sum(-1, keepdim=True) + 1e-6),
    kind=("self", "causal"),
    softmax=False,
    formulas={"weights": "softmax(mask(scores))"},
)
weighed("opposite", opposite, masked=True, scale=-(HEAD_DIM**-0.5), in_scores=HEAD_DIM**-0.5)
weighed(
    "squares, masked afterwards",
    lambda s: (s**2).relu() * below(s),
    **NO_SOFTMAX,
    kind=("self", "causal"),
    formulas={"weights": "mask(relu(pow(scores)))"},
)
weighed(
    "normed by standard deviation",
    lambda s: ((s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True)).softmax(-1),
    masked=True,
    scale=None,
)
weighed("normed by a layer", lambda s: F.layer_norm(s, s.shape[-1:]).softmax(-1), masked=True, scale=None)


# -- what is done to scores before the softmax -------------------------------------------------------------------------


class Scored(Heads):
    """Scores by a function of queries and keys, `batch heads position head_dim`."""

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.score = score

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        return self.joined(self.score(q, k).softmax(-1), v)


def scored(name: str, score: Callable[[Tensor, Tensor], Tensor], formula: str, **facts: Any) -> None:
    usual: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM, "given": _tokens, "sizes": ((B, N),), "ones": False}
    formulas = {"formulas": {"masked_scores": formula} if formula else {}, "masked": bool(formula)}
    register(f"scored: {name}", lambda: Scored(score), **usual | formulas | facts)


BIAS = torch.randn(N, N, generator=torch.Generator().manual_seed(0))


def in_product(q: Tensor, k: Tensor, beta: float) -> Tensor:
    made = torch.baddbmm(BIAS.expand(B * HEADS, N, N), q.flatten(0, 1), k.flatten(0, 1).mT, beta=beta, alpha=0.25)
    return made.unflatten(0, (B, HEADS))


def kernel(number: float) -> Callable[[], nn.Module]:
    """Return what makes attention by a kernel, with a number that is added to the scores of later keys."""

    class ByKernel(Heads):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
            mask = torch.full((x.shape[1], x.shape[1]), number).triu(1)
            return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))

    return ByKernel


IN_PRODUCT = {f"{part}_heads": f"(batch heads) {token} head_dim" for part, token in (("q", "query"), ("k", "key"))}
IN_BOTH = {"axes": IN_PRODUCT | {"scores": "(batch heads) query key"}}
scored("bias in the product", lambda q, k: in_product(q, k, 1), "scores + bias", scale=0.25, bias=True, **IN_BOTH)
scored("nothing in the product", lambda q, k: in_product(q, k, 0), "", scale=0.25, axes=IN_PRODUCT)
scored(
    "scaled twice", lambda q, k: (q @ k.mT / 2 + BIAS) / 2, "(scores + bias) / √4", scale=0.25, in_scores=0.5, bias=True
)
scored(
    "capped and biased",
    lambda q, k: 1.5 * torch.tanh(q @ k.mT / 2 / 1.5) + BIAS,
    "1.5 · tanh(scores / 1.5) + bias",
    scale=0.5,
    bias=True,
)
scored(
    "the past",
    lambda q, k: (q @ k.mT).masked_fill(torch.ones(N, N).tril(-1).bool(), -torch.inf),
    "mask(scores)",
    scale=1.0,
)
scored("a small bias", lambda q, k: q @ k.mT + torch.ones(N, N).triu(1) * -3.0, "scores + bias", scale=1.0, bias=True)
scored("padding", lambda q, k: (q @ k.mT).masked_fill(torch.arange(N) > 3, -torch.inf), "mask(scores)", scale=1.0)
_of_kernel: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM, "given": _tokens, "sizes": ((B, N),), "ones": False}
register("KernelLowered", kernel(-200.0), **_of_kernel, kind=("self", "causal"), masked=True)
register("KernelBiased", kernel(-50.0), **_of_kernel, masked=True, bias=True)


# -- memories and learned queries --------------------------------------------------------------------------------------


@claims(
    kind=(),
    absent=("key", "value", "k_proj", "v_proj"),
    rows=OUTPUT | linears(q="q: (heads head_dim) embed"),
    lengths={"batch": None, "key": 5},
    formulas={"k_heads": "the parameter keys", "v_heads": "the parameter values"},
    ones=False,
)
class Memory(Heads):
    """`softmax(x W_q · keysᵀ) · values` with learned keys and values."""

    def __init__(self) -> None:
        super().__init__()
        del self.k, self.v
        self.keys, self.values = (nn.Parameter(torch.randn(5, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.keys[None], self.values[None]))
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(
    heads=1,
    head_dim=WIDTH,
    scale=1.0,
    split="batch token head_dim",
    pairs="batch query key",
    kind=(),
    absent=("key", "value", "k_proj", "v_proj", "concat", "output"),
    axes={"k_heads": "key head_dim", "v_heads": "head_dim key"},
    rows=linears(q="q: (heads head_dim) embed"),
    output="",
    lengths={"key": 5},
    formulas={"query": "given", "k_heads": "the parameter keys", "v_heads": "the parameter values"},
    ones=False,
)
class MemoryByFunctional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.keys, self.values = (nn.Parameter(torch.randn(5, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.softmax(F.linear(self.q(x), self.keys), -1), self.values.T)


@claims(
    kind=(),
    absent=("key", "value", "k_proj", "v_proj"),
    rows=OUTPUT | linears(q="q: (heads head_dim) embed"),
    lengths={"batch": None, "key": 5},
    formulas={"k_heads": "the parameter keys"},
    ones=False,
)
class MemoryByKernel(Memory):
    def forward(self, x: Tensor) -> Tensor:
        k, v = (self.split(side.expand(len(x), -1, -1)) for side in (self.keys, self.values))
        return self.o(F.scaled_dot_product_attention(self.split(self.q(x)), k, v).transpose(1, 2).flatten(2))


@claims(
    kind=("cross",),
    lengths={"batch": None, "query": 5},
    formulas={"query": "the parameter latents", "key": "given"},
    ones=False,
)
class LatentQueries(Heads):
    """Learned queries `query embed` against keys `batch key embed`."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(self.latents[None]), self.k(x), self.v(x)))
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(
    kind=("cross",),
    heads=1,
    head_dim=WIDTH,
    split="batch token head_dim",
    pairs="batch query key",
    axes={
        "query": "query embed",
        "q_proj": "query (heads head_dim)",
        "q_heads": "query head_dim",
        "k_heads": "batch head_dim key",
    },
    lengths={"query": 5},
    formulas={"query": "the buffer table", "key": "given"},
    ones=False,
)
class QueriesOfABuffer(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.q(self.table) @ self.k(x).mT / math.sqrt(WIDTH)).softmax(-1)
        return self.o(weights @ self.v(x))


# -- other sides -------------------------------------------------------------------------------------------------------


@claims(
    qk_norm=QKNorm("l2", "head"),
    masked=True,
    rows=None,
    ones=False,
)
class SharedQueriesAndKeys(Heads):
    """Reformer's: a token's query is its key, so each token attends to itself only if there is no other."""

    def __init__(self) -> None:
        super().__init__()
        del self.k

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.split(self.q(x)), self.split(self.v(x))
        scores = self.scores(q, F.normalize(q, dim=-1)).masked_fill(torch.eye(x.shape[1]).bool(), -5e4)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.joined(scores.masked_fill(future, torch.finfo(q.dtype).min).softmax(-1), v)


@claims(
    given=lambda batch, length: ((torch.randn(4, length, batch, WIDTH),), {}),
    split="batch_1 batch_2 heads token head_dim",
    pairs="batch_1 batch_2 heads query key",
    projected="batch_1 batch_2 token (heads head_dim)",
    axes={
        "query": "query batch_1 batch_2 embed",
        "key": "key batch_1 batch_2 embed",
        "value": "key batch_1 batch_2 embed",
        "concat": "batch_1 batch_2 query (heads head_dim)",
        "output": "query batch_1 batch_2 embed",
    },
    lengths={"query": 4, "key": 4},
    ones=False,
)
class AlongColumns(Heads):
    """A table of aligned sequences, `row column batch embed`: a row attends to the rows of its column."""

    def forward(self, table: Tensor) -> Tensor:
        x = table.movedim(0, 2)
        q, k, v = (
            made.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3) for made in (self.q(x), self.k(x), self.v(x))
        )
        return self.o((self.scores(q, k).softmax(-1) @ v).transpose(-2, -3).flatten(-2)).movedim(2, 0)


@claims(
    **FOLDED,
    projected="token batch (heads head_dim)",
    axes={
        "query": "query batch embed",
        "key": "key batch embed",
        "value": "key batch embed",
        "concat": "(query batch) (heads head_dim)",
    },
    rows={
        "ma.in_proj_weight": "qkv: (qkv heads head_dim) embed",
        "ma.in_proj_bias": "qkv: (qkv heads head_dim)",
        "ma.out_proj.weight": "o: embed (heads head_dim)",
    },
    output="",
    reads_arguments=False,
    returns_output=False,
    ones=False,
)
class ProjectedBeforeALayer(nn.Module):
    """YOLO's: projections before a module that has projections of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.ma = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.ma(self.q(x), self.k(x), self.v(x))[0] + x


@claims(
    kind=("cross",),
    masked=True,
    lengths={"batch": None, "query": 2},
    formulas={"query": "the parameter pool"},
    ones=False,
)
class PackedPictures(Heads):
    """NaViT's: pictures are packed into one sequence, and each is pooled by a query that sees its own patches."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(self.pool).expand(len(x), -1, -1), self.k(x), self.v(x)))
        outside = torch.tensor([[False] * 4 + [True] * 3, [True] * 4 + [False] * 3])
        return self.joined(self.scores(q, k).masked_fill(outside, -torch.inf).softmax(-1), v)


@claims(
    value_dim=5,
    plain=False,
    says=("Each head combines the weights of 2 softmaxes",),
    split="batch (heads maps) token head_dim",
    pairs="batch (heads maps) query key",
    axes={
        "q_proj": "batch query (heads maps head_dim)",
        "k_proj": "batch key (heads maps head_dim)",
        "v_heads": "batch heads key v_head_dim",
        "context": "batch heads query v_head_dim",
    },
    lengths={"maps": 2},
    rows=None,
    ones=False,
)
class DifferentialMaps(nn.Module):
    """Each head has two maps, of which one is taken off the other; they lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.v, self.o = nn.Linear(WIDTH, HEADS * 5), nn.Linear(HEADS * 5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (side(x).unflatten(-1, (2 * HEADS, HEAD_DIM)).transpose(1, 2) for side in (self.q, self.k))
        weights = (q @ k.mT * HEAD_DIM**-0.5).softmax(-1).unflatten(1, (HEADS, 2))
        context = (weights[:, :, 0] - 0.3 * weights[:, :, 1]) @ self.v(x).unflatten(-1, (HEADS, 5)).transpose(1, 2)
        return self.o(context.transpose(1, 2).flatten(2))


@claims(
    heads=6,
    kv_heads=2,
    head_dim=4,
    kind=("self", "grouped"),
    axes={"q_proj": "batch query 32", "k_proj": "batch key 32", "v_proj": "batch key 8"},
    absent=("output",),
    rows=None,
    output="",
    ones=False,
)
class ConvolvedTogether(nn.Module):
    """Few key heads that are convolved along the sequence together with their queries, before they are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.convolve = nn.Linear(WIDTH, 40), nn.Conv1d(32, 32, 3, padding=2, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.qkv(x)
        convolved = self.convolve(packed[..., :32].mT)[..., : x.shape[1]].mT
        q, k, v = torch.cat([convolved, packed[..., 32:]], -1).split([24, 8, 8], -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        return ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)


@claims(
    heads=1,
    head_dim=WIDTH,
    given=lambda batch, length: ((torch.randn(length, WIDTH),), {}),
    axes={
        "query": "query embed",
        "key": "key embed",
        "value": "key embed",
        "q_proj": "(heads head_dim)",
        "k_proj": "key (heads head_dim)",
        "v_proj": "key (heads head_dim)",
        "q_heads": "head_dim",
        "k_heads": "key head_dim",
        "v_heads": "key head_dim",
        "scores": "key",
        "weights": "key",
        "context": "head_dim",
    },
    absent=("concat", "output"),
    rows=weights(**{part: f"{part}: (heads head_dim) embed" for part in "qkv"}),
    output="",
    ones=False,
)
class LastToken(nn.Module):
    """The last token attends to all, without axes for a batch, heads or queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.k(x) @ self.q(x[-1]) / math.sqrt(WIDTH)).softmax(0) @ self.v(x)


@claims(
    heads=1,
    head_dim=12,
    scale=1.0,
    kind=("cross",),
    split="batch token head_dim",
    pairs="batch query key",
    given=lambda batch, length: ((torch.randn(batch, length, 12), torch.randn(batch, 9, 12)), {}),
    absent=("query", "key", "value", "q_proj", "k_proj", "v_proj", "concat", "output"),
    rows={},
    output="",
    lengths={"key": 9},
    ones=False,
)
class Recurrent(nn.Module):
    """A decoder's steps attend to an encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.GRU(12, 12, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        keys, queries = self.encoder(memory)[0], self.decoder(x)[0]
        return torch.einsum("bqd,bkd->bqk", queries, keys).softmax(2) @ keys


@claims(
    heads=3,
    head_dim=4,
    given=lambda batch, length: ((torch.randn(batch, length, 12),), {}),
    projected="qkv batch heads token head_dim",
    axes={"concat": "batch heads query head_dim"},
    rows=None,
    output="",
    ones=False,
)
class PackedApart(nn.Module):
    """One product gives queries, keys and values, which are counted along a dimension of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Parameter(torch.randn(3, 12, 3, 4)), nn.Parameter(torch.randn(3, 4, 12))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bne,tehd->tbhnd", x, self.qkv)
        return torch.einsum("bhnd,hde->bne", (q @ k.mT / 2).softmax(-1) @ v, self.o)


class Reduced(nn.Module):
    """Fewer keys than queries, by a convolution before W_k and W_v (SegFormer, CvT) or as W_k and W_v (PVT)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.q, self.o = kind, nn.Linear(12, 12), nn.Linear(12, 12)
        self.few = nn.Conv2d(12, 24 if kind == "as" else 12, 2, 2)
        self.norm, self.kv = nn.LayerNorm(12), nn.Linear(12, 24)

    def forward(self, x: Tensor) -> Tensor:
        few = self.few(x.mT.unflatten(2, (4, 6))).flatten(2).mT
        k, v = (few if self.kind == "as" else self.kv(self.norm(few))).chunk(2, -1)
        q, k, v = (side.unflatten(-1, (3, 4)).transpose(1, 2) for side in (self.q(x), k, v))
        return self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


_reduced: dict[str, Any] = {"heads": 3, "head_dim": 4, "given": lambda batch, length: ((torch.randn(2, 24, 12),), {})}
_reduced |= {"sizes": ((2, 24),), "ones": False, "lengths": {"key": 6, "query": 24}}
register(
    "Reduced before",
    lambda: Reduced("before"),
    **_reduced,
    reads_arguments=False,
    rows=OUTPUT | linears(q="q: (heads head_dim) embed", kv="kv: (kv heads head_dim) embed"),
)
register(
    "Reduced as",
    lambda: Reduced("as"),
    **_reduced,
    axes={
        "key": "batch positions kdim",
        "value": "batch positions vdim",
        "k_proj": "batch (kv heads head_dim) key_1 key_2",
        "v_proj": "batch (kv heads head_dim) key_1 key_2",
    },
    rows=OUTPUT | linears(q="q: (heads head_dim) embed", few="kv: (kv heads head_dim) embed 2 2"),
)


class Streams(nn.Module):
    """Stable Diffusion 3: the tokens of both streams, one of them scaled by a condition, attend together."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image, self.of_condition = nn.Linear(24, 72), nn.Linear(24, 72), nn.Linear(24, 48)
        self.o, self.text_o = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, text: Tensor, image: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = self.of_condition(condition)[:, None].chunk(2, -1)
        both = self.text(text), self.image(image * (1 + scale) + shift)
        sides = [side.unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4) for side in both]
        q, k, v = torch.cat(sides, 3)
        context = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.text_o(context[:, : text.shape[1]]), self.o(context[:, text.shape[1] :])


register(
    "Streams",
    Streams,
    heads=HEADS,
    head_dim=HEAD_DIM,
    sizes=((2, 6),),
    ones=False,
    given=lambda batch, length: ((torch.randn(2, 3, 24), torch.randn(2, length, 24), torch.randn(2, 24)), {}),
    says=("Several projections give the queries",),
    projected="batch positions (qkv heads head_dim)",
    axes={
        **dict.fromkeys(("query", "key", "value", "output"), "batch positions embed"),
        "concat": "batch positions (heads head_dim)",
    },
    lengths={"query": 9, "key": 9},
    joined=False,
    rows=None,
    output="",
    returns_output=False,
)


@claims(
    given=lambda batch, length: ((torch.randn(length, length, WIDTH),), {}),
    bias=True,
    masked=True,
    lengths={"batch": N},
    rows=OUTPUT | linears(qkv="qkv: (qkv heads head_dim) embed"),
    ones=False,
)
class Pairs(nn.Module):
    """AlphaFold: the rows of a table of pairs, with a bias that is made of the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, HEADS), nn.Linear(WIDTH, WIDTH)

    def forward(self, pairs: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for t in self.qkv(pairs).chunk(3, -1))
        scores = q @ k.mT / math.sqrt(HEAD_DIM) + self.bias(pairs).movedim(-1, -3)[None]
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@claims(
    kv_heads=1,
    kind=("self", "grouped"),
    split="batch token head_dim",
    pairs="batch heads key",
    axes={
        "query": "batch embed",
        "q_proj": "batch (heads head_dim)",
        "q_heads": "batch heads head_dim",
        "context": "batch heads head_dim",
    },
    joined=False,
    reads_arguments=False,
    rows=None,
    ones=False,
)
class GivenMean(nn.Module):
    """One query, the mean of the tokens; a gate gives each token its part of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEAD_DIM), nn.Linear(WIDTH, HEAD_DIM)
        self.gate, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x.mean(1)).unflatten(-1, (HEADS, HEAD_DIM)) / math.sqrt(HEAD_DIM)
        read = (q @ self.k(x).mT).softmax(-1) @ self.v(x)
        return self.o((read[:, None] * self.gate(x).sigmoid().unflatten(-1, (HEADS, HEAD_DIM))).flatten(2))


# -- caches in slots, and latents --------------------------------------------------------------------------------------


class InSlots(nn.Module):
    """A cache written by index, of which empty slots are masked, and read as a whole."""

    def __init__(self, scatters: bool = False) -> None:
        super().__init__()
        self.q, self.o, self.scatters = nn.Linear(30, 30), nn.Linear(30, 30), scatters
        self.k, self.v = (nn.Linear(30, 15) for _ in range(2))
        self.register_buffer("keys", torch.zeros(B, 3, 11, 5))
        self.register_buffer("values", torch.zeros(B, 3, 11, 5))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for project, cache in ((self.k, self.keys), (self.v, self.values)):
            new = project(x).unflatten(-1, (3, 5)).transpose(1, 2)
            if self.scatters:
                cache.scatter_(2, at.view(1, 1, -1, 1).expand_as(new), new)
            else:
                cache[:, :, at] = new
        k, v = (cache.repeat_interleave(2, 1) for cache in (self.keys, self.values))
        scores = self.q(x).unflatten(-1, (6, 5)).transpose(1, 2) @ k.mT / 5**0.5
        weights = scores.masked_fill(torch.arange(11) > at[:, None], -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


for _scatters in (False, True):
    register(
        f"InSlots{', scattered' * _scatters}",
        lambda scatters=_scatters: InSlots(scatters),
        heads=6,
        kv_heads=3,
        head_dim=5,
        kind=("self", "causal", "grouped"),
        masked=True,
        grad=False,
        cache=Cache(0, N, 4, "in place"),
        lengths={"key": None},
        rows=KV_HEADS_IN_ROWS,
        sizes=((B, N),),
        ones=False,
        given=lambda batch, length: ((torch.randn(B, length, 30), torch.arange(length)), {}),
    )


class Absorbed(nn.Module):
    """DeepSeek-V2 and V3: the up-projection of the latents is multiplied into the queries and the context."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wkv_a = nn.Linear(30, 60, bias=False), nn.Linear(30, 18, bias=False)
        self.norm, self.wkv_b = nn.RMSNorm(14), nn.Linear(14, 66, bias=False)
        self.wo = nn.Linear(30, 30, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        nope, rope = self.wq(x).unflatten(-1, (6, -1)).split((6, 4), -1)
        latent, rope_key = self.wkv_a(x).split((14, 4), -1)
        latent, up = self.norm(latent), self.wkv_b.weight.view(6, -1, 14)
        q = torch.einsum("bqhd,hdc->bqhc", nope, up[:, :6])
        scores = torch.einsum("bqhc,bkc->bqhk", q, latent) + torch.einsum(
            "bqhr,bkr->bqhk", turned(rope), turned(rope_key[:, :, None])[:, :, 0]
        )
        context = torch.einsum("bqhk,bkc->bqhc", (scores / 10**0.5).softmax(-1), latent)
        return self.wo(torch.einsum("bqhc,hdc->bqhd", context, up[:, -5:]).flatten(2))


def turned(x: Tensor) -> Tensor:
    """Turn `batch position heads feature` by position, in neighbouring pairs."""
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1]))
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None]).flatten(-2)


register(
    "Absorbed",
    Absorbed,
    heads=6,
    kv_heads=1,
    head_dim=14,
    scale=10**-0.5,
    in_scores=1.0,
    kind=("self", "grouped"),
    position=Position("rotary", "interleaved", 4, 0, 0),
    qk_norm=QKNorm("rms", "head"),
    masked=True,
    plain=False,
    joined=False,
    pairs="batch query heads key",
    split="batch token head_dim",
    axes={
        "q_proj": "batch query (heads packed)",
        "q_heads": "batch query heads head_dim",
        "context": "batch query heads head_dim",
        "concat": "batch query (heads 5)",
    },
    sizes=((B, 17),),
    ones=False,
    given=lambda batch, length: ((torch.randn(B, length, 30),), {}),
    rows=None,
    output="",
    formulas={"masked_scores": "(scores + rotary(q) · rotary(k)ᵀ) / √10"},
)


class OfEachHead(Heads):
    """A matrix for each head: it gives the queries, or an output that is summed over the heads."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        shape = (HEADS, WIDTH, HEAD_DIM) if of == "queries" else (HEADS, HEAD_DIM, WIDTH)
        self.by_head = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        if self.of == "queries":
            q = self.q(x)[:, None] @ self.by_head
            return self.joined(self.scores(q, k).softmax(-1), v)
        return self.o(((self.scores(q, k).softmax(-1) @ v) @ self.by_head).sum(1))


_of_each: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM, "given": _tokens, "sizes": ((B, N),), "ones": False}
register(
    "QueriesOfEachHead",
    lambda: OfEachHead("queries"),
    **_of_each,
    axes={"q_proj": "(batch heads) query head_dim"},
    reads_arguments=False,
    rows=None,
)
register(
    "OutputOfEachHead",
    lambda: OfEachHead("output"),
    **_of_each,
    axes={"concat": "batch heads query head_dim"},
    rows=None,
    output="",
    returns_output=False,
)


# -- keys beside those of the tokens -----------------------------------------------------------------------------------


class FurtherKeys(Heads):
    """Attention to the input and to learned keys, before it or after it."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.more = place, nn.Parameter(torch.randn(2, 1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        sides = []
        for made, more in zip((self.k(x), self.v(x)), self.more, strict=True):
            parts = [more.expand(len(x), -1, -1), made]
            sides.append(torch.cat(parts if self.place == "before" else parts[::-1], 1))
        q, k, v = map(self.split, (self.q(x), *sides))
        return self.joined(self.scores(q, k).softmax(-1), v)


for _place in ("before", "after"):
    register(
        f"FurtherKeys: {_place}",
        lambda place=_place: FurtherKeys(place),
        heads=HEADS,
        head_dim=HEAD_DIM,
        given=_tokens,
        sizes=((B, N),),
        ones=False,
        lengths={"key": None},
    )


@claims(
    lengths={"key": None},
    rows=HEADS_IN_ROWS | linears(more_k="k: (heads head_dim) embed", more_v="v: (heads head_dim) embed"),
    ones=False,
)
class GlobalTokens(Heads):
    """Tokens of the same call, projected by matrices of their own, stand before the keys: they are no cache."""

    def __init__(self) -> None:
        super().__init__()
        self.more_k, self.more_v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :2]
        k, v = torch.cat([self.more_k(first), self.k(x)], 1), torch.cat([self.more_v(first), self.v(x)], 1)
        q, k, v = map(self.split, (self.q(x), k, v))
        return self.joined(self.scores(q, k).softmax(-1), v)


@claims(
    given=lambda batch, length: ((torch.randn(batch, length, WIDTH), *torch.randn(2, batch, HEADS, 4, HEAD_DIM)), {}),
    cache=Cache(4, 7, 0, "concatenated"),
    lengths={"key": None},
    ones=False,
)
class GivenPast(Heads):
    """Keys and values that were there before the call are a cache."""

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        return self.joined(self.scores(q, k).softmax(-1), v)


class InBuffers(Heads):
    """Keys and values of four tokens before the call and of the call are in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.randn(2, B, HEADS, 20, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        end = 4 + x.shape[1]
        self.kept[1, :, :, 4:end] = v
        self.kept[0, :, :, 4:end] = k
        k, v = self.kept[:, :, :, :end]
        return self.joined(self.scores(q, k).softmax(-1), v)


class WrittenNow(Heads):
    """The memory was there before, and its content was not: keys of other tokens of the call, and of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("room", torch.zeros(2, B, HEADS, 2 + N, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        for side, (new, first) in enumerate(((k, self.k(x[:, :2] * 2)), (v, self.v(x[:, :2] * 2)))):
            self.room[side, :, :, :2] = self.split(first)
            self.room[side, :, :, 2:] = new
        return self.joined(self.scores(q, self.room[0]).softmax(-1), self.room[1])


_in_buffers: dict[str, Any] = _of_kernel | {"grad": False, "lengths": {"key": None}}
register("InBuffers", InBuffers, **_in_buffers, cache=Cache(4, N, 0, "in place"))
register("WrittenNow", WrittenNow, **_in_buffers)


class SharedKeyHeads(nn.Module):
    """A loop over query heads, of which each slices its key head: as many key heads as there are different ones."""

    def __init__(self, key_of: tuple[int, ...]) -> None:
        super().__init__()
        self.key_of, self.q, self.o = key_of, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, 2 * HEAD_DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).split(HEAD_DIM, -1) for side in (self.q, self.k, self.v))
        made = [(q[h] @ k[key].mT / HEAD_DIM**0.5).softmax(-1) @ v[key] for h, key in enumerate(self.key_of)]
        return self.o(torch.cat(made, -1))


register(
    "SharedKeyHeads",
    lambda: SharedKeyHeads((0, 0, 1, 1)),
    heads=HEADS,
    kv_heads=2,
    head_dim=HEAD_DIM,
    kind=("self", "grouped"),
    given=_tokens,
    sizes=((B, N),),
    ones=False,
    **ONE_HEAD_AT_A_TIME,
    rows=KV_HEADS_IN_ROWS,
)
