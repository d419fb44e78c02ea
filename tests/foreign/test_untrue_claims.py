"""What looks like attention's own steps and is another thing is not told as one of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.trace import AttentionReport
from tests.corpus.base import Base
from tests.corpus.entry import D, E

from .truth import assert_close, attentions

B, N = 7, 11


class DualSoftmax(Base):
    """Weights of the one direction times those of the other: nothing is dropped."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(D)
        return (scores.softmax(-1) * scores.softmax(-2)) @ v


class Differential(Base):
    """The weights of two attentions, one less a part of the other, meet the values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        less = 0.3 * (k @ q.mT / math.sqrt(D)).softmax(-1)
        return ((q @ k.mT / math.sqrt(D)).softmax(-1) - less) @ v


class DroppedByHand(Base):
    """A dropout that is a product with what was drawn."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT / math.sqrt(D)).softmax(-1)
        return (weights * torch.empty_like(weights).bernoulli_(0.5).div(0.5)) @ v


class OneMore(Base):
    """Softmax one: the weights of a row are less than one together."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        exponentials = (q @ k.mT / math.sqrt(D)).exp()
        return (exponentials / (1 + exponentials.sum(-1, keepdim=True))) @ v


class Guarded(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        exponentials = (q @ k.mT / math.sqrt(D)).exp()
        return (exponentials / (exponentials.sum(-1, keepdim=True) + 1e-6)) @ v


class Opposite(Base):
    """The further apart, the more weight: the scores are taken off their largest."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(D)
        return (scores.amax(-1, keepdim=True).expand_as(scores) - scores).softmax(-1) @ v


def shown(module: nn.Module) -> list[AttentionReport]:
    torch.manual_seed(0)
    return list(mha_inspect.trace(module.eval(), torch.randn(B, N, E)).attentions)


@pytest.mark.parametrize(
    ("module", "formulas", "dropped"),
    [
        (DualSoftmax, ["(weights, then mul) · v_heads"] * 2, False),
        (Differential, ["(weights, then mul, sub) · v_heads", "(weights, then sub) · v_heads"], False),
        (DroppedByHand, ["dropout(weights) · v_heads"], True),
        (Guarded, ["weights · v_heads"], False),
    ],
)
def test_what_is_done_to_weights_is_a_dropout_only_where_it_was_drawn(
    module: type[Base], formulas: list[str], dropped: bool
) -> None:
    found = shown(module())
    assert [stage.formula for one in found for stage in one.stages if stage.name == "context"] == formulas
    assert {any("before dropout" in note for note in one.notes) for one in found} == {dropped}


def test_more_than_a_guard_beside_the_sum_is_no_softmax() -> None:
    torch.manual_seed(0)
    module, x = OneMore().eval(), torch.randn(B, N, E)
    (attention,) = attentions(module, x)
    scores = attention.canonical("scores", "batch heads query key")
    weights = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
    assert_close(attention.canonical("weights", "batch heads query key"), weights)
    (one,) = shown(module)
    assert {stage.name: stage.formula for stage in one.stages}["weights"] == "exp(scores) / …"


def test_scores_that_are_taken_off_something_have_the_other_sign() -> None:
    torch.manual_seed(0)
    module, x = Opposite().eval(), torch.randn(B, N, E)
    (attention,) = attentions(module, x)
    assert attention.found.scale == pytest.approx(-(D**-0.5))
    q, k = (attention.canonical(f"{s}_heads", f"batch heads {n} head_dim") for s, n in (("q", "query"), ("k", "key")))
    scores = q @ k.mT / math.sqrt(D)
    assert_close(attention.canonical("scores", "batch heads query key"), scores)
    assert_close(attention.canonical("weights", "batch heads query key"), (-scores).softmax(-1))
    (one,) = shown(module)
    formula = next(stage.formula for stage in one.stages if stage.name == "masked_scores")
    assert formula == "scores · -1 + …"


class Negative(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (-(q @ k.mT) / math.sqrt(D)).softmax(-1) @ v


class Squared(Base):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT / math.sqrt(D)) ** 2).softmax(-1) @ v


@pytest.mark.parametrize(("module", "scale"), [(Negative, -(D**-0.5)), (Squared, D**-0.5)])
def test_scores_are_the_product_before_its_sign_or_power_is_another(module: type[Base], scale: float) -> None:
    torch.manual_seed(0)
    (attention,) = attentions(module().eval(), torch.randn(B, N, E))
    assert attention.found.scale == pytest.approx(scale)
    q, k = (attention.canonical(f"{s}_heads", f"batch heads {n} head_dim") for s, n in (("q", "query"), ("k", "key")))
    assert attention.found.scores_scale is not None
    assert_close(attention.canonical("scores", "batch heads query key"), q @ k.mT * attention.found.scores_scale)
    given = q @ k.mT / math.sqrt(D)
    given = given**2 if module is Squared else -given
    assert_close(attention.canonical("masked_scores", "batch heads query key"), given)
    assert_close(attention.canonical("weights", "batch heads query key"), given.softmax(-1))


class TwoHalves(Base):
    """Differential attention in two calls: the same scores weigh one half of the values each."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        halves = [half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1)]
        both = [nn.functional.scaled_dot_product_attention(q, k, half) for half in halves]
        first, second = torch.cat(both, dim=-1).chunk(2, dim=1)
        return first - 0.3 * second


def test_two_calls_with_the_same_scores_are_no_loop_over_heads() -> None:
    torch.manual_seed(0)
    module, x = TwoHalves(heads=4).eval(), torch.randn(B, N, E)
    found = attentions(module, x)
    assert [one.names.num_heads for one in found] == [4, 4]
    q, k, v = (module.split(layer(x)) for layer in (module.q, module.k, module.v))
    weights = (q @ k.mT / math.sqrt(D)).softmax(-1)
    for one, half in zip(found, v.chunk(2, dim=1), strict=True):
        assert_close(one.canonical("weights", "batch heads query key"), weights)
        assert_close(one.canonical("context", "batch heads query head_dim"), weights @ half.repeat(1, 2, 1, 1))


class Nystrom(Base):
    """Three softmaxes, of which only the last weighs values: the others are multiplied with each other."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        few_q, few_k = q[..., :3, :], k[..., :3, :]
        outer, inner, last = (
            (a @ b.mT / math.sqrt(D)).softmax(-1) for a, b in ((q, few_k), (few_q, few_k), (few_q, k))
        )
        return outer @ torch.linalg.pinv(inner) @ (last @ v)


def test_weights_times_weights_are_no_attention() -> None:
    torch.manual_seed(0)
    module, x = Nystrom().eval(), torch.randn(B, N, E)
    (attention,) = attentions(module, x)
    assert attention.found.stages["weights"].shape[-2:] == (3, N)
    v = attention.canonical("v_heads", "batch heads key head_dim")
    weights = attention.canonical("weights", "batch heads query key")
    assert_close(attention.canonical("context", "batch heads query head_dim"), weights @ v)
