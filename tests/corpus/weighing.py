"""Softmax by hand, masked or not, with caps, biases, sinks and mixtures."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.reports.trace import QKNorm

from .base import Base
from .entry import ENTRIES, ONE_HEAD_AT_A_TIME, D, H, add, attends, linears


@attends(twin="Base")
class ByHand(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(D))
        return e / e.sum(dim=-1, keepdim=True) @ v


@attends(twin="Base")
class ByHandShifted(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        e = (scores - scores.max(dim=-1, keepdim=True).values).exp()
        return (e * (1 / (e.sum(-1).unsqueeze(-1) + 1e-9))) @ v


@attends(kind=("self", "causal"), softmax=False, twin="MaskedFill")
class ByHandMasked(Base):
    """Exponentials of what is not allowed are set to zero, in place."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        e = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        e = e.masked_fill(torch.ones(e.shape[-2:]).triu(1).bool(), 0.0)
        return e.div_(e.sum(-1, keepdim=True)) @ v


NEVER_FORMED = ("The weights are never formed",)


@attends(
    kind=("self", "causal"),
    masked=True,
    absent=("weights",),
    says=NEVER_FORMED,
    formulas={"context": "exp(masked_scores) · v_heads / Σ exp(masked_scores)"},
    twin="MaskedFill",
)
class LateCausal(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        exponentials = (q @ k.mT / math.sqrt(D)).masked_fill(future, -math.inf).exp()
        return (exponentials @ v) / (exponentials.sum(-1, keepdim=True) + 1e-9)


@attends(kind=("self", "causal"), masked=True)
class MaskedFill(Base):
    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), float("-inf"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mask(q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


@attends(kind=("self", "causal"), masked=True, twin="MaskedFill")
class BroadcastCausal(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1, keepdim=True).squeeze(-1) / math.sqrt(D)
        future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        return (scores.masked_fill(future, -math.inf).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


@attends(scale=0.25, cap=1.5, bias=True, masked=True)
class SoftCap(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * 0.25
        scores = torch.tanh(scores / 1.5) * 1.5
        return (scores + torch.full(scores.shape[-2:], -9.0).triu(1)).softmax(-1) @ v


@attends(over="", softmax=False, says=("Attention sinks are joined to the scores",))
class Sinks(Base):
    """A learned score for each head that takes a part of the weight and has no value."""

    def __init__(self) -> None:
        super().__init__()
        self.sink = nn.Parameter(torch.randn(H))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        scores = torch.cat([scores, self.sink.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
        return scores.softmax(-1)[..., :-1] @ v


@attends(plain=False, training=True, says=("before dropout",))
class Dropped(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1), 0.3, self.training) @ v


@attends(qk_norm=QKNorm("rms", "head"))
class NormedHeads(Base):
    """RMS norms on queries and keys, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(D), nn.LayerNorm(D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(self.q_norm(q), self.k_norm(k), v)


@attends(scale=None, qk_norm=QKNorm("l2", "head"))
class UnitHeads(Base):
    """Cosine attention with a temperature for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(H, 1, 1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature).softmax(-1) @ v


@attends(
    masked=True,
    plain=False,
    mixed=True,
    says=("before the softmax and their weights after it (talking heads)",),
    formulas={"context": "mix(weights) · v_heads"},
)
class Talking(Base):
    """Talking heads: a matrix mixes the scores of the heads, and another their weights."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Linear(H, H, bias=False) for _ in range(2))

    def mix(self, matrix: nn.Linear, x: Tensor) -> Tensor:
        return matrix(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def mask(self, scores: Tensor) -> Tensor:
        future = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(future, -math.inf) if self.causal else scores

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.mix(self.before, q @ k.mT / math.sqrt(D))
        return self.mix(self.after, self.mask(scores).softmax(-1)) @ v

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.before.weight, self.after.weight


@attends(
    kind=("self", "causal"),
    masked=True,
    plain=False,
    mixed=True,
    says=("before the softmax and their weights after it (talking heads)",),
    formulas={"context": "mix(weights) · v_heads"},
)
class TalkingCausal(Talking):
    causal = True


@attends(
    masked=True,
    mixed=True,
    says=("scores before the softmax (talking heads)",),
    formulas={"context": "weights · v_heads"},
)
class TalkingBefore(Talking):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mix(self.before, q @ k.mT / math.sqrt(D)).softmax(-1) @ v

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.before.weight, torch.eye(H)


@attends(
    plain=False,
    mixed=True,
    says=("weights after the softmax (talking heads)",),
    formulas={"context": "mix(weights) · v_heads"},
)
class TalkingAfter(Talking):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = F.dropout((q @ k.mT / math.sqrt(D)).softmax(-1), 0.5, self.training)
        return self.mix(self.after, weights) @ v

    def matrices(self) -> tuple[Tensor, Tensor]:
        return torch.eye(H), self.after.weight


add(
    replace(
        ENTRIES["TalkingAfter"],
        name="TalkingAfterDropout",
        training=True,
        attentions=(
            replace(
                ENTRIES["TalkingAfter"].attentions[0],
                says=("weights after the softmax (talking heads)", "before dropout"),
                formulas={},
            ),
        ),
    )
)


@attends(
    **ONE_HEAD_AT_A_TIME | {"says": ("The softmax also covers scores of other keys",)},
    heads=1,
    head_dim=14,
    scale=1.0,
    plain=False,
    softmax=False,
    over="",
    absent=("concat", "output"),
    given=lambda batch, length: ((torch.randn(batch, length, 14),), {}),
    rows=linears(**{part: f"{part} 0: head_dim embed" for part in "qkv"}),
    output="",
)
class TwoKindsOfKeys(nn.Module):
    """Keys of everything and keys that are one's own, under one softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.own = (nn.Linear(14, 14) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        beside = q @ self.own(x[:, :3]).mT
        weights = torch.cat([q @ k.mT, beside], -1).softmax(-1)
        return weights[..., : x.shape[1]] @ v + weights[..., x.shape[1] :] @ v[:, :3]
