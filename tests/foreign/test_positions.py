"""Sequences that are not one query, or one key, a position: cut, padded, pooled, asked apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import mha_inspect
from tests.corpus.base import Base
from tests.corpus.entry import D, E, H

from .truth import attentions

B, N = 2, 13


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
