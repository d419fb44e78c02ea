"""Modules that come near an attention, and are none: gates, pools, experts, recurrences, graphs, kernels, memories."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Base
from .entry import E, Entry, H, add, has_none, hidden

B, N, A, V, K = 7, 11, 19, 17, 5


class Two(nn.Module):
    """Two projections to as many features."""

    def __init__(self, first: int = E, second: int = E, to: int = A) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(first, to), nn.Linear(second, to)


# -- pools, masks and places: there is no query ------------------------------------------------------------------------


@has_none
class Sampled(nn.Module):
    """Linear interpolation at places that are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(E, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (1 - (self.place(x).sigmoid() * (N - 1) - torch.arange(float(N))).abs()).relu() @ x


@has_none
class Sorted(Sampled):
    """A soft permutation: numbers are compared with themselves in order."""

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.place(x)
        return (-(numbers.sort(1).values - numbers.mT).abs()).softmax(-1) @ x


# -- experts and codes: what is weighed are parts of the module --------------------------------------------------------


# -- recurrences and scans ---------------------------------------------------------------------------------------------


@has_none
class StateSpace(Two):
    """Mamba 2 as one product: nothing is bent."""

    def __init__(self) -> None:
        super().__init__(to=K)
        self.v, self.step = nn.Linear(E, V), nn.Linear(E, 1)

    def forward(self, x: Tensor) -> Tensor:
        sums = -F.softplus(self.step(x)).cumsum(1)
        return (self.a(x) @ self.b(x).mT * (sums - sums.mT).exp().tril()) @ self.v(x)


@has_none
class Written(Two):
    """A memory that is addressed by content for writing, and never read."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.erase = nn.Parameter(torch.randn(K, A)), nn.Linear(E, A)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory.expand(len(x), K, A)
        for token in x[:, :3].unbind(1):
            near = F.normalize(self.a(token), dim=-1)[:, None] @ F.normalize(memory, dim=-1).mT
            where = near[:, 0].softmax(-1)[..., None]
            memory = memory * (1 - where * self.erase(token).sigmoid()[:, None]) + where * self.b(token)[:, None]
        return memory


# -- products of pairs: nothing is averaged by them, or a layer is made of them ----------------------------------------


@has_none
class Crosses(nn.Module):
    """A compressed interaction network of a recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(K, N, N) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("kij,bije->bke", self.w, torch.einsum("bie,bje->bije", x, x)).relu()
        return torch.einsum("bke,bie->bki", made, x)


@has_none
class KernelRegression(Two):
    def forward(self, x: Tensor) -> Tensor:
        kernel = (-torch.cdist(self.a(x), self.a(x)).square() / A).exp()
        return kernel @ torch.linalg.solve(kernel + torch.eye(N), self.b(x))


@has_none
class Hyper(nn.Module):
    """Two layers whose weights are made of a context."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(E, E * A), nn.Linear(E, A * V)

    def forward(self, x: Tensor) -> Tensor:
        context = x.mean(1)
        first, second = self.first(context).view(-1, E, A), self.second(context).view(-1, A, V)
        return (x @ first).relu() @ second


# -- one learned scorer, clusters and capsules ------------------------------------------------------------------------


@has_none
class PoolByProduct(nn.Module):
    """One learned scorer over one input: there is no query."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.score = nn.Linear(E, A), nn.Linear(E, A), nn.Linear(A, 1)

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.score(self.hidden(x)).softmax(1).mT, x)


@has_none
class PoolLessMean(PoolByProduct):
    """The mean of the positions is taken off them by a norm."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return (x - x.mean(1, keepdim=True)).relu()


@has_none
class PoolAtATime(PoolByProduct):
    """Time is added to every position and nothing is bent: it is the same number for all, and no weight hangs on it."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x[:, :1])


@has_none
class Experts(nn.Module):
    """A router that sees something else too: what it weighs are outputs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(E, A), nn.Linear(E, A), nn.Linear(A, H)
        self.experts = nn.Parameter(torch.randn(H, E, V))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate((self.a(x) + self.b(x[:, :1])).tanh()).softmax(-1)
        return torch.einsum("bnh,bnhv->bnv", weights, torch.einsum("bne,hev->bnhv", x, self.experts))


@has_none
class Codes(nn.Module):
    """Distances to codes that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(13, E))

    def forward(self, x: Tensor) -> Tensor:
        return (-(x[:, :, None] - self.codes).square().sum(-1)).softmax(-1) @ self.codes


@has_none
class Residuals(Codes):
    """VLAD: what is averaged are the differences themselves."""

    def forward(self, x: Tensor) -> Tensor:
        apart = x[:, :, None] - self.codes
        return ((-apart.square().sum(-1)).softmax(-1)[..., None] * apart).sum(1)


@has_none
class Clusters(nn.Module):
    """k-means: clusters average what was compared with them."""

    def forward(self, x: Tensor) -> Tensor:
        centres = x[:, :3]
        for _ in range(2):
            nearest = (-(x[:, :, None] - centres[:, None]).square().sum(-1)).softmax(-1)
            centres = nearest.mT @ x / nearest.sum(1)[..., None]
        return centres


class PoolAtABentTime(PoolAtATime):
    """Bent after it is added, what is given once is a query, and the pool an attention."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x).tanh()


# -- softmaxes that assign ---------------------------------------------------------------------------------------------


@has_none
class GraphPooled(nn.Module):
    """DiffPool: nodes of a graph are assigned to clusters by what their neighbours say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.assign = nn.Linear(E, E), nn.Linear(E, 5)

    def forward(self, x: Tensor) -> Tensor:
        near = torch.ones(x.shape[0], x.shape[1], x.shape[1]).tril() + x.mean()
        assigned = (near @ self.assign(x)).softmax(-1)
        return assigned.transpose(1, 2) @ (near @ self.embed(x))


@has_none
class Dispatch(nn.Module):
    """Soft mixture of experts: learned slots average the tokens as they are, and tokens average what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(E, 5, 3))
        self.experts = nn.ModuleList(nn.Linear(E, E) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("btd,des->btes", x, self.slots)
        given = torch.einsum("btes,btd->besd", logits.softmax(1), x)
        made = torch.stack([expert(given[:, at]) for at, expert in enumerate(self.experts)], 1).flatten(1, 2)
        return torch.einsum("btn,bnd->btd", logits.flatten(2).softmax(-1), made)


@has_none
class Router(nn.Module):
    """A mixture of experts: a token's weights are those of the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(E, 5), nn.ModuleList(nn.Linear(E, E) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.stack([expert(x) for expert in self.experts], -2)
        return torch.einsum("bte,bted->btd", self.gate(x).softmax(-1), made)


@has_none
class DynamicDispatch(Dispatch):
    """The same with slots that are made of the tokens: what one product says hands out, and hands back."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.own = nn.Linear(E, 15 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.made(x.mean(1)).unflatten(-1, (15, E))
        logits = torch.einsum("btd,bsd->bts", self.own(x), slots)
        given = torch.einsum("bts,btd->bsd", logits.softmax(1), x)
        made = torch.stack([expert(given[:, at * 3 : at * 3 + 3]) for at, expert in enumerate(self.experts)], 1)
        return torch.einsum("bts,bsd->btd", logits.softmax(-1), made.flatten(1, 2))


@has_none
class CapsulesByBatch(nn.Module):
    """Dynamic routing with the weights repeated for each batch item, and sums that keep their dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(K, N, A, E))

    def votes(self, x: Tensor) -> Tensor:
        return (self.weight[None] @ x[:, None, :, :, None]).squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        votes, logits = self.votes(x), torch.zeros(B, K, N)
        for _ in range(3):
            capsules = (logits.softmax(1)[..., None] * votes).sum(-2, keepdim=True).tanh()
            logits = logits + (capsules * votes).sum(-1)
        return capsules.squeeze(-2)


@has_none
class CapsulesOverInputs(nn.Module):
    """Routing whose shares of a capsule sum to one over the inputs; `way` is how the votes are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(N, K, E, A) * 0.3)

    def shared(self, shares: Tensor, votes: Tensor) -> Tensor:
        return (shares[..., None] * votes).sum(1)

    def agreement(self, votes: Tensor, made: Tensor) -> Tensor:
        return (votes * made[:, None]).sum(-1)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bie,ijea->bija", x, self.weight)
        agreed = torch.zeros(votes.shape[:3])
        for _ in range(3):
            made = F.normalize(self.shared(agreed.softmax(1), votes), dim=-1)
            agreed = agreed + self.agreement(votes, made)
        return made


@has_none
class CapsulesOverInputsByProduct(CapsulesOverInputs):
    def shared(self, shares: Tensor, votes: Tensor) -> Tensor:
        return torch.einsum("bij,bija->bja", shares, votes)

    def agreement(self, votes: Tensor, made: Tensor) -> Tensor:
        return torch.einsum("bija,bja->bij", votes, made)


@has_none
class Rolled(nn.Module):
    """Rollout: the weights of one layer times those of another, each with the residual beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(E, A) for _ in range(4))

    def layers(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return (self.a(x) @ self.b(x).mT).softmax(-1), (self.c(x) @ self.d(x).mT).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (weights + torch.eye(x.shape[1]) for weights in self.layers(x))
        return second @ first / 4


@has_none
class Composed(Rolled):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers(x)
        return torch.bmm(second, first / first.sum(-1, keepdim=True).amax())


@has_none
class SigmoidPowers(Rolled):
    """Powers of an adjacency matrix without a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        edges = (self.a(x) @ self.b(x).mT).sigmoid() / x.shape[1]
        return edges @ edges @ edges


# -- divisions by sums of exponentials ----------------------------------------------------------------------------


@has_none
class ExponentialFeatures(Base):
    """Linear attention: queries and keys are exponentials one by one, and nothing is a softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.exp(), k.exp()
        return (q @ (k.mT @ v)) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)


@has_none
class OtherExponentials(Base):
    """What is divided is no average: the values meet the scores themselves."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return (scores @ v) / scores.exp().sum(-1, keepdim=True)


# -- gates over branches ----------------------------------------------------------------------------------------------


class _Branches(nn.Module):
    """Convolutions side by side, summed with shares that are computed of what is pooled from all of them."""

    def __init__(self, to: int = 8, count: int = 2) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Conv2d(to, to, 3, padding=1) for _ in range(count))
        self.reduce, self.select = nn.Conv2d(to, 5, 1), nn.Conv2d(5, count * to, 1)
        self.count = count

    def shares(self, stacked: Tensor) -> Tensor:
        """Return `batch branch channel 1 1`."""
        pooled = stacked.sum(1).mean((2, 3), keepdim=True)
        logits = self.select(self.reduce(pooled).relu())
        return logits.unflatten(1, (self.count, -1)).softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.stack([path(x) for path in self.paths], 1)
        return (stacked * self.shares(stacked)).sum(1).relu()


class _SplitAttention(_Branches):
    """As ResNeSt has it: one convolution makes all branches, and the logits are moved before the softmax."""

    def __init__(self, to: int = 8, count: int = 2) -> None:
        super().__init__(to, count)
        self.all = nn.Conv2d(to, count * to, 3, padding=1, groups=count)

    def shares(self, stacked: Tensor) -> Tensor:
        pooled = stacked.sum(1).mean((2, 3), keepdim=True)
        logits = self.select(self.reduce(pooled).relu()).flatten(1)
        moved = logits.view(len(logits), 1, self.count, -1).transpose(1, 2).softmax(1)
        return moved.reshape(len(logits), self.count, -1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        stacked = self.all(x).unflatten(1, (self.count, -1))
        return (stacked * self.shares(stacked)).sum(1).relu()


class _LinearBranches(nn.Module):
    """Branches of tokens, whose shares a linear layer computes of their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.select = nn.Linear(8, 3 * 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).mT
        stacked = torch.stack([path(tokens) for path in self.paths], 1)
        shares = self.select(stacked.sum(1).mean(1)).unflatten(-1, (3, -1)).softmax(1)
        return (stacked * shares[:, :, None]).sum(1).mT.reshape(x.shape)


def _images(batch: int, length: int) -> tuple[tuple[Tensor], dict[str, Tensor]]:
    return (torch.randn(batch, 8, length, length),), {}


for kind, made in (("selective kernels", _Branches), ("split", _SplitAttention), ("linear", _LinearBranches)):
    for depth in (1, 2, 3):
        add(
            Entry(
                f"branches: {kind}, {depth}",
                lambda made=made, depth=depth: nn.Sequential(*(made() for _ in range(depth))),
                _images,
                (),
                sizes=((2, 6),),
            )
        )


# -- three projections, and something else -----------------------------------------------------------------------------


class OfThree(nn.Module):
    """Three projections of the tokens, and what a function makes of them."""

    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.make = nn.Linear(E, E), nn.Linear(E, E), nn.Linear(E, E), make

    def forward(self, x: Tensor) -> Tensor:
        return self.make(self.q(x), self.k(x), self.v(x))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)


OF_THREE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear attention": linear_attention,
    "efficient attention": lambda q, k, v: q.softmax(-1) @ (k.softmax(-2).mT @ v),
    "a classifier": lambda q, k, v: (q.relu().mean(1) + k.mean(1) * v.mean(1)).softmax(-1),
    "weights without values": lambda q, k, v: (q @ k.mT).softmax(-1) + v.mean(),
    "gates": lambda q, k, v: torch.sigmoid(q) * k.tanh() * v,
}
for _name, _make in OF_THREE.items():
    add(Entry(f"none: {_name}", lambda make=_make: OfThree(make), hidden, (), sizes=((7, 11),)))
