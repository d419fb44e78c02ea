"""A loop over heads, over pieces of the queries, or over modules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import Base
from .entry import ONE_HEAD_AT_A_TIME, OUTPUT, D, E, H, attends

OF_EACH_HEAD = OUTPUT | {
    name: axes
    for part in "qkv"
    for h in range(H)
    for name, axes in (
        (f"{part}.{h}.weight", f"{part} {h}: head_dim embed"),
        (f"{part}.{h}.bias", f"{part} {h}: head_dim"),
    )
}


@attends(rows=OF_EACH_HEAD, projected="batch token head_dim", **ONE_HEAD_AT_A_TIME)
class Loop(nn.Module):
    """A small matrix for each head, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(E, D) for _ in range(H)) for _ in range(3))
        self.o = nn.Linear(H * D, E)

    def heads(self, x: Tensor) -> list[Tensor]:
        contexts = []
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            contexts.append((q(x) @ k(x).transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v(x))
        return contexts

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat(self.heads(x), dim=-1))


@attends(rows=OF_EACH_HEAD, projected="batch token head_dim", **ONE_HEAD_AT_A_TIME, twin="Loop")
class LoopStacked(Loop):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.stack(self.heads(x), dim=2).flatten(2))


@attends(
    heads=1,
    absent=("concat", "output"),
    split="batch token head_dim",
    pairs="batch query key",
    rows={f"{part}.weight": f"{part} 0: head_dim embed" for part in "qkv"},
    output="",
)
class OneHead(nn.Module):
    """A head as a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ self.v(x)


@attends(
    rows=OUTPUT | {f"heads.{h}.{part}.weight": f"{part} {h}: head_dim embed" for part in "qkv" for h in range(H)},
    projected="batch token head_dim",
    **ONE_HEAD_AT_A_TIME,
)
class LoopModules(nn.Module):
    """A list of modules with a head each, as tutorials have it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(OneHead() for _ in range(H))
        self.o = nn.Linear(H * D, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat([head(x) for head in self.heads], dim=-1))


@attends(
    rows=OUTPUT | {f"heads.{h}.{part}.weight": f"{part} {h}: head_dim embed" for part in "qkv" for h in range(H)},
    projected="batch token head_dim",
    **ONE_HEAD_AT_A_TIME,
)
class Unrolled(LoopModules):
    """The heads on lines of their own, as a first try has them."""

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = self.heads
        first = (one.q(x) @ one.k(x).transpose(1, 2) * D**-0.5).softmax(-1) @ one.v(x)
        second = (two.q(x) @ two.k(x).transpose(1, 2) * D**-0.5).softmax(-1) @ two.v(x)
        third = (three.q(x) @ three.k(x).transpose(1, 2) * D**-0.5).softmax(-1) @ three.v(x)
        return self.o(torch.cat([first, second, third], dim=-1))


@attends(**ONE_HEAD_AT_A_TIME, twin="Base")
class LoopSlices(Base):
    """One projection, and a loop over its slices."""

    def forward(self, x: Tensor) -> Tensor:
        contexts = []
        for h in range(H):
            q, k, v = (t[..., h * D : (h + 1) * D] for t in (self.q(x), self.k(x), self.v(x)))
            contexts.append((q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v)
        return self.o(torch.cat(contexts, dim=-1))


@attends(twin="Base", says=("computed in 3 pieces along query",))
class LoopChunks(Base):
    """A loop over pieces of the queries, which is no loop over heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([super(LoopChunks, self).attend(part, k, v) for part in q.split(4, dim=-2)], dim=-2)


@attends(**ONE_HEAD_AT_A_TIME, twin="Base")
class LoopFeatures(Base):
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


@attends(**ONE_HEAD_AT_A_TIME, twin="Base")
class NarrowLoop(LoopFeatures):
    def head(self, h: int, *given: Tensor) -> Tensor:
        q, k, v = (t.narrow(-1, h * self.width, self.width) for t in given)
        return (q @ k.mT / math.sqrt(self.width)).softmax(-1) @ v


@attends(**ONE_HEAD_AT_A_TIME, head_dim=1, projected="batch token heads")
class NarrowHeadsOfOne(NarrowLoop):
    width = 1


@attends(kind=("self", "causal"), masked=True, twin="MaskedFill")
class OneQueryAtATime(Base):
    """A loop over the queries, each with the keys up to its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        contexts = []
        for t in range(q.shape[2]):
            weights = (q[:, :, t : t + 1] @ k[:, :, : t + 1].mT / math.sqrt(D)).softmax(-1)
            contexts.append((weights @ v[:, :, : t + 1]).squeeze(2))
        return torch.stack(contexts, 2)
