"""Attention as few people write it: each class attends with heads in a way of its own, and means the same."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .styles import Base, D, E, H


def by_hand(module: Base, x: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Weights `batch heads query key` and context `batch heads query head_dim`, in float64."""
    width = module.q.out_features // H
    q, k, v = (
        (x.double() @ p.weight.double().T + p.bias.double()).unflatten(-1, (H, width)).transpose(1, 2)
        for p in (module.q, module.k, module.v)
    )
    scores = q @ k.mT / math.sqrt(width)
    before, after = (m.double() for m in module.matrices()) if isinstance(module, Talking) else (None, None)
    if before is not None:
        scores = torch.einsum("gh,bhqk->bgqk", before, scores)
    if causal:
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
    weights = scores.softmax(-1)
    mixed = weights if after is None else torch.einsum("gh,bhqk->bgqk", after, weights)
    return weights, mixed @ v


class Loop(Base):
    """A loop over heads, each of them a slice of what one matrix gives."""

    width = D

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, H * self.width) for _ in range(3))
        self.o = nn.Linear(H * self.width, E)

    def head(self, h: int, *given: Tensor) -> Tensor:
        q, k, v = (t[..., h * self.width : (h + 1) * self.width] for t in given)
        return (q @ k.mT / math.sqrt(self.width)).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.loop(self.q(x), self.k(x), self.v(x)))

    def loop(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([self.head(h, q, k, v) for h in range(H)], -1)


class NarrowLoop(Loop):
    def head(self, h: int, *given: Tensor) -> Tensor:
        q, k, v = (t.narrow(-1, h * self.width, self.width) for t in given)
        return (q @ k.mT / math.sqrt(self.width)).softmax(-1) @ v


class NarrowHeadsOfOne(NarrowLoop):
    width = 1


class BufferOfFeatures(Loop):
    """Each turn writes its slice of the features."""

    def loop(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for h in range(H):
            out[:, :, h * self.width : (h + 1) * self.width] = self.head(h, q, k, v)
        return out


class BufferLikeHeads(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        for h in range(H):
            out[:, h] = (q[:, h] @ k[:, h].mT / math.sqrt(D)).softmax(-1) @ v[:, h]
        return out


class Broadcast(Base):
    """Products as multiplications with broadcasting, and sums."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = ((q[:, :, :, None] * k[:, :, None]).sum(-1) / math.sqrt(D)).softmax(-1)
        return (weights[..., None] * v[:, :, None]).sum(-2)


class BroadcastKeyFirst(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = ((k[:, :, :, None] * q[:, :, None]).sum(-1) / math.sqrt(D)).softmax(-2)
        return (v[:, :, :, None] * weights[..., None]).sum(-3)


class BroadcastBeforeHeads(Base):
    """The heads stay behind the positions."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, D))

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(-2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = ((q[:, :, None] * k[:, None]).sum(-1) / math.sqrt(D)).softmax(2)
        return (weights[..., None] * v[:, None]).sum(2)


class BroadcastCausal(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1, keepdim=True).squeeze(-1) / math.sqrt(D)
        future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        return (scores.masked_fill(future, -math.inf).softmax(-1).unsqueeze(-1) * v.unsqueeze(2)).sum(3)


class BroadcastWindows(Base):
    """Each query with the five keys around it, which nothing has multiplied out before."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (nn.functional.pad(t, (0, 0, 2, 2)).unfold(2, 5, 1) for t in (k, v))
        weights = ((q.unsqueeze(-1) * k).sum(-2) / math.sqrt(D)).softmax(-1)
        return (weights.unsqueeze(-2) * v).sum(-1)


class Late(Base):
    """The sum of the exponentials divides what they give with the values: weights are never formed."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        exponentials = (q @ k.mT / math.sqrt(D)).exp()
        return (exponentials @ v) / exponentials.sum(-1, keepdim=True)


class LateCausal(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = torch.ones(q.shape[2], q.shape[2]).triu(1).bool()
        exponentials = (q @ k.mT / math.sqrt(D)).masked_fill(future, -math.inf).exp()
        return (exponentials @ v) / (exponentials.sum(-1, keepdim=True) + 1e-9)


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


class TalkingCausal(Talking):
    causal = True


class TalkingEinsum(Talking):
    def mix(self, matrix: nn.Linear, x: Tensor) -> Tensor:
        return torch.einsum("bhqk,gh->bgqk", x, matrix.weight)


class TalkingBefore(Talking):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.mix(self.before, q @ k.mT / math.sqrt(D)).softmax(-1) @ v

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.before.weight, torch.eye(H)


class TalkingAfter(Talking):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = nn.functional.dropout((q @ k.mT / math.sqrt(D)).softmax(-1), 0.5, self.training)
        return self.mix(self.after, weights) @ v

    def matrices(self) -> tuple[Tensor, Tensor]:
        return torch.eye(H), self.after.weight


class OneQueryAtATime(Base):
    """A loop over the queries, each with the keys up to its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = []
        for t in range(q.shape[2]):
            weights = (q[:, :, t : t + 1] @ k[:, :, : t + 1].mT / math.sqrt(D)).softmax(-1)
            found.append((weights @ v[:, :, : t + 1]).squeeze(2))
        return torch.stack(found, 2)
