"""Modules that are right and unusual: check accuses none, and suspects none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.reports.check import CheckReport


class Right(nn.Module):
    """Heads of 8 features with weights, or a mask of visible keys, by a function."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.weigh = weigh

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(matrix(x).unflatten(-1, (4, 8)).transpose(1, 2) for matrix in (self.q, self.k, self.v))

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        q, k, v = self.heads(x if beside is None else x + beside["shift"])
        return self.out((self.weigh(q, k) @ v).transpose(1, 2).flatten(2))


class BlockCausal(Right):
    """Each token sees its block of two, and the blocks before it."""


class CausalByHead(Right):
    """A causal mask in half of the heads."""


def positive(q: Tensor, k: Tensor) -> Tensor:
    return (F.elu(q) + 1) @ (F.elu(k) + 1).mT


def normalised(scores: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True)


def linear(q: Tensor, k: Tensor) -> Tensor:
    return normalised(positive(q, k).tril())


def filled(q: Tensor, k: Tensor) -> Tensor:
    scores = positive(q, k)
    return normalised(scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), 0))


def rectified(q: Tensor, k: Tensor) -> Tensor:
    scores = F.relu(q @ k.mT / math.sqrt(8)).tril()
    return scores / (scores.sum(-1, keepdim=True) + 1e-6)


def retained(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(8) * (0.9 ** distance(q).clamp(min=0)).tril()
    return scores / scores.abs().sum(-1, keepdim=True).clamp(min=1)


def distance(q: Tensor) -> Tensor:
    places = torch.arange(q.shape[-2])
    return places[:, None] - places


def masked(seen: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return weights in which each query sees what this says of distances, `query key`."""

    def weigh(q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(8)).masked_fill(~seen(distance(q)), -math.inf).softmax(-1)

    return weigh


def sinks(far: Tensor) -> Tensor:
    is_first = torch.arange(far.shape[1]) < 1
    return (far >= 0) & ((far < 3) | is_first)


def strided(far: Tensor) -> Tensor:
    return (far >= 0) & ((far < 3) | (far % 3 == 0))


def blocks(far: Tensor) -> Tensor:
    number = torch.arange(len(far)) // 2
    return number[:, None] >= number


def half(far: Tensor) -> Tensor:
    return torch.stack([far >= 0, far >= 0, far > -99, far > -99])


def without_itself(q: Tensor, k: Tensor) -> Tensor:
    """Each query hides its own key, but for the first, which has no other (Reformer)."""
    scores = (q @ k.mT / math.sqrt(8)).masked_fill(distance(q) == 0, -5e4)
    scores = scores.masked_fill(distance(q) < 0, torch.finfo(scores.dtype).min)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp()


class OneProjection(Right):
    """Queries and keys are one projection, and the keys of length 1."""

    def __init__(self, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(weigh)
        del self.k

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        q, v = (matrix(x).unflatten(-1, (4, 8)).transpose(1, 2) for matrix in (self.q, self.v))
        return q, F.normalize(q, dim=-1), v


def checked(module: nn.Module, *args: Any, causal: bool | None = None) -> CheckReport:
    torch.manual_seed(0)
    return mha_inspect.check(module, *(args or (torch.randn(2, 12, 32),)), intent=Intent(causal=causal))


@pytest.mark.parametrize("weigh", [linear, filled, rectified, retained, masked(sinks), masked(strided)])
def test_a_causal_one_is_causal(weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    report = checked(Right(weigh), causal=True)
    assert report.findings == ()
    (fact,) = [fact for fact in report.facts if fact.name == "who sees whom"]
    assert fact.sentence.startswith("causal")
    assert all(row[place + 1 :].count("■") == 0 for place, row in enumerate(fact.picture))


def test_a_query_without_another_key_sees_itself() -> None:
    assert checked(OneProjection(without_itself), causal=True).findings == ()


@pytest.mark.parametrize("module", [BlockCausal(masked(blocks)), CausalByHead(masked(half))])
def test_a_class_is_not_accused_by_its_name(module: nn.Module) -> None:
    assert not [finding for finding in checked(module).findings if finding.sure]


def test_what_each_item_has_in_a_dict_is_no_place_in_the_batch() -> None:
    module = Right(masked(lambda far: far > -99))
    assert checked(module, torch.randn(2, 12, 32), {"shift": torch.randn(2, 12, 32)}).findings == ()


class AttentionFree(Right):
    """AFT (Zhai et al. 2021): an average of the values with weights exp(w + k), times a gate."""

    def __init__(self) -> None:
        super().__init__(lambda q, k: q @ k.mT)
        self.w = nn.Parameter(torch.randn(12, 12) / 10)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        far, near = self.w.exp().tril(), self.k(x).exp()
        return self.out(self.q(x).sigmoid() * (far @ (near * self.v(x))) / (far @ near))


def test_the_values_of_a_gated_average_are_averaged() -> None:
    report = checked(AttentionFree(), causal=True)
    assert report.findings == ()
    weights, seen = (fact.sentence for fact in report.facts if fact.name in ("weights", "who sees whom"))
    assert weights.endswith("sum to 1, times a gate")
    assert seen == "causal"


class Stripes(Right):
    """Attention over stripes that are no tokens, put back by the opposite reshape."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(x.reshape(2, 3, 32)).reshape(x.shape)


def test_a_reshape_that_no_permutation_would_mend_is_meant() -> None:
    assert checked(Stripes(masked(lambda far: far > -99)), torch.randn(2, 16, 6)).findings == ()


class Map(Right):
    """A mistake: the channels of a map become tokens."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(x.reshape(2, -1, 32))


@pytest.mark.parametrize("width", [4, 5])
def test_the_permutation_moves_the_channels_behind_the_places(width: int) -> None:
    (finding,) = checked(Map(masked(lambda far: far > -99)), torch.randn(2, 32, 4, width)).findings
    assert finding.fix == "Use permute(0, 2, 3, 1) before the reshape."


class Moved(Right):
    """A mistake: the tokens are rolled, and not put back."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(x.roll(2, 1))


def test_tokens_that_are_moved_before_the_mask_are_named() -> None:
    (finding,) = checked(Moved(masked(lambda far: far >= 0)), causal=True).findings
    assert finding.sure
    assert "in another order" in finding.sentence
    assert finding.evidence.startswith("The last token is query 1 of 12")


class ViewsInTraining(Right):
    """A mistake: with dropout the result is no longer contiguous, and a view of it raises."""

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        result = super().forward(x)
        return result.mT.view(x.shape) if self.training else result


def test_what_raises_in_training_alone_is_no_input_that_was_changed() -> None:
    (finding,) = checked(ViewsInTraining(masked(lambda far: far > -99))).findings
    assert finding.check == "training"
    assert finding.sentence.startswith("The forward raises in training mode")


def test_scores_without_a_scale_can_be_declared() -> None:
    unscaled = Right(lambda q, k: (q @ k.mT).softmax(-1))
    assert [finding.check for finding in checked(unscaled).findings] == ["scale"]
    declared = Intent(scale="none")
    assert mha_inspect.check(unscaled, torch.randn(2, 12, 32), intent=declared).findings == ()
    scaled = Right(lambda q, k: (q @ k.mT / math.sqrt(8)).softmax(-1))
    (finding,) = mha_inspect.check(scaled, torch.randn(2, 12, 32), intent=declared).findings
    assert finding.sentence == "The scores are scaled by 0.3536 = 1/√head_dim; declared: not scaled."


class WithLoss(Right):
    """As in nanoGPT: with targets there is a loss too."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        result = super().forward(x)
        return result, None if targets is None else F.cross_entropy(result.flatten(0, 1), targets.flatten())


def test_the_targets_of_a_loss_are_no_mask() -> None:
    report = checked(WithLoss(masked(lambda far: far > -99)))
    assert [fact.sentence for fact in report.facts if fact.name == "mask"] == []


class LastTokens(Right):
    """The last six tokens are the queries, as in Perceiver AR: each sees the tokens up to its own."""

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        tokens = (x[:, -6:], x, x)
        matrices = (self.q, self.k, self.v)
        return tuple(m(t).unflatten(-1, (4, 8)).transpose(1, 2) for m, t in zip(matrices, tokens, strict=True))


def of_the_last(q: Tensor, k: Tensor) -> Tensor:
    keep = torch.ones(6, 12, dtype=torch.bool).tril(6)
    return (q @ k.mT / math.sqrt(8)).masked_fill(~keep, -math.inf).softmax(-1)


def test_queries_that_are_the_last_tokens_are_causal() -> None:
    assert checked(LastTokens(of_the_last), causal=True).findings == ()


class Gated(Right):
    """A mistake behind a gate that is 0 before training: it has no mask."""

    def __init__(self) -> None:
        super().__init__(masked(lambda far: far > -99))
        self.gate, self.causal = nn.Parameter(torch.zeros(())), Right(masked(lambda far: far >= 0))

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return self.causal(x) + self.gate.tanh() * super().forward(x)


def test_a_gate_of_zeros_hides_no_future() -> None:
    assert [finding.check for finding in checked(Gated(), causal=True).findings if finding.sure] == ["causal"]


class Referring(Right):
    """It reads the matrix of another module, which is kept in a list of one so that it is not registered twice."""

    def __init__(self) -> None:
        super().__init__(masked(lambda far: far > -99))
        self.shared = [nn.Linear(32, 32)]

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return super().forward(self.shared[0](x))


def test_one_module_in_a_list_may_be_registered_by_another() -> None:
    (finding,) = checked(Referring()).findings
    assert not finding.sure
    assert "not registered" in finding.sentence
