"""Query, key and value from matrices of their own, in every layout."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from .base import Base
from .entry import FOLDED, OUTPUT, D, E, H, attends, linears


@attends(twin="Base")
class Fused(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


@attends(kind=("self", "causal"), masked=True, twin="MaskedFill")
class FusedCausal(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attends(split="batch token heads head_dim", twin="Base")
class Einsum(Base):
    """Heads after the sequence throughout."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        q, k, v = (t.unflatten(-1, (-1, D)) for t in (self.q(x), self.k(y), self.v(y)))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(D**-0.5).softmax(-1)
        return self.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))


@attends(
    projected="batch token heads head_dim",
    split="batch token heads head_dim",
    axes={"concat": "batch query heads head_dim"},
    rows={},
    output="",
)
class EinsumWeights(nn.Module):
    """Projections with a dimension for heads in the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(E, H, D)) for _ in range(3))
        self.out = nn.Parameter(torch.randn(H, D, E))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bne,ehd->bnhd", x, w) for w in self.w)
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / D**0.5).softmax(-1)
        return torch.einsum("bqhd,hde->bqe", torch.einsum("bhqk,bkhd->bqhd", weights, v), self.out)


@attends(**FOLDED, twin="Base")
class FoldBatchHeads(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        q, k, v = (rearrange(t, "b n (h d) -> (b h) n d", h=H) for t in (self.q(x), self.k(y), self.v(y)))
        weights = torch.bmm(q, k.transpose(1, 2)).div(math.sqrt(D)).softmax(-1)
        return self.o(rearrange(torch.bmm(weights, v), "(b h) n d -> b n (h d)", h=H))


@attends(split="(heads batch) token head_dim", pairs="(heads batch) query key", twin="Base")
class FoldHeadsBatch(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        q, k, v = (rearrange(t, "b n (h d) -> (h b) n d", h=H) for t in (self.q(x), self.k(y), self.v(y)))
        weights = torch.bmm(q, k.transpose(1, 2)).div(math.sqrt(D)).softmax(-1)
        return self.o(rearrange(torch.bmm(weights, v), "(h b) n d -> b n (h d)", h=H))


@attends(split="(heads batch) token head_dim", pairs="(heads batch) query key", twin="Base")
class TurnedHeads(Base):
    """Pieces of the features one after the other along the batch, as in Set Transformer (arXiv:1810.00825)."""

    def split(self, x: Tensor) -> Tensor:
        return torch.cat(x.split(D, 2), 0)

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(x.split(x.shape[0] // H, 0), 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.bmm(k.transpose(1, 2)) / math.sqrt(D)).softmax(2).bmm(v)


@attends(pairs="batch heads key query", twin="Base")
class KeyFirst(Base):
    """Scores are k·qᵀ, and the softmax runs over their rows."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (k @ q.transpose(-1, -2) / math.sqrt(D)).softmax(-2)
        return weights.transpose(-1, -2) @ v


@attends(twin="Base")
class Strided(Base):
    """Heads by strides alone."""

    def split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.contiguous().as_strided((batch, H, length, D), (length * width, D, width, 1))


@attends(early=D**-0.5, twin="Base")
class ScaledEarly(Base):
    """BART: the projection of the queries is scaled before it is split."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x) * D**-0.5)
        return self.o(self.join((q @ self.split(self.k(x)).transpose(-1, -2)).softmax(-1) @ self.split(self.v(x))))


@attends(
    given=lambda batch, length: ((torch.randn(batch, 3, length, E),), {}),
    axes={
        "query": "batch query_1 query_2 embed",
        "key": "batch key_1 key_2 embed",
        "value": "batch key_1 key_2 embed",
        "q_proj": "batch query_1 query_2 (heads head_dim)",
        "k_proj": "batch key_1 key_2 (heads head_dim)",
        "v_proj": "batch key_1 key_2 (heads head_dim)",
        "concat": "batch query_1 query_2 (heads head_dim)",
        "output": "batch query_1 query_2 embed",
    },
    lengths={"query": None, "key": None},
    ones=False,
)
class Image(Base):
    """Rows and columns stay apart until the product."""

    def split(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2).view(x.shape[0], -1, H, D).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(
            self.join(self.attend(*map(self.split, (self.q(x), self.k(x), self.v(x))))).view(*x.shape[:3], -1)
        )


@attends(twin="Base")
class Broadcast(Base):
    """Products as multiplications with broadcasting, and sums."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = ((q[:, :, :, None] * k[:, :, None]).sum(-1) / math.sqrt(D)).softmax(-1)
        return (weights[..., None] * v[:, :, None]).sum(-2)


@attends(pairs="batch heads key query", twin="Base")
class BroadcastKeyFirst(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = ((k[:, :, :, None] * q[:, :, None]).sum(-1) / math.sqrt(D)).softmax(-2)
        return (v[:, :, :, None] * weights[..., None]).sum(-3)


@attends(split="batch token heads head_dim", pairs="batch query key heads", twin="Base")
class BroadcastBeforeHeads(Base):
    """The heads stay behind the positions."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, D))

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = ((q[:, :, None] * k[:, None]).sum(-1) / math.sqrt(D)).softmax(2)
        return (weights[..., None] * v[:, None]).sum(2)


@attends(
    kind=(),
    absent=("query", "q_proj"),
    lengths={"query": 2},
    rows=OUTPUT | linears(k="k: (heads head_dim) embed", v="v: (heads head_dim) embed"),
)
class LearnedQuery(Base):
    """AIMv2's head: the queries are a parameter, which nothing projects."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 2, H, D))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query.expand(x.shape[0], -1, -1, -1).transpose(1, 2) * D**-0.5
        k, v = self.split(self.k(x)), self.split(self.v(x))
        return self.o(self.join((q @ k.transpose(-1, -2)).softmax(-1) @ v))


@attends(
    **FOLDED,
    projected="token batch (heads head_dim)",
    kind=("cross",),
    axes={
        "query": "query batch embed",
        "key": "batch key embed",
        "value": "batch key embed",
        "concat": "query batch (heads head_dim)",
        "output": "query batch embed",
    },
    lengths={"query": 1},
)
class Pooled(nn.Module):
    """A learned query for each sequence, with the sequence first: the head of SigLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, E))
        self.q, self.k, self.v, self.o = (
            nn.Linear(E, H * D),
            nn.Linear(E, H * D),
            nn.Linear(E, H * D),
            nn.Linear(H * D, E),
        )

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, D).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, probe = x.transpose(0, 1), self.probe.repeat(1, x.shape[0], 1)
        q, k, v = (self.split(t) for t in (self.q(probe), self.k(x), self.v(x)))
        context = (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v
        return self.o(context.transpose(0, 1).reshape(1, -1, H * D))


@attends(joined=False)
class OneGain(Base):
    """A single number, without a dimension, scales what the heads give."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) * self.gain
