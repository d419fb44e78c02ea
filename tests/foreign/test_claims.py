"""No more is claimed of a module than what it does."""

from __future__ import annotations

import pytest
import torch

from mha_inspect import trace
from mha_inspect.reports.trace import Attention

from . import claims


def attention(kind: type[torch.nn.Module], length: int = 7) -> Attention:
    torch.manual_seed(0)
    (found,) = trace(kind(), torch.randn(2, length, claims.WIDTH)).attentions
    return found


def axes(found: Attention, stage: str) -> str:
    return next(one.axes for one in found.stages if one.name == stage)


@pytest.mark.parametrize("kind", claims.NO_ATTENTION)
def test_softmaxes_that_assign_are_no_attention(kind: type[torch.nn.Module]) -> None:
    assert not trace(kind(), torch.randn(2, 7, claims.WIDTH)).attentions


@pytest.mark.parametrize(
    ("kind", "scores"), [(claims.OverQueries, "batch heads query key"), (claims.Slots, "batch key query")]
)
def test_a_softmax_over_the_queries_is_called_so(kind: type[torch.nn.Module], scores: str) -> None:
    found = attention(kind)
    assert axes(found, "scores") == scores
    assert axes(found, "context").split()[-2:] == ["query", "head_dim"]
    assert "softmax over the queries(scores)" in [stage.formula for stage in found.stages]
    assert any("add up to 1" in note for note in found.notes)


def test_query_and_key_of_one_input_are_self_attention() -> None:
    for kind in (claims.Normed, claims.FewerKeys):
        assert attention(kind).kind == ("self",)


def test_the_scale_is_what_is_applied_after_a_norm() -> None:
    assert attention(claims.NormedHeads).scale == pytest.approx(claims.HEAD_DIM**-0.5)


def test_weights_that_are_normed_by_head_are_followed() -> None:
    assert attention(claims.NormedWeights).num_heads == claims.HEADS


def test_causal_is_told_where_heads_are_folded_into_the_queries() -> None:
    assert attention(claims.OneKeyHead).kind == ("self", "causal", "grouped")


def test_a_band_of_windows_is_not_causal() -> None:
    assert attention(claims.Near, 16).kind == ("self",)
