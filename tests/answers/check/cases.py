"""Attention that runs and is wrong, each beside a twin that differs in the one line: after threads that people wrote.

A class is a kind of mistake. `wrong` chooses the line; the declared intent is the smallest that tells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.answers.check.intent import Intent

H, D, N, B = 4, 6, 10, 3
E = H * D


def future(n: int, m: int | None = None, diagonal: int = 1) -> Tensor:
    return torch.ones(n, m or n, dtype=torch.bool).triu(diagonal)


def angles(n: int, start: int = 0, width: int = D) -> Tensor:
    return torch.outer(torch.arange(start, start + n).float(), 10.0 ** -torch.arange(0, width, 2).float())


def halves(x: Tensor, start: int = 0) -> Tensor:
    both = torch.cat([angles(x.shape[-2], start, x.shape[-1])] * 2, -1)
    a, b = x.chunk(2, -1)
    return x * both.cos() + torch.cat((-b, a), -1) * both.sin()


def pairs(x: Tensor, start: int = 0) -> Tensor:
    turn = angles(x.shape[-2], start, x.shape[-1])
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()), -1).flatten(-2)


class Right(nn.Module):
    """Attention as it should be; a case overrides the step that goes wrong."""

    kv_heads = H

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.q, self.o = nn.Linear(E, E), nn.Linear(E, E)
        self.k, self.v = nn.Linear(E, self.kv_heads * D), nn.Linear(E, self.kv_heads * D)

    def forward(self, x: Tensor) -> Any:
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), self.k(x), self.v(x))))))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, D).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weigh(self.mask(q @ k.transpose(-1, -2) / math.sqrt(D))) @ v

    def mask(self, scores: Tensor) -> Tensor:
        return scores

    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


# -- heads, split and merged -------------------------------------------------------------------------------------------


class SplitByView(Right):
    """reczoo/FuxiCTR#30."""

    def split(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b, H, n, D) if self.wrong else x.view(b, n, H, D).transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, E) if self.wrong else super().join(x)


class KeysSplitByView(Right):
    def forward(self, x: Tensor) -> Tensor:
        q, v = self.split(self.q(x)), self.split(self.v(x))
        k = self.k(x).view(x.shape[0], H, -1, D) if self.wrong else self.split(self.k(x))
        return self.o(self.join(self.attend(q, k, v)))


class ValuesSplitByView(Right):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.split(self.q(x)), self.split(self.k(x))
        v = self.v(x).view(x.shape[0], H, -1, D) if self.wrong else self.split(self.v(x))
        return self.o(self.join(self.attend(q, k, v)))


class SplitIntoBatch(Right):
    """649453932/Chinese-Text-Classification-Pytorch#53: view(batch * heads, -1, head_dim)."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (self.fold(t(x)) for t in (self.q, self.k, self.v))
        out = (q @ k.mT / math.sqrt(D)).softmax(-1) @ v
        return self.o(out.view(b, n, E) if self.wrong else out.view(b, H, n, D).transpose(1, 2).reshape(b, n, E))

    def fold(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b * H, n, D) if self.wrong else x.view(b, n, H, D).transpose(1, 2).reshape(b * H, n, D)


class MergedByReshape(Right):
    """jsbaan/transformer-from-scratch#6."""

    def join(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[2], E) if self.wrong else super().join(x)


class MergedFused(Right):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def join(self, x: Tensor) -> Tensor:
        return x.contiguous().view(x.shape[0], -1, E) if self.wrong else super().join(x)


class MergedFromHeadsFirst(Right):
    """hackiey/QAnet-pytorch#2: the heads are the first dimension."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t(x).view(b, n, H, D).permute(2, 0, 1, 3) for t in (self.q, self.k, self.v))
        out = (q @ k.mT / math.sqrt(D)).softmax(-1) @ v
        return self.o(out.reshape(b, n, E) if self.wrong else out.permute(1, 2, 0, 3).reshape(b, n, E))


class UnfoldedInTheOtherOrder(Right):
    """gazelle93/Transformer-Various-Positional-Encoding#1: folded as (batch heads), unfolded as (heads batch)."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (self.split(t(x)).reshape(b * H, n, D) for t in (self.q, self.k, self.v))
        out = torch.bmm((torch.bmm(q, k.mT) / math.sqrt(D)).softmax(-1), v)
        return self.o(self.join(out.view(H, b, n, D).transpose(0, 1) if self.wrong else out.view(b, H, n, D)))


class MergedTwice(Right):
    """The context is transposed by the caller as well."""

    def join(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return (x.transpose(1, 2) if self.wrong else x).reshape(x.shape[0], -1, E)


class PackedSplitByView(Right):
    def __init__(self, wrong: bool) -> None:
        super().__init__(wrong)
        self.q = self.k = self.v = nn.Identity()  # type: ignore[assignment]  # they are one matrix here
        self.qkv = nn.Linear(E, 3 * E)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        qkv = self.qkv(x)
        q, k, v = qkv.view(b, 3, H, n, D).unbind(1) if self.wrong else qkv.view(b, n, 3, H, D).permute(2, 0, 3, 1, 4)
        return self.o(self.join(self.attend(q, k, v)))


# -- what the softmax runs over ----------------------------------------------------------------------------------------


class SoftmaxOverQueries(Right):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2 if self.wrong else -1)


class SoftmaxOverHeads(Right):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(1 if self.wrong else -1)


class SoftmaxOverBatch(Right):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(0 if self.wrong else -1)


class SoftmaxWithoutDim(Right):
    """F.softmax without dim takes dimension 0 of three."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (self.split(t(x)).reshape(b * H, n, D) for t in (self.q, self.k, self.v))
        weights = F.softmax(q @ k.mT / math.sqrt(D), dim=0 if self.wrong else -1)
        return self.o(self.join((weights @ v).view(b, H, n, D)))


class OverHeads(Right):
    """The heads are left where the product looks for positions."""

    def split(self, x: Tensor) -> Tensor:
        x = x.view(x.shape[0], x.shape[1], H, D)
        return x if self.wrong else x.transpose(1, 2)

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(2) if self.wrong else super().join(x)


class OverHeadsFused(OverHeads):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class WeightsCutOff(Right):
    def weigh(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        return weights * (scores > 0) if self.wrong else weights


class SoftmaxOfSoftmax(Right):
    def weigh(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1).softmax(-1) if self.wrong else scores.softmax(-1)


class MaskAfterSoftmax(Right):
    def weigh(self, scores: Tensor) -> Tensor:
        bar = future(scores.shape[-1])
        return scores.softmax(-1).masked_fill(bar, 0) if self.wrong else scores.masked_fill(bar, -math.inf).softmax(-1)


class MaskTimesWeights(Right):
    def weigh(self, scores: Tensor) -> Tensor:
        keep = (~future(scores.shape[-1])).float()
        return scores.softmax(-1) * keep if self.wrong else scores.masked_fill(keep == 0, -math.inf).softmax(-1)


# -- masks -------------------------------------------------------------------------------------------------------------


class MaskTimesScores(Right):
    def mask(self, scores: Tensor) -> Tensor:
        keep = (~future(scores.shape[-1])).float()
        return scores * keep if self.wrong else scores.masked_fill(keep == 0, -math.inf)


class TinyBar(Right):
    """1e-9 where -1e9 was meant."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(future(scores.shape[-1]), 1e-9 if self.wrong else -1e9)


class TinyNegativeBar(Right):
    def mask(self, scores: Tensor) -> Tensor:
        return torch.where(future(scores.shape[-1]), torch.tensor(-1e-9 if self.wrong else -1e9), scores)


class MaskOfOnesAdded(Right):
    """A boolean mask is added as numbers."""

    def mask(self, scores: Tensor) -> Tensor:
        bar = future(scores.shape[-1]).float()
        return scores + (bar if self.wrong else bar * -1e9)


class CausalOneLate(Right):
    """kzl/decision-transformer#30 and many like it."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(future(scores.shape[-1], diagonal=2 if self.wrong else 1), -math.inf)


class CausalWithoutItself(Right):
    """RVC-Boss/GPT-SoVITS#965: the diagonal is barred."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(future(scores.shape[-1], diagonal=0 if self.wrong else 1), -1e9)


class CausalTurnedRound(Right):
    def mask(self, scores: Tensor) -> Tensor:
        keep = torch.ones(scores.shape[-1], scores.shape[-1]).tril()
        return scores.masked_fill(keep == (1 if self.wrong else 0), -1e9)


class CausalForgotten(Right):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=not self.wrong)


class CausalBooleanForFused(Right):
    """torch's fused kernel keeps where a mask is True, its own layer bars there."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bar = future(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bar.mT if self.wrong else ~bar)


class CausalAlongHeads(Right):
    """The triangle lies over the heads' axis and is broadcast over the queries."""

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        bar = future(n)
        return scores.masked_fill(bar[: scores.shape[1]][None, :, None] if self.wrong else bar, -1e9)


class NormOverPositions(Right):
    """A norm over the positions tells each of the later ones."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(future(scores.shape[-1]), -1e9)

    def forward(self, x: Tensor) -> Tensor:
        dims = (1, 2) if self.wrong else (2,)
        return super().forward((x - x.mean(dims, keepdim=True)) / x.std(dims, keepdim=True))


class ConvolutionSeesAhead(Right):
    """A convolution before causal attention, padded on both sides."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(wrong)
        self.conv = nn.Conv1d(E, E, 3)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(future(scores.shape[-1]), -1e9)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(F.pad(x.mT, (1, 1) if self.wrong else (2, 0))).mT)


class WindowOneWide(Right):
    """huggingface/transformers#39408: a window of 4 that sees 5."""

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        far = torch.arange(n)[:, None] - torch.arange(n)
        return scores.masked_fill((far < 0) | (far > 4 if self.wrong else far >= 4), -math.inf)


class WindowOneNarrow(Right):
    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        return scores.masked_fill(future(n) | ~future(n, diagonal=-2 if self.wrong else -3), -1e9)


class WindowWithoutEnd(Right):
    """The window's other side is barred, and the far past is not."""

    def mask(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        far = torch.arange(n)[:, None] - torch.arange(n)
        return scores.masked_fill((far < 0) if self.wrong else (far < 0) | (far > 3), -1e9)


class Padded(Right):
    """Takes a mask of `batch key`, True where there is a token."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.padding = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        return super().forward(x)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.padding[:, None, None, :], -1e9)


class PaddingTurnedRound(Padded):
    """pytorch/pytorch#27968 and others: True means the opposite."""

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill((self.padding if self.wrong else ~self.padding)[:, None, None, :], -1e9)


class PaddingOnQueries(Padded):
    def mask(self, scores: Tensor) -> Tensor:
        keep = self.padding[:, None, :, None] if self.wrong else self.padding[:, None, None, :]
        return scores.masked_fill(~keep, -1e9)


class PaddingInTheOtherOrder(Padded):
    """lsdefine/attention-is-all-you-need-keras#36: mask and heads are folded in different orders."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        keep = torch.ones(b, n, dtype=torch.bool) if mask is None else mask.bool()
        q, k, v = (self.split(t(x)).reshape(b * H, n, D) for t in (self.q, self.k, self.v))
        keep = (keep.repeat(H, 1) if self.wrong else keep.repeat_interleave(H, 0))[:, None, :]
        out = (q @ k.mT / math.sqrt(D)).masked_fill(~keep, -1e9).softmax(-1) @ v
        return self.o(self.join(out.view(b, H, n, D)))


class PaddingForgotten(Padded):
    def mask(self, scores: Tensor) -> Tensor:
        return scores if self.wrong else super().mask(scores)


class PaddingOfFirstRow(Padded):
    """The mask of the first row is used for all."""

    def mask(self, scores: Tensor) -> Tensor:
        keep = self.padding[:1].expand_as(self.padding) if self.wrong else self.padding
        return scores.masked_fill(~keep[:, None, None, :], -1e9)


class PaddingAsBoolForFused(Padded):
    """torch's fused kernel keeps where a mask is True."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keep = self.padding[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~keep if self.wrong else keep)


class PaddingForTorchsLayer(nn.Module):
    """torch's layer ignores where key_padding_mask is True: facebookresearch/detr#96."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.wrong, self.layer = wrong, nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        bar = None if mask is None else mask.bool() if self.wrong else ~mask.bool()
        return self.layer(x, x, x, key_padding_mask=bar)[0]


class PositionsOfPadding(Padded):
    """huggingface/trl#469: positions are counted from the padding on the left."""

    def __init__(self, wrong: bool) -> None:
        super().__init__(wrong)
        self.place = nn.Embedding(N + 1, E)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        keep = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        place = torch.arange(x.shape[1])[None] if self.wrong else (keep.long().cumsum(-1) - 1).clamp(min=0)
        return super().forward(x + self.place(place), mask)


class MeanOfPadding(Padded):
    """A mean over all tokens, padding among them, is taken off first."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        keep = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        mean = (
            x.mean(1, keepdim=True) if self.wrong else (x * keep[..., None]).sum(1, True) / keep.sum(1)[:, None, None]
        )
        return super().forward(x - mean, mask)


class NoKeyLeft(Padded):
    """pytorch/pytorch#41508: causal and padding on the left leave a query without keys."""

    def mask(self, scores: Tensor) -> Tensor:
        bar = ~self.padding[:, None, None, :] | future(scores.shape[-1])
        bar = bar if self.wrong else bar & ~torch.eye(scores.shape[-1], dtype=torch.bool)
        return scores.masked_fill(bar, -math.inf)


# -- batch -------------------------------------------------------------------------------------------------------------


class BatchNotFirst(nn.Module):
    """aipixel/AEMatter#3: torch's layer has the sequence first, and is given the batch first."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(E, H, batch_first=not wrong)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


class BatchInSequence(Right):
    """All rows are one sequence."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        flat = x.reshape(1, b * n, E) if self.wrong else x
        return super().forward(flat).view(b, n, E)


class BatchByView(Right):
    """rish-16/tokenlearner-pytorch#1: a view where a transpose belongs, between layers that have the sequence first."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        x = x.reshape(n, b, E) if self.wrong else x.transpose(0, 1)
        q, k, v = (t(x).view(n, b * H, D).transpose(0, 1) for t in (self.q, self.k, self.v))
        out = ((q @ k.mT / math.sqrt(D)).softmax(-1) @ v).transpose(0, 1).reshape(n, b, E)
        return self.o(out.transpose(0, 1))


class BatchMean(Right):
    """A mean over the batch where one over the features was meant."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0 if self.wrong else -1, keepdim=True))


class KeysOfTheNextRow(Right):
    def forward(self, x: Tensor) -> Tensor:
        other = x.roll(1, 0) if self.wrong else x
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), self.k(other), self.v(x))))))


# -- scale -------------------------------------------------------------------------------------------------------------


class NoScale(Right):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT if self.wrong else q @ k.mT / math.sqrt(D)
        return scores.softmax(-1) @ v


class ScaleOfEmbedding(Right):
    """lucidrains/vit-pytorch#65."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * (E if self.wrong else D) ** -0.5).softmax(-1) @ v


class ScaledTwice(Right):
    """The queries are scaled, and the fused kernel scales again."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * D**-0.5, k, v, scale=None if self.wrong else 1.0)


class ScaleUpsideDown(Right):
    """esceptico/perceiver-io#9: divided by what should be multiplied."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = D**-0.5
        return (q @ k.mT / scale if self.wrong else q @ k.mT * scale).softmax(-1) @ v


# -- grouped heads and positions ---------------------------------------------------------------------------------------


class Tiled(Right):
    """onnx/onnx#7274: tiled where torch repeats each."""

    kv_heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat(1, 2, 1, 1) if self.wrong else t.repeat_interleave(2, 1) for t in (k, v))
        return super().attend(q, k, v)


class ExpandedInFront(Right):
    kv_heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, n, _ = k.shape
        shape = (b, 2, 2, n, D)
        k, v = ((t[:, None] if self.wrong else t[:, :, None]).expand(shape).reshape(b, H, n, D) for t in (k, v))
        return super().attend(q, k, v)


class ValuesTiled(Right):
    kv_heads = 2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.repeat(1, 2, 1, 1) if self.wrong else v.repeat_interleave(2, 1)
        return super().attend(q, k.repeat_interleave(2, 1), v)


class RotaryMixed(Right):
    """raiyanyahya/how-to-train-your-gpt#6: halves of one layout, pairs of another."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(halves(q), pairs(k) if self.wrong else halves(k), v)


class RotaryOfQueriesAlone(Right):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(pairs(q), k if self.wrong else pairs(k), v)


class RotaryBackwards(Right):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(halves(q), halves(k.flip(-2)).flip(-2) if self.wrong else halves(k), v)


class RotaryByHead(Right):
    """The heads stand where the rotation looks for positions."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.wrong:
            return super().attend(
                halves(q.transpose(1, 2)).transpose(1, 2), halves(k.transpose(1, 2)).transpose(1, 2), v
            )
        return super().attend(halves(q), halves(k), v)


# -- parameters, dropout, modes ----------------------------------------------------------------------------------------


class QueryServesTwice(Right):
    def forward(self, x: Tensor) -> Tensor:
        k = self.q(x) if self.wrong else self.k(x)
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), k, self.v(x))))))


class KeyServesTwice(Right):
    def forward(self, x: Tensor) -> Tensor:
        v = self.k(x) if self.wrong else self.v(x)
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), self.k(x), v)))))


class OutputForgotten(Right):
    def forward(self, x: Tensor) -> Tensor:
        out = self.join(self.attend(*map(self.split, (self.q(x), self.k(x), self.v(x)))))
        return out if self.wrong else self.o(out)


class KeysCutOff(Right):
    def forward(self, x: Tensor) -> Tensor:
        k = self.k(x).detach() if self.wrong else self.k(x)
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), k, self.v(x))))))


class DropoutAlways(Right):
    """karpathy/nanoGPT#240, pytorch/pytorch#124464."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = 0.3 if self.wrong or self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p)


class DropoutWithoutFlag(Right):
    def weigh(self, scores: Tensor) -> Tensor:
        return F.dropout(scores.softmax(-1), 0.2, training=True if self.wrong else self.training)


class MaskInTrainingAlone(Right):
    def mask(self, scores: Tensor) -> Tensor:
        barred = scores.masked_fill(future(scores.shape[-1]), -1e9)
        return scores if self.wrong and not self.training else barred


class WritesIntoItsInput(Right):
    def forward(self, x: Tensor) -> Tensor:
        place = torch.ones(E).cumsum(0) / E
        x = x.add_(place) if self.wrong else x + place
        return super().forward(x)


class KeepsKeysBetweenCalls(Right):
    """A cache that nobody empties."""

    past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(t(x)) for t in (self.q, self.k, self.v))
        if self.wrong and self.past is not None:
            k = k + self.past
        self.past = k.detach()
        return self.o(self.join(self.attend(q, k, v)))


class HalfOverflows(Right):
    """Scaled after the product, in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 40)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * 40) @ (k * 40).mT / 1600 if self.wrong else q @ k.mT
        return (scores / math.sqrt(D)).softmax(-1) @ v


# -- caches ------------------------------------------------------------------------------------------------------------


class Cached(Right):
    """Returns its keys and values, and goes on from them."""

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (self.split(t(x)) for t in (self.q, self.k, self.v))
        start = 0 if past is None else past[0].shape[2]
        q, k = self.turn(q, start), self.turn(k, start)
        if past is not None:
            k, v = self.after(past[0], k), self.after(past[1], v)
        return self.o(self.join(self.attend(q, k, v))), (k, v)

    def turn(self, x: Tensor, start: int) -> Tensor:
        return halves(x, start)

    def after(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.cat((past, new), 2)

    def mask(self, scores: Tensor) -> Tensor:
        n, m = scores.shape[-2:]
        return scores.masked_fill(future(n, m, 1 + m - n), -math.inf)


class CacheTopLeft(Cached):
    """pytorch/executorch#21749: is_causal begins top left."""

    def mask(self, scores: Tensor) -> Tensor:
        n, m = scores.shape[-2:]
        return scores.masked_fill(future(n, m, 1 if self.wrong and n > 1 else 1 + m - n), -math.inf)


class CachePositionsFromZero(Cached):
    def turn(self, x: Tensor, start: int) -> Tensor:
        return halves(x, 0 if self.wrong else start)


class CacheTurnedRound(Cached):
    def after(self, past: Tensor, new: Tensor) -> Tensor:
        return torch.cat((new, past) if self.wrong else (past, new), 2)


class CacheOpenChunk(Cached):
    """mlx-node/mlx-node#24: a chunk behind a cache is not masked at all."""

    def mask(self, scores: Tensor) -> Tensor:
        n, m = scores.shape[-2:]
        return scores if self.wrong and m > n else super().mask(scores)


# -- against a reference -----------------------------------------------------------------------------------------------


class KeyAndValueSwapped(Right):
    def forward(self, x: Tensor) -> Tensor:
        k, v = (self.v(x), self.k(x)) if self.wrong else (self.k(x), self.v(x))
        return self.o(self.join(self.attend(*map(self.split, (self.q(x), k, v)))))


class FeaturesBeforeHeads(Right):
    """view(…, head_dim, heads) where weights are (heads head_dim)."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (D, H)).permute(0, 3, 1, 2) if self.wrong else super().split(x)


@dataclass(frozen=True)
class Case:
    """A mistake with the intent that tells it."""

    make: Callable[[bool], nn.Module]
    check: str
    """The check that is to find it."""
    intent: Intent = field(default_factory=Intent)
    inputs: Callable[[], tuple[dict[str, Any], torch.dtype]] = lambda: ({"x": torch.randn(B, N, E)}, torch.float32)
    alone: bool = True
    """Whether it is found with nothing declared."""

    @property
    def name(self) -> str:
        """The name of the class."""
        return getattr(self.make, "__name__", "")


def _no_key() -> tuple[dict[str, Any], torch.dtype]:
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, :2] = False
    return {"x": torch.randn(B, N, E), "mask": mask}, torch.float32


def _half() -> tuple[dict[str, Any], torch.dtype]:
    return {"x": torch.randn(B, N, E).half()}, torch.float16


CAUSAL = Intent(causal=True)
WINDOW = Intent(causal=True, window=4)
PADDING = Intent(padding="mask", padding_true="keep")
CACHE = Intent(cache="past")
SCALE = Intent(scale="sqrt_head_dim")
ROWS = Intent(batch_axis=0)


def _trusted(case: type[Right]) -> Intent:
    torch.manual_seed(7)
    return Intent(reference=case(False))


CASES = [
    *(
        Case(make, "heads")
        for make in (
            SplitByView,
            KeysSplitByView,
            ValuesSplitByView,
            SplitIntoBatch,
            MergedByReshape,
            MergedFused,
            MergedFromHeadsFirst,
            MergedTwice,
            PackedSplitByView,
        )
    ),
    Case(UnfoldedInTheOtherOrder, "batch"),
    *(Case(make, "softmax") for make in (SoftmaxOverQueries, SoftmaxOverHeads, SoftmaxOverBatch, SoftmaxWithoutDim)),
    *(Case(make, "softmax") for make in (WeightsCutOff, SoftmaxOfSoftmax, MaskAfterSoftmax)),
    Case(MaskTimesWeights, "softmax"),
    Case(OverHeads, "heads"),
    Case(OverHeadsFused, "heads"),
    *(Case(make, "masking") for make in (MaskTimesScores, TinyBar, TinyNegativeBar, MaskOfOnesAdded)),
    *(
        Case(make, "causal", CAUSAL, alone=False)
        for make in (
            CausalOneLate,
            CausalWithoutItself,
            CausalTurnedRound,
            CausalForgotten,
            CausalBooleanForFused,
            CausalAlongHeads,
            NormOverPositions,
            ConvolutionSeesAhead,
        )
    ),
    *(Case(make, "window", WINDOW, alone=False) for make in (WindowOneWide, WindowOneNarrow, WindowWithoutEnd)),
    *(
        Case(make, "padding", PADDING, alone=False)
        for make in (
            PaddingTurnedRound,
            PaddingOnQueries,
            PaddingInTheOtherOrder,
            PaddingForgotten,
            PaddingOfFirstRow,
            PaddingAsBoolForFused,
            PaddingForTorchsLayer,
            MeanOfPadding,
        )
    ),
    Case(
        PositionsOfPadding,
        "padding",
        Intent(padding="mask", padding_true="keep", padding_side="left"),
        alone=False,
    ),
    Case(NoKeyLeft, "finite", inputs=_no_key),
    Case(BatchNotFirst, "batch", ROWS, alone=False),
    *(Case(make, "batch") for make in (BatchInSequence, BatchByView, BatchMean, KeysOfTheNextRow)),
    *(Case(make, "scale", SCALE, alone=False) for make in (NoScale, ScaleOfEmbedding, ScaledTwice, ScaleUpsideDown)),
    *(Case(make, "grouped") for make in (Tiled, ExpandedInFront, ValuesTiled)),
    *(Case(make, "rotary") for make in (RotaryMixed, RotaryOfQueriesAlone, RotaryBackwards, RotaryByHead)),
    *(Case(make, "parameters") for make in (QueryServesTwice, KeyServesTwice, OutputForgotten, KeysCutOff)),
    Case(DropoutAlways, "repeat"),
    Case(DropoutWithoutFlag, "repeat"),
    Case(MaskInTrainingAlone, "training"),
    Case(WritesIntoItsInput, "inputs"),
    Case(KeepsKeysBetweenCalls, "repeat"),
    Case(HalfOverflows, "finite", inputs=_half),
    *(
        Case(make, "cache", CACHE, alone=False)
        for make in (CacheTopLeft, CachePositionsFromZero, CacheTurnedRound, CacheOpenChunk)
    ),
    *(Case(make, "reference", _trusted(make), alone=False) for make in (KeyAndValueSwapped, FeaturesBeforeHeads)),
]
