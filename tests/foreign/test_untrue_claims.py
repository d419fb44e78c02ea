"""What looks like attention's own steps, or its axes, and is another thing is not told as one of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.trace import AttentionReport
from tests.corpus.base import Base
from tests.corpus.entry import D, E, H

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
    reports = shown(module())
    assert [stage.formula for report in reports for stage in report.stages if stage.name == "context"] == formulas
    assert {any("before dropout" in note for note in report.notes) for report in reports} == {dropped}


def test_scores_that_are_taken_off_something_have_the_other_sign() -> None:
    torch.manual_seed(0)
    module, x = Opposite().eval(), torch.randn(B, N, E)
    (attention,) = attentions(module, x)
    assert attention.found.scale == pytest.approx(-(D**-0.5))
    q, k = (attention.canonical(f"{s}_heads", f"batch heads {n} head_dim") for s, n in (("q", "query"), ("k", "key")))
    scores = q @ k.mT / math.sqrt(D)
    assert_close(attention.canonical("scores", "batch heads query key"), scores)
    assert_close(attention.canonical("weights", "batch heads query key"), (-scores).softmax(-1))
    (report,) = shown(module)
    formula = next(stage.formula for stage in report.stages if stage.name == "masked_scores")
    assert formula == "scores · -1 + …"


class RelativePlaces(Base):
    """Queries and keys of an image, whose scores are biased by row and column."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).unflatten(-1, (3, 4)).unflatten(-3, (3, 4))
        rows, columns = (torch.arange(n)[:, None] - torch.arange(n) for n in (3, 4))
        image = q.unflatten(2, (3, 4))
        table = self.q.weight[:8]
        by_row = torch.einsum("bhijd,ikd->bhijk", image, table[rows + 2][..., :D])
        by_column = torch.einsum("bhijd,jkd->bhijk", image, table[columns + 3][..., :D])
        scores = scores + by_row[..., None] + by_column[..., None, :]
        return scores.flatten(-2).flatten(-3, -2).softmax(-1) @ v


def test_keys_stay_other_axes_than_queries_where_both_are_split() -> None:
    (attention,) = attentions(RelativePlaces().eval(), torch.randn(B, 12, E))
    axes = attention.axes()
    assert axes["scores"] == "batch heads query_1 query_2 key_1 key_2"
    assert axes["weights"] == "batch heads query key"


def test_scores_that_are_normalised_along_both_axes_are_said_to_be() -> None:
    class Sinkhorn(Base):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2) / math.sqrt(D)
            scores = scores - scores.logsumexp(-1, keepdim=True)
            return (scores - scores.logsumexp(-2, keepdim=True)).exp() @ v

    (attention,) = attentions(Sinkhorn().eval(), torch.randn(B, N, E))
    assert attention.found.over_queries
    assert attention.found.scoring == (("log_softmax", None),)
    scores, masked, weights = (attention.value(stage) for stage in ("scores", "masked_scores", "weights"))
    torch.testing.assert_close(masked, scores.log_softmax(-1))
    torch.testing.assert_close(weights, masked.softmax(-2))


class FewerAsked(Base):
    """Padding bars some keys and all of the last query's, and of the queries the first few go on."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        barred = torch.zeros(N, N, dtype=torch.bool)
        barred[-1] = True
        weights = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(barred, -torch.finfo(q.dtype).max).softmax(-1)
        return weights.gather(2, torch.arange(5)[None, None, :, None].expand(len(q), H, 5, N)) @ v


def test_a_masked_query_that_does_not_go_on_has_no_row_in_what_does() -> None:
    with torch.no_grad():
        told = mha_inspect.trace(FewerAsked().eval(), torch.randn(B, N, E), keep=True)
    (attention,) = told.attentions
    assert {stage.name: stage.axes for stage in attention.stages}["context"] == "batch heads positions head_dim"
    assert attention.context.formula == "(weights, then gather) · v_heads"
    assert any(f"{B} queries have every key masked out" in note for note in told.notes)
