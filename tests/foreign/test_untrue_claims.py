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


class DroppedByHand(Base):
    """A dropout that is a product with what was drawn."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT / math.sqrt(D)).softmax(-1)
        return (weights * torch.empty_like(weights).bernoulli_(0.5).div(0.5)) @ v


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
        (DroppedByHand, ["dropout(weights) · v_heads"], True),
    ],
)
def test_what_is_done_to_weights_is_a_dropout_only_where_it_was_drawn(
    module: type[Base], formulas: list[str], dropped: bool
) -> None:
    found = shown(module())
    assert [stage.formula for one in found for stage in one.stages if stage.name == "context"] == formulas
    assert {any("before dropout" in note for note in one.notes) for one in found} == {dropped}


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
