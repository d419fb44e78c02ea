"""Modules that come near an attention, and are none: gates, pools, experts, recurrences, graphs, kernels, memories."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .styles import E

B, N, A, V, K = 7, 11, 19, 17, 5


class Two(nn.Module):
    """Two projections to as many features."""

    def __init__(self, first: int = E, second: int = E, to: int = A) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(first, to), nn.Linear(second, to)


# -- gates: a position weighs its own features -------------------------------------------------------------------------


class GatedLinear(Two):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.a(x)) * self.b(x)


class SqueezeAndExcite(Two):
    def __init__(self) -> None:
        super().__init__(second=A, to=A)
        self.c = nn.Linear(A, E)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bne,be->bn", x, self.c(self.b(self.a(x.mean(1)).relu())).sigmoid())


class FiLM(Two):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bna,ba->bn", self.a(x).relu(), self.b(x.mean(1)).sigmoid())


class PairGate(Two):
    """Two features of one position are compared with each other, and pooled."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return ((a * b).sum(-1, keepdim=True).sigmoid() * x).sum(1)


class AlignedStreams(Two):
    """Weights of two streams, place by place: no place is compared with another."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(A, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score((self.a(x) + self.b(x.cumsum(1))).tanh()).sigmoid()
        return (weights.mT @ x)[:, 0]


class SpatialGate(nn.Module):
    """gMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.places = nn.Linear(E, 2 * A), nn.LayerNorm(A), nn.Linear(N, N)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.a(x)).chunk(2, -1)
        return u * self.places(self.norm(v).mT).mT


# -- pools, masks and places: there is no query ------------------------------------------------------------------------


class SigmoidPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.v = nn.Linear(E, K), nn.Linear(E, A)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x).sigmoid()
        return (weights / weights.sum(1, keepdim=True)).mT @ self.v(x)


class ConvolvedRegions(SigmoidPool):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(E, K, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).relu() @ self.v(x)


class Sampled(nn.Module):
    """Linear interpolation at places that are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(E, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (1 - (self.place(x).sigmoid() * (N - 1) - torch.arange(float(N))).abs()).relu() @ x


class Sorted(Sampled):
    """A soft permutation: numbers are compared with themselves in order."""

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.place(x)
        return (-(numbers.sort(1).values - numbers.mT).abs()).softmax(-1) @ x


class Interpolated(nn.Module):
    """What the nearest points have, by one over the distance."""

    def forward(self, x: Tensor) -> Tensor:
        apart, nearest = torch.cdist(x[..., :3], x[:, :4, :3]).topk(3, largest=False)
        weights = 1 / (apart + 1e-6)
        picked = x.gather(1, nearest.flatten(1)[..., None].expand(-1, -1, E)).unflatten(1, (N, 3))
        return ((weights / weights.sum(-1, keepdim=True))[..., None] * picked).sum(2)


# -- experts and codes: what is weighed are parts of the module --------------------------------------------------------


class SigmoidExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(E, K), nn.Parameter(torch.randn(K, E, V))

    def weights(self, x: Tensor) -> Tensor:
        weights = self.gate(x).sigmoid()
        return weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bnk,bnkv->bnv", self.weights(x), torch.einsum("bne,kev->bnkv", x, self.experts))


class TopExperts(SigmoidExperts):
    def weights(self, x: Tensor) -> Tensor:
        every = self.gate(x).sigmoid()
        weights, chosen = every.topk(2, -1)
        return torch.zeros_like(every).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))


class CosineExperts(SigmoidExperts):
    def weights(self, x: Tensor) -> Tensor:
        return (F.normalize(x, dim=-1) @ F.normalize(self.gate.weight, dim=-1).mT).sigmoid()


class ExpertChoice(SigmoidExperts):
    """Experts choose tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).mT.sigmoid().topk(4, -1)
        chosen = F.one_hot(chosen, x.shape[1]).to(x.dtype)
        made = torch.einsum("bkce,kev->bkcv", torch.einsum("bkcn,bne->bkce", chosen, x), self.experts)
        return torch.einsum("bkcn,bkcv->bnv", chosen * weights[..., None], made)


class SoftTree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.leaves = nn.Linear(E, 3), nn.Parameter(torch.randn(4, V))

    def forward(self, x: Tensor) -> Tensor:
        root, left, right = self.a(x).sigmoid().split(1, -1)
        ends = [root * left, root * (1 - left), (1 - root) * right, (1 - root) * (1 - right)]
        return torch.cat(ends, -1) @ self.leaves


class TiedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(K, E))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.codes.mT).sigmoid() @ self.codes


class RadialBasis(TiedAutoencoder):
    def forward(self, x: Tensor) -> Tensor:
        return (-torch.cdist(x, self.codes.expand(len(x), -1, -1)).square() / E).exp() @ self.codes


class SigmoidCapsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.randn(K, N, E, 3) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bne,knev->bknv", x, self.votes)
        agreed = torch.zeros(votes.shape[:3])
        for _ in range(2):
            made = torch.einsum("bkn,bknv->bkv", agreed.sigmoid(), votes).tanh()
            agreed = agreed + torch.einsum("bknv,bkv->bkn", votes, made)
        return made


# -- recurrences, scans and convolutions -------------------------------------------------------------------------------


class LongShortTerm(Two):
    def __init__(self) -> None:
        super().__init__(second=A, to=4 * A)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = torch.zeros(len(x), A)
        for token in x.unbind(1):
            i, f, g, o = (self.a(token) + self.b(hidden)).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return hidden


class Decays(Two):
    """The sums of forget gates as a matrix of positions: keys have no features."""

    def forward(self, x: Tensor) -> Tensor:
        sums = F.logsigmoid(self.a(x)[..., :1]).cumsum(1)
        return (sums - sums.mT).tril().exp().tril() @ self.b(x)


class StateSpace(Two):
    """Mamba 2 as one product: nothing is bent."""

    def __init__(self) -> None:
        super().__init__(to=K)
        self.v, self.step = nn.Linear(E, V), nn.Linear(E, 1)

    def forward(self, x: Tensor) -> Tensor:
        sums = -F.softplus(self.step(x)).cumsum(1)
        return (self.a(x) @ self.b(x).mT * (sums - sums.mT).exp().tril()) @ self.v(x)


class SelectiveScan(StateSpace):
    def forward(self, x: Tensor) -> Tensor:
        decay, given, v = (-F.softplus(self.step(x))).exp(), self.a(x), F.silu(self.v(x))
        state, made = torch.zeros(len(x), V, K), []
        for at in range(x.shape[1]):
            state = decay[:, at, None] * state + v[:, at, :, None] * given[:, at, None]
            made.append((state @ self.b(x)[:, at, :, None])[..., 0])
        return torch.stack(made, 1)


class DynamicConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.v = nn.Linear(E, 3), nn.Linear(E, A)

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(self.v(x), (0, 0, 1, 1)).unfold(1, 3, 1)
        return torch.einsum("bnk,bnak->bna", self.kernel(x).sigmoid(), windows)


class LongConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.implicit = nn.Sequential(nn.Linear(1, A), nn.ReLU(), nn.Linear(A, 1))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(float(N))
        return self.implicit((at[:, None] - at)[..., None])[..., 0].sigmoid() @ x


class Stack(Two):
    """What is pushed and popped by a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        stack = torch.zeros(len(x), 4, A)
        for token in x.unbind(1):
            push, pop = self.a(token)[:, :2].softmax(-1)[..., None, None].unbind(1)
            pushed = torch.cat([self.b(token)[:, None], stack[:, :-1]], 1)
            stack = push * pushed + pop * torch.cat([stack[:, 1:], torch.zeros_like(stack[:, :1])], 1)
        return stack[:, 0]


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


class Crosses(nn.Module):
    """A compressed interaction network of a recommender."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(K, N, N) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.einsum("kij,bije->bke", self.w, torch.einsum("bie,bje->bije", x, x)).relu()
        return torch.einsum("bke,bie->bki", made, x)


class Dots(Two):
    """Scores of pairs go on as features."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(N, V)

    def forward(self, x: Tensor) -> Tensor:
        return self.c((self.a(x) @ self.b(x).mT).relu())


class Contrasts(Two):
    def forward(self, x: Tensor) -> Tensor:
        alike = F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(x), dim=-1).mT
        return -F.logsigmoid((10 * alike - 5) * (2 * torch.eye(N) - 1)).sum(-1).mean()


class KernelDiscrepancy(Two):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        same, other = (-torch.cdist(a, a).square()).exp(), (-torch.cdist(a, b).square()).exp()
        return same.mean((1, 2)) - 2 * other.mean((1, 2))


class KernelRegression(Two):
    def forward(self, x: Tensor) -> Tensor:
        kernel = (-torch.cdist(self.a(x), self.a(x)).square() / A).exp()
        return kernel @ torch.linalg.solve(kernel + torch.eye(N), self.b(x))


class LearnedGraph(Two):
    """Edges by a sigmoid, each divided by the degrees of both its ends: what one row weighs hangs on other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(E, V)

    def forward(self, x: Tensor) -> Tensor:
        edges = (self.a(x) @ self.b(x).mT).sigmoid()
        degree = (edges.sum(-1) + 1).rsqrt()
        return (degree[..., :, None] * edges * degree[..., None, :]) @ self.v(x)


class Relations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(2 * E, A), nn.ReLU(), nn.Linear(A, V), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.cat([x[:, :, None].expand(-1, -1, N, -1), x[:, None].expand(-1, N, -1, -1)], -1)
        return self.pair(pairs).sum(2)


class Hyper(nn.Module):
    """Two layers whose weights are made of a context."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(E, E * A), nn.Linear(E, A * V)

    def forward(self, x: Tensor) -> Tensor:
        context = x.mean(1)
        first, second = self.first(context).view(-1, E, A), self.second(context).view(-1, A, V)
        return (x @ first).relu() @ second


class InnerModel(Two):
    """A network with a bend, whose layers were learned at the time of the test by one step."""

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.a(x), self.b(x)
        return (k @ (k.mT @ v / N)).relu() @ (v.mT @ k / N)


NEAR = [
    *(GatedLinear, SqueezeAndExcite, FiLM, PairGate, AlignedStreams, SpatialGate),
    *(SigmoidPool, ConvolvedRegions, Sampled, Sorted, Interpolated),
    *(SigmoidExperts, TopExperts, CosineExperts, ExpertChoice, SoftTree, TiedAutoencoder, RadialBasis, SigmoidCapsules),
    *(LongShortTerm, Decays, StateSpace, SelectiveScan, DynamicConvolution, LongConvolution, Stack, Written),
    *(Crosses, Dots, Contrasts, KernelDiscrepancy, KernelRegression, LearnedGraph, Relations, Hyper, InnerModel),
]
