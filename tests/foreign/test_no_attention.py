"""What scores, weighs and averages, and is no attention: no queries are compared with keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from .near import NEAR
from .styles import E, H

B, N, A, V = 7, 11, 19, 17


class Pool(nn.Module):
    """One learned scorer over one input: there is no query."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.score = nn.Linear(E, A), nn.Linear(E, A), nn.Linear(A, 1)
        self.positions = nn.Parameter(torch.randn(1, N, E))

    def forward(self, x: Tensor) -> Tensor:
        return (self.score(self.hidden(x)).softmax(1) * x).sum(1)

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x).tanh()


class PoolByProduct(Pool):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.score(self.hidden(x)).softmax(1).mT, x)


class PoolWithPositions(PoolByProduct):
    """What is added to every position is learned, and no query."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x + self.positions).tanh()


class PoolWithGate(PoolByProduct):
    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x).tanh() * self.b(x).sigmoid()


class PoolWithResidual(PoolByProduct):
    def hidden(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x)).tanh()


class PoolLessMean(PoolByProduct):
    """The mean of the positions is taken off them by a norm."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return (x - x.mean(1, keepdim=True)).relu()


class PoolAtATime(PoolByProduct):
    """Time is added to every position and nothing is bent: it is the same number for all, and no weight hangs on it."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x[:, :1])


class Experts(nn.Module):
    """A router that sees something else too: what it weighs are outputs of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate = nn.Linear(E, A), nn.Linear(E, A), nn.Linear(A, H)
        self.experts = nn.Parameter(torch.randn(H, E, V))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate((self.a(x) + self.b(x[:, :1])).tanh()).softmax(-1)
        return torch.einsum("bnh,bnhv->bnv", weights, torch.einsum("bne,hev->bnhv", x, self.experts))


class Codes(nn.Module):
    """Distances to codes that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(13, E))

    def forward(self, x: Tensor) -> Tensor:
        return (-(x[:, :, None] - self.codes).square().sum(-1)).softmax(-1) @ self.codes


class Residuals(Codes):
    """VLAD: what is averaged are the differences themselves."""

    def forward(self, x: Tensor) -> Tensor:
        apart = x[:, :, None] - self.codes
        return ((-apart.square().sum(-1)).softmax(-1)[..., None] * apart).sum(1)


class Clusters(nn.Module):
    """k-means: clusters average what was compared with them."""

    def forward(self, x: Tensor) -> Tensor:
        centres = x[:, :3]
        for _ in range(2):
            nearest = (-(x[:, :, None] - centres[:, None]).square().sum(-1)).softmax(-1)
            centres = nearest.mT @ x / nearest.sum(1)[..., None]
        return centres


class Contrast(nn.Module):
    """Distances of pairs, and nothing that is averaged by them."""

    def forward(self, x: Tensor) -> Tensor:
        apart = (x[:, :, None] - x.flip(1)[:, None]).square().sum(-1)
        return -(-apart).log_softmax(-1).diagonal(dim1=1, dim2=2).mean()


class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.votes = nn.Parameter(torch.randn(H, E, 5) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("bne,hed->bhnd", x, self.votes)
        agreed = torch.zeros(votes.shape[:3])
        for _ in range(2):
            made = (agreed.softmax(1)[..., None] * votes).sum(2).tanh()
            agreed = agreed + (votes * made[:, :, None]).sum(-1)
        return made


class Masks(nn.Module):
    """What segments: each query has a mask and votes for classes."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.classes, self.pixels = nn.Parameter(torch.randn(5, E)), nn.Linear(E, A), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries + x.mean(1, keepdim=True)
        masks = (queries @ self.pixels(x).mT).sigmoid()
        return torch.einsum("bqc,bqn->bcn", self.classes(queries).softmax(-1)[..., :-1], masks)


class PooledGraph(nn.Module):
    """Edges by a sigmoid between clusters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.clusters = nn.Linear(E, A), nn.Linear(E, A), nn.Linear(E, 5)

    def forward(self, x: Tensor) -> Tensor:
        edges, clusters = (self.a(x) @ self.b(x).mT).sigmoid(), self.clusters(x).softmax(-1)
        return clusters.mT @ edges @ clusters


EVERY = [
    *(Pool, PoolByProduct, PoolWithPositions, PoolWithGate, PoolWithResidual, PoolLessMean, PoolAtATime),
    *(Experts, Codes, Residuals, Clusters, Contrast, Capsules, Masks, PooledGraph),
    *NEAR,
]


@pytest.mark.parametrize("module", EVERY)
def test_no_attention_is_claimed(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    made, x = module().eval(), torch.randn(B, N, E)
    assert not mha_inspect.trace(made, x).attentions
    assert not [own.name for own in mha_inspect.params(made, x).parameters if "W_" in own.role]


class PoolAtABentTime(PoolAtATime):
    """Bent after it is added, what is given once is a query, and the pool an attention."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x).tanh()


def test_a_bend_makes_the_difference() -> None:
    """With it the weights hang on what is added, and without it they do not: in float64."""
    torch.manual_seed(0)
    for module, hangs in ((PoolAtATime().eval(), False), (PoolAtABentTime().eval(), True)):
        x = torch.randn(B, N, E)
        assert bool(mha_inspect.trace(module, x).attentions) == hangs
        module.double()
        before = module.score(module.hidden(x.double())).softmax(1)
        with torch.no_grad():
            module.b.bias += 1
        apart = (module.score(module.hidden(x.double())).softmax(1) - before).abs().max()
        assert (float(apart) > 1e-6) == hangs
