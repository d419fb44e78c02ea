"""Modules about which more is easily claimed than is true: softmaxes that are no attention, and unusual ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, HEAD_DIM = 24, 4, 6


class Pooled(nn.Module):
    """NetVLAD: features are assigned to clusters, and averaged by cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.assign = nn.Linear(WIDTH, 5)
        self.centres = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assigned = self.assign(x).softmax(-1)
        return assigned.transpose(1, 2) @ x - assigned.sum(1)[..., None] * self.centres


class GraphPooled(nn.Module):
    """DiffPool: nodes of a graph are assigned to clusters by what their neighbours say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.assign = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.ones(x.shape[0], x.shape[1], x.shape[1]).tril() + x.mean()
        assigned = (near @ self.assign(x)).softmax(-1)
        return assigned.transpose(1, 2) @ (near @ self.embed(x))


class Dispatch(nn.Module):
    """Soft mixture of experts: learned slots average the tokens as they are, and tokens average what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(WIDTH, 5, 3))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("btd,des->btes", x, self.slots)
        given = torch.einsum("btes,btd->besd", logits.softmax(1), x)
        made = torch.stack([expert(given[:, at]) for at, expert in enumerate(self.experts)], 1).flatten(1, 2)
        return torch.einsum("btn,bnd->btd", logits.flatten(2).softmax(-1), made)


class Router(nn.Module):
    """A mixture of experts: a token's weights are those of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 5), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.stack([expert(x) for expert in self.experts], -2)
        return torch.einsum("bte,bted->btd", self.gate(x).softmax(-1), made)


class Codebook(nn.Module):
    """Features become the average of codes, the nearest the most."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(7, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.codes.T).softmax(-1) @ self.codes


class Retrieval(nn.Module):
    """The nearest of a bank are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("bank", torch.randn(50, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        nearest, index = (self.query(x) @ self.bank.T).topk(4, -1)
        return (nearest.softmax(-1)[..., None] * self.bank[index]).sum(-2)


class Capsules(nn.Module):
    """Dynamic routing by agreement: a capsule shares itself out among those above it."""

    def __init__(self) -> None:
        super().__init__()
        self.above = nn.Parameter(torch.randn(1, 7, 5, 8, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        votes = (self.above @ x[:, :, None, :, None]).squeeze(-1)
        agreed = torch.zeros(votes.shape[:3])
        for _ in range(3):
            made = functional.normalize((agreed.softmax(2)[..., None] * votes).sum(1), dim=-1)
            agreed = agreed + (votes * made[:, None]).sum(-1)
        return made


class Contrastive(nn.Module):
    """A contrastive loss: a softmax of products of features, and no values."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, 0], x[:, 1]
        weights = (functional.normalize(left, dim=-1) @ functional.normalize(right, dim=-1).T / 0.07).softmax(-1)
        return -weights.diagonal().log().mean()


NO_ATTENTION = (Pooled, GraphPooled, Dispatch, Router, Codebook, Retrieval, Capsules, Contrastive)


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


class NormedHeads(Heads):
    """Heads are normed, with a gain: what belongs to the norm is no scale."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        q, k = (functional.normalize(heads, dim=-1) * HEAD_DIM**0.5 * self.gain for heads in (q, k))
        return self.joined(self.scores(q, k).softmax(-1), v)


class NormedWeights(Heads):
    """DeepViT: the weights are mixed, and normed, by head."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.norm = nn.Parameter(torch.randn(HEADS, HEADS)), nn.LayerNorm(HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        weights = torch.einsum("bhij,hg->bijg", self.scores(q, k).softmax(-1), self.mixed)
        return self.joined(self.norm(weights).permute(0, 3, 1, 2), v)


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


class ImageWindows(Heads):
    """Windows of two by two in an image, cut before they are normed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        cut = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 3, 5, 1)
        cut = self.norm(cut).flatten(3, 4).flatten(0, 2)
        q, k, v = map(self.split, (self.q(cut), self.k(cut), self.v(cut)))
        return self.joined(self.scores(q, k).softmax(-1), v)


class Flat(Heads):
    """Tokens are flattened before they are projected."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        q, k, v = (
            made.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)
            for made in (self.q(flat), self.k(flat), self.v(flat))
        )
        return self.joined(self.scores(q, k).softmax(-1), v)


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


class OneNumber(Heads):
    """What is added to the scores is one number, laid out as a mask is."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x), self.v(x)))
        return self.joined((self.scores(q, k) + torch.zeros(1, 1)).softmax(-1), v)


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


class Means(Heads):
    """Keys and values are sums of two positions, divided by two: means."""

    def forward(self, x: Tensor) -> Tensor:
        k, v = (self.split(made).unflatten(2, (-1, 2)).sum(3) / 2 for made in (self.k(x), self.v(x)))
        return self.joined((self.split(self.q(x)) * HEAD_DIM**-0.5 @ k.mT).softmax(-1), v)


class SharedKeys(Heads):
    """Two query heads for each key head, by an einsum that has both of them as axes."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x)).unflatten(1, (HEADS // 2, 2))
        k, v = (self.split(made)[:, : HEADS // 2] for made in (self.k(x), self.v(x)))
        weights = (torch.einsum("bgind,bgmd->bginm", q, k) * HEAD_DIM**-0.5).softmax(-1)
        made = torch.einsum("bginm,bgmd->bgind", weights, v).flatten(1, 2)
        return self.o(made.transpose(1, 2).flatten(2))
