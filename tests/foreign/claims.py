"""Modules about which more is easily claimed than is true: attentions that are unusual in one point each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, HEAD_DIM = 24, 4, 6


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


class OverQueries(Heads):
    """Queries compete for each key."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        return self.joined(self.scores(q, k).softmax(-2), v)


class Slots(Heads):
    """Slot attention, one turn of it: slots compete for the inputs, and keys are the left factor."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.slots.expand(len(x), -1, -1))
        shared = (self.k(x) @ q.transpose(1, 2) * WIDTH**-0.5).softmax(-1) + 1e-8
        return (shared / shared.sum(1, keepdim=True)).transpose(1, 2) @ self.v(x)


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


class FewerKeys(Heads):
    """Linformer: keys and values are projected to fewer of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fewer = nn.Parameter(torch.randn(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        k, v = (torch.einsum("btd,tk->bkd", project(x), self.fewer) for project in (self.k, self.v))
        q, k, v = map(self.split, (self.q(x), k, v))
        return self.joined(self.scores(q, k).softmax(-1), v)


class OneKeyHead(nn.Module):
    """One key head for all, through an einsum that folds the heads into the queries, with a mask on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, HEAD_DIM), nn.Linear(WIDTH, HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), -1, HEADS, HEAD_DIM).transpose(1, 2)
        scores = torch.einsum("bhid,bjd->bhij", q, self.k(x)) * HEAD_DIM**-0.5
        at = torch.arange(x.shape[1])
        weights = scores.masked_fill(at[:, None] < at, -torch.inf).softmax(-1)
        return self.o(torch.einsum("bhij,bjd->bhid", weights, self.v(x)).transpose(1, 2).flatten(2))


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


class Mixing(Heads):
    """A view to heads without a transpose."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (made.view(len(x), HEADS, -1, HEAD_DIM) for made in (self.q(x), self.k(x), self.v(x)))
        return self.o((self.scores(q, k).softmax(-1) @ v).view(x.shape))


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


class PickedKeys(nn.Module):
    """Two key heads, each for the query heads that an index, or putting them twice side by side, gives it."""

    def __init__(self, picked: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.picked = picked
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 2 * HEAD_DIM), nn.Linear(WIDTH, 2 * HEAD_DIM)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(len(x), -1, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = (made.view(len(x), -1, 2, HEAD_DIM).transpose(1, 2) for made in (self.k(x), self.v(x)))
        k, v = (one[:, list(self.picked)] if self.picked else torch.cat([one, one], 1) for one in (k, v))
        weights = (q @ k.transpose(-1, -2) * HEAD_DIM**-0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class OverFeatures(Heads):
    """Features attend to features, over all positions, as in XCiT."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(made).mT for made in (self.q(x), self.k(x), self.v(x)))
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        return self.o(((q @ k.mT * 3).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2))


class ProjectedLength(Heads):
    """Fewer keys than positions, made by a product along the sequence after their projection, as in Linformer."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Parameter(torch.randn(7, 3) / 3)

    def forward(self, x: Tensor) -> Tensor:
        k, v = (torch.einsum("bnd,nk->bkd", made, self.along) for made in (self.k(x), self.v(x)))
        return self.joined(self.scores(self.split(self.q(x)), self.split(k)).softmax(-1), self.split(v))


class SharedKeys(Heads):
    """Two query heads for each key head, by an einsum that has both of them as axes."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x)).unflatten(1, (HEADS // 2, 2))
        k, v = (self.split(made)[:, : HEADS // 2] for made in (self.k(x), self.v(x)))
        weights = (torch.einsum("bgind,bgmd->bginm", q, k) * HEAD_DIM**-0.5).softmax(-1)
        made = torch.einsum("bginm,bgmd->bgind", weights, v).flatten(1, 2)
        return self.o(made.transpose(1, 2).flatten(2))


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


class BothWays(Heads):
    """Two sides attend to each other by one product, each with values of its own: the second of what the first gave."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, :3], x[:, 3:]
        scores = self.scores(self.split(self.q(left)), self.split(self.k(right)))
        left = self.joined(scores.softmax(-1), self.split(self.v(right)))
        return self.joined(scores.mT.softmax(-1), self.split(self.v(left)))
