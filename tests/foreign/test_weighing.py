"""Weights that are made of scores by no softmax, and what is done to weights before they meet the values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from tests.corpus.base import Base
from tests.corpus.entry import D, E, H

from .truth import assert_close, attentions

B, N, V = 7, 11, 17


class Weighed(Base):
    """Weights by a function of the scores, that is given."""

    def __init__(self, weigh: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weigh = weigh

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.weigh(q @ k.mT / math.sqrt(D)) @ v


def softmax1(scores: Tensor) -> Tensor:
    exponentials = scores.exp()
    return exponentials / (1 + exponentials.sum(-1, keepdim=True))


def sparsemax(scores: Tensor) -> Tensor:
    ordered, _ = scores.sort(-1, descending=True)
    ranks, sums = torch.arange(1, scores.shape[-1] + 1), ordered.cumsum(-1)
    count = (1 + ranks * ordered > sums).sum(-1, keepdim=True)
    return (scores - (sums.gather(-1, count - 1) - 1) / count).clamp(min=0)


def sigmoid(scores: Tensor) -> Tensor:
    return (scores - math.log(N)).sigmoid()


def relu(scores: Tensor) -> Tensor:
    return scores.relu() / N


FORMULAS = {
    softmax1: "exp(scores) / …",
    sparsemax: "clamp(scores - …)",
    sigmoid: "sigmoid(scores - 2.398)",
    relu: "relu(scores) / 11",
}


@pytest.mark.parametrize("weigh", FORMULAS, ids=lambda weigh: weigh.__name__)
def test_weights_need_no_softmax(weigh: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, x = Weighed(weigh).eval(), torch.randn(B, N, E)
    (attention,) = attentions(module, x)
    q, k, v = (module.split(x.double() @ p.weight.double().T + p.bias.double()) for p in (module.q, module.k, module.v))
    weights = weigh(q @ k.mT / math.sqrt(D))
    assert (attention.names.num_heads, attention.names.head_dim) == (H, D)
    assert attention.found.scale == pytest.approx(D**-0.5)
    assert_close(attention.canonical("scores", "batch heads query key"), q @ k.mT / math.sqrt(D))
    assert_close(attention.canonical("weights", "batch heads query key"), weights)
    assert_close(attention.canonical("context", "batch heads query head_dim"), weights @ v)
    (shown,) = mha_inspect.trace(module, x).attentions
    assert shown.kind == ("self",)
    assert {stage.name: stage.formula for stage in shown.stages}["weights"] == FORMULAS[weigh]
    assert "without a softmax" in " ".join(shown.notes)
    assert not mha_inspect.check(module, x).findings
    assert mha_inspect.diff(module, Weighed(weigh).eval(), x, same_weights=True).outcome == "same"
    assert all(
        "W_" in parameter.role
        for parameter in mha_inspect.params(module, x, per_head=True).parameters
        if "weight" in parameter.name
    )


# -- several maps of one head -----------------------------------------------------------------------------------------


class Differential(nn.Module):
    """Each head has two maps, of which one is taken off the other; they lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(E, 2 * H * D), nn.Linear(E, 2 * H * D)
        self.v, self.o = nn.Linear(E, H * V), nn.Linear(H * V, E)

    def split(self, x: Tensor) -> Tensor:
        """`batch heads maps position head_dim`."""
        return x.unflatten(-1, (H, 2, D)).permute(0, 2, 3, 1, 4)

    def values(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, V)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (t.flatten(1, 2) for t in (q, k))
        weights = (q @ k.mT * D**-0.5).softmax(-1).unflatten(1, (H, 2))
        return (weights[:, :, 0] - 0.3 * weights[:, :, 1]) @ v

    def forward(self, x: Tensor) -> Tensor:
        context = self.attend(self.split(self.q(x)), self.split(self.k(x)), self.values(self.v(x)))
        return self.o(context.transpose(1, 2).flatten(2))


class Apart(Differential):
    """The maps have a dimension of their own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first, second = torch.einsum("bhpid,bhpjd->bphij", q * D**-0.5, k).softmax(-1).unbind(1)
        return torch.einsum("bhij,bhjv->bhiv", first - 0.3 * second, v)


@pytest.mark.parametrize("style", [Differential, Apart])
def test_maps_of_one_head_are_no_heads_of_their_own(style: type[Differential]) -> None:
    torch.manual_seed(0)
    module, x = style().eval(), torch.randn(B, N, E)
    (attention,) = attentions(module, x)
    assert (attention.names.num_heads, attention.names.maps, attention.names.head_dim) == (H, 2, D)
    q, k = (module.split(x.double() @ p.weight.double().T + p.bias.double()) for p in (module.q, module.k))
    v = module.values(x.double() @ module.v.weight.double().T + module.v.bias.double())
    weights = (q @ k.mT * D**-0.5).softmax(-1)
    told = attention.canonical("weights", "batch heads maps query key")
    assert_close(told, weights)
    assert_close(attention.canonical("context", "batch heads query v_head_dim"), module.attend(q, k, v))
    (shown,) = mha_inspect.trace(module, x).attentions
    assert (shown.num_heads, shown.num_kv_heads, shown.kind) == (H, H, ("self",))
    assert "Each head combines the weights of 2 softmaxes before the values." in shown.notes
    assert not [finding for finding in mha_inspect.check(module, x).findings if finding.sure]
    assert mha_inspect.diff(module, style().eval(), x, same_weights=True).outcome == "same"


class Convolved(nn.Module):
    """Few key heads that are convolved along the sequence together with their queries, before they are repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [6 * D, 2 * D, 2 * D]
        taken = sum(self.sizes[:2])
        self.qkv, self.convolve = nn.Linear(E, 10 * D), nn.Conv1d(taken, taken, 3, padding=2, groups=taken)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        taken = self.convolve.in_channels
        convolved = self.convolve(x[..., :taken].mT)[..., : x.shape[1]].mT
        q, k, v = torch.cat([convolved, x[..., taken:]], -1).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, D)).transpose(1, 2) for t in (q, k, v))
        return q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.qkv(x))
        return ((q @ k.mT / math.sqrt(D)).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_keys_that_are_convolved_with_their_queries_are_as_many_as_there_are() -> None:
    torch.manual_seed(0)
    module, x = Convolved().eval(), torch.randn(B, N, E)
    (attention,) = attentions(module, x)
    assert (attention.names.num_heads, attention.names.num_kv_heads) == (6, 2)
    q, k, _ = module.double().heads(module.qkv(x.double()))
    assert_close(attention.canonical("weights", "batch heads query key"), (q @ k.mT / math.sqrt(D)).softmax(-1))
    module.float()
    assert mha_inspect.trace(module, x).attentions[0].kind == ("self", "grouped")
    assert mha_inspect.params(module, x, per_head=True).parameters


class OneQuery(nn.Module):
    """The last token attends to all, without axes for a batch, heads or queries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(E, E, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.k(x) @ self.q(x[-1]) / math.sqrt(E)).softmax(0) @ self.v(x)


def test_keys_times_one_query_are_scores_of_the_keys() -> None:
    (attention,) = mha_inspect.trace(OneQuery().eval(), torch.randn(N, E)).attentions
    stages = {stage.name: (stage.shape, stage.axes) for stage in attention.stages}
    assert stages["q_heads"] == ((E,), "head_dim")
    assert stages["k_heads"] == ((N, E), "key head_dim")
    assert stages["weights"] == ((N,), "key")
