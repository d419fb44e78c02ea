"""Attention as people write it: one class a style, each with the sizes B, N, H, D of its input and heads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

H, D = 3, 5
E = 22  # not H * D


class Base(nn.Module):
    """Separate projections; `attend` is what a style writes."""

    kv_heads = H

    def __init__(self, heads: int = H) -> None:
        super().__init__()
        self.heads = heads
        kv = self.kv_heads if heads == H else heads
        self.q, self.o = nn.Linear(E, heads * D), nn.Linear(heads * D, E)
        self.k, self.v = nn.Linear(E, kv * D), nn.Linear(E, kv * D)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, D).transpose(-3, -2)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(-3, -2).flatten(-2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        y = x if y is None else y
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), self.k(y), self.v(y))))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


class Fused(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class FusedCausal(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class FusedGrouped(Base):
    kv_heads = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Packed(Base):
    """timm: one product, three pieces along an axis of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * H * D)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        return self.o((((q * D**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, H * D))


class Interleaved(Packed):
    """GPT-NeoX: each head's query, key and value side by side."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], H, 3 * D).transpose(1, 2).chunk(3, dim=-1)
        return self.o(self.join(self.attend(q, k, v)))


class Conv1D(Packed):
    """GPT-2: rows put into one dimension, a matrix the other way round, and a split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(E, 3 * H * D)), nn.Parameter(torch.randn(3 * H * D))

    def forward(self, x: Tensor) -> Tensor:
        qkv = torch.addmm(self.bias, x.view(-1, E), self.weight).view(*x.shape[:2], -1)
        q, k, v = map(self.split, qkv.split(H * D, dim=2))
        return self.o(self.join(self.attend(q, k, v)))


class Sliced(Packed):
    """Query, key and value as slices of what one product gives."""

    def forward(self, x: Tensor) -> Tensor:
        qkv, w = self.qkv(x), H * D
        return self.o(self.join(self.attend(*map(self.split, (qkv[..., :w], qkv[..., w : 2 * w], qkv[..., 2 * w :])))))


class PackedKeyValue(Base):
    """Perceiver: a projection for the queries, one for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(E, 2 * H * D)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        k, v = self.kv(x if y is None else y).chunk(2, dim=-1)
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), k, v)))))


class Einsum(Base):
    """Heads after the sequence throughout."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        q, k, v = (t.unflatten(-1, (-1, D)) for t in (self.q(x), self.k(y), self.v(y)))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(D**-0.5).softmax(-1)
        return self.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))


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


class FoldBatchHeads(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        q, k, v = (rearrange(t, "b n (h d) -> (b h) n d", h=H) for t in (self.q(x), self.k(y), self.v(y)))
        weights = torch.bmm(q, k.transpose(1, 2)).div(math.sqrt(D)).softmax(-1)
        return self.o(rearrange(torch.bmm(weights, v), "(b h) n d -> b n (h d)", h=H))


class FoldHeadsBatch(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        y = x if y is None else y
        q, k, v = (rearrange(t, "b n (h d) -> (h b) n d", h=H) for t in (self.q(x), self.k(y), self.v(y)))
        weights = torch.bmm(q, k.transpose(1, 2)).div(math.sqrt(D)).softmax(-1)
        return self.o(rearrange(torch.bmm(weights, v), "(h b) n d -> b n (h d)", h=H))


class TurnedHeads(Base):
    """Pieces of the features one after the other along the batch, as in Set Transformer (arXiv:1810.00825)."""

    def split(self, x: Tensor) -> Tensor:
        return torch.cat(x.split(D, 2), 0)

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(x.split(x.shape[0] // H, 0), 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.bmm(k.transpose(1, 2)) / math.sqrt(D)).softmax(2).bmm(v)


class TurnedHeadsOfSlices(TurnedHeads):
    def split(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., h * D : (h + 1) * D] for h in range(H)], 0)

    def join(self, x: Tensor) -> Tensor:
        return torch.cat(x.chunk(H, 0), -1)


class KeyPermuted(Base):
    """The keys are split and transposed for the product in one step."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, v = (t.view(b, n, H, D).permute(0, 2, 1, 3) for t in (self.q(x), self.v(x)))
        k = self.k(x).view(b, n, H, D).permute(0, 2, 3, 1)
        return self.o(self.join((torch.matmul(q, k) / D**0.5).softmax(-1) @ v))


class KeyFirst(Base):
    """Scores are k·qᵀ, and the softmax runs over their rows."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (k @ q.transpose(-1, -2) / math.sqrt(D)).softmax(-2)
        return weights.transpose(-1, -2) @ v


class ValueFirst(Base):
    """Context is (vᵀ · weightsᵀ)ᵀ, as in images with the features before the places."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1)
        return (v.transpose(-1, -2) @ weights.transpose(-1, -2)).transpose(-1, -2)


class ByHand(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(D))
        return e / e.sum(dim=-1, keepdim=True) @ v


class ByHandShifted(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        e = (scores - scores.max(dim=-1, keepdim=True).values).exp()
        return (e * (1 / (e.sum(-1).unsqueeze(-1) + 1e-9))) @ v


class ByHandMasked(Base):
    """Exponentials of what is not allowed are set to zero, in place."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        e = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        e = e.masked_fill(torch.ones(e.shape[-2:]).triu(1).bool(), 0.0)
        return e.div_(e.sum(-1, keepdim=True)) @ v


class LogSumExp(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        return torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v


class RepeatInterleave(Base):
    kv_heads = 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k.repeat_interleave(H, dim=1), v.repeat_interleave(H, dim=1))


class Grouped(nn.Module):
    """Six query heads, two for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(E, 6 * D), nn.Linear(E, 2 * D), nn.Linear(E, 2 * D)
        self.o = nn.Linear(6 * D, E)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, -1, D).transpose(1, 2) for t in (self.q(x), self.k(x), self.v(x)))
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(b, n, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1)
        return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


class GroupedExpand(Grouped):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, n, _ = k.shape
        k, v = (t[:, :, None].expand(b, 2, 3, n, D).reshape(b, 6, n, D) for t in (k, v))
        return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


class GroupedBroadcast(Grouped):
    """Five dimensions: each key head beside a group of query heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.unflatten(1, (2, 3))
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        return ((q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v).flatten(1, 2)


class GroupedFused(Grouped):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class GroupedSliced(nn.Module):
    """Phi-3: slices of one product, and those of the queries twice as wide as those of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(E, 4 * H * D), nn.Linear(2 * H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        qkv, w = self.qkv(x), H * D
        pieces = qkv[..., : 2 * w], qkv[..., 2 * w : 3 * w], qkv[..., 3 * w :]
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in pieces)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class OneKeyHead(Base):
    """Multi-query as GPT-BigCode has it: the query heads stand in the rows of one product."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        k, v = self.k(x)[..., :D], self.v(x)[..., :D]
        q = self.q(x).view(b, n * H, D)
        weights = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)).softmax(-1)
        return self.o(torch.bmm(weights, v).view(b, n, H * D))


def angles(n: int, width: int) -> Tensor:
    return torch.outer(torch.arange(n).float(), 10.0 ** -torch.arange(0, width, 2).float())


class RotateHalf(nn.Module):
    """LLaMA's rotary positions; with `part` only the first features of a head are turned."""

    width, part = 6, 6

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, H * self.width) for _ in range(3))
        self.o = nn.Linear(H * self.width, E)

    def rotate(self, x: Tensor) -> Tensor:
        turned, rest = x[..., : self.part], x[..., self.part :]
        both = torch.cat([angles(x.shape[-2], self.part)] * 2, -1)
        half = torch.cat((-turned[..., self.part // 2 :], turned[..., : self.part // 2]), -1)
        turned = turned * both.cos() + half * both.sin()
        return torch.cat((turned, rest), dim=-1) if rest.numel() else turned

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t(x).view(b, n, H, self.width).transpose(1, 2) for t in (self.q, self.k, self.v))
        weights = (self.rotate(q) @ self.rotate(k).transpose(2, 3) * self.width**-0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, -1))


class RotatePart(RotateHalf):
    width, part = 10, 4


class RotateComplex(RotateHalf):
    """Pairs of features as complex numbers."""

    def rotate(self, x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones(x.shape[-2], self.width // 2), angles(x.shape[-2], self.width))
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turn).flatten(-2)


class RotatePairs(RotateHalf):
    """Every other feature with the next."""

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = angles(x.shape[-2], self.width).cos(), angles(x.shape[-2], self.width).sin()
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


class NormedHeads(Base):
    """RMS norms on queries and keys, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(D), nn.LayerNorm(D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.q_norm(q), self.k_norm(k), v)


class UnitHeads(Base):
    """Cosine attention with a temperature for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(H, 1, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature).softmax(-1) @ v


class SoftCap(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * 0.25
        scores = torch.tanh(scores / 1.5) * 1.5
        return (scores + torch.full(scores.shape[-2:], -9.0).triu(1)).softmax(-1) @ v


class RelativeBias(Base):
    """A bias for each head and distance, out of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, H)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])[None] + 32
        scores = q @ k.transpose(-1, -2) / math.sqrt(D) + self.table(distance).permute(2, 0, 1)
        return scores.softmax(-1) @ v


class RelativeShift(Base):
    """Transformer-XL: a second product with projected positions, shifted into place."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.Linear(E, H * D, bias=False)
        self.u = nn.Parameter(torch.randn(H, 1, D))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[-2]
        r = self.split(self.r(torch.randn(2 * n - 1, E)))
        shifted = F.pad(q @ r.transpose(-1, -2), (1, 0)).view(-1, H, 2 * n, n)[:, :, 1:].reshape(-1, H, n, 2 * n - 1)
        return (((q + self.u) @ k.transpose(-1, -2) + shifted[..., :n]) / math.sqrt(D)).softmax(-1) @ v


class MaskedFill(Base):
    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mask(q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


class MaskedWhere(MaskedFill):
    def mask(self, scores: Tensor) -> Tensor:
        return torch.where(torch.ones(scores.shape[-2:]).tril().bool(), scores, torch.tensor(-1e9))


class MaskedAdd(MaskedFill):
    def mask(self, scores: Tensor) -> Tensor:
        return scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)


class MaskedInPlace(MaskedFill):
    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill_(torch.ones(scores.shape[-2:]).triu(1).bool(), -1e9)


class MaskedThenScaled(Base):
    """The scale comes after the bias, and so is no part of the scores."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.transpose(-1, -2) + torch.randn(H, 1, k.shape[-2])) / math.sqrt(D)).softmax(-1) @ v


class ScaledEarly(Base):
    """BART: the projection of the queries is scaled before it is split."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x) * D**-0.5)
        return self.o(self.join((q @ self.split(self.k(x)).transpose(-1, -2)).softmax(-1) @ self.split(self.v(x))))


class Sinks(Base):
    """A learned score for each head that takes a part of the weight and has no value."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(H))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        scores = torch.cat([scores, self.sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        return scores.softmax(-1)[..., :-1] @ v


class Dropped(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1), 0.3, self.training) @ v


class LowRank(Base):
    """Multi-latent attention: queries, and keys with values, go through something narrower."""

    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_norm, self.q_b = nn.Linear(E, 7), nn.LayerNorm(7), nn.Linear(7, H * (D + 2))
        self.kv_a, self.kv_norm, self.kv_b = nn.Linear(E, 9 + 2), nn.LayerNorm(9), nn.Linear(9, H * (D + 4))
        self.o = nn.Linear(H * 4, E)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (H, D + 2)).transpose(1, 2)
        latent, k_rot = self.kv_a(x).split([9, 2], dim=-1)
        k, v = self.kv_b(self.kv_norm(latent)).unflatten(-1, (H, D + 4)).transpose(1, 2).split([D, 4], dim=-1)
        k = torch.cat((k, k_rot.unsqueeze(1).expand(-1, H, -1, -1).cos()), dim=-1)
        return self.o(self.join((q @ k.transpose(-1, -2) / math.sqrt(D + 2)).softmax(-1) @ v))


class Windows(Base):
    """Attention within windows of four, cut out of the sequence after the projection."""

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, 4, H, D).permute(0, 3, 1, 2, 4)

    def join(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1, 4).reshape(x.shape[0], -1, H * D)


class Unfolded(Base):
    """Each query sees the five positions around it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (F.pad(t, (0, 0, 2, 2)).unfold(2, 5, 1) for t in (k, v))
        weights = (q.unsqueeze(-2) @ k / math.sqrt(D)).softmax(-1)
        return (weights @ v.transpose(-1, -2)).squeeze(-2)


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


class LearnedQuery(Base):
    """AIMv2's head: the queries are a parameter, which nothing projects."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 2, H, D))

    def forward(self, x: Tensor) -> Tensor:
        q = self.query.expand(x.shape[0], -1, -1, -1).transpose(1, 2) * D**-0.5
        k, v = self.split(self.k(x)), self.split(self.v(x))
        return self.o(self.join((q @ k.transpose(-1, -2)).softmax(-1) @ v))


class Image(Base):
    """Rows and columns stay apart until the product."""

    def split(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2).view(x.shape[0], -1, H, D).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(
            self.join(self.attend(*map(self.split, (self.q(x), self.k(x), self.v(x))))).view(*x.shape[:3], -1)
        )


class NoOutput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.attend(*map(self.split, (self.q(x), self.k(x), self.v(x)))))


class Loop(nn.Module):
    """A small matrix for each head, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(E, D) for _ in range(H)) for _ in range(3))
        self.o = nn.Linear(H * D, E)

    def heads(self, x: Tensor) -> list[Tensor]:
        found = []
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            found.append((q(x) @ k(x).transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v(x))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat(self.heads(x), dim=-1))


class LoopStacked(Loop):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.stack(self.heads(x), dim=2).flatten(2))


class LoopSlices(Base):
    """One projection, and a loop over its slices."""

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for h in range(H):
            q, k, v = (t[..., h * D : (h + 1) * D] for t in (self.q(x), self.k(x), self.v(x)))
            found.append((q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v)
        return self.o(torch.cat(found, dim=-1))


class LoopChunks(Base):
    """A loop over pieces of the queries, which is no loop over heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([super(LoopChunks, self).attend(part, k, v) for part in q.split(4, dim=-2)], dim=-2)
