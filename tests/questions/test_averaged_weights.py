"""A returned mean of the weights over the heads is told from the stage, by its numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.trace import Trace

from ..corpus.planted import D, E, H, N, Right


def traced(module: nn.Module, *given: Tensor, **settings: bool) -> Trace:
    return mha_inspect.trace(module.eval(), *given, **settings)


def means(trace: Trace) -> list[int | None]:
    return [returned.mean_of_heads for returned in trace.returns[1:]]


@pytest.mark.parametrize("shape", [(2, N, E), (1, N, E), (N, E)])
def test_torchs_layer_averages_its_weights(shape: tuple[int, ...]) -> None:
    x, layer = torch.randn(shape), nn.MultiheadAttention(E, H, batch_first=True)
    trace = traced(layer, x, x, x)
    assert means(trace) == [H]
    assert f"weights {[*shape[:-1], N]}, the mean of {H} heads" in str(trace)
    assert "average_attn_weights=False" in " ".join(trace.notes)
    by_head = traced(layer, x, x, x, average_attn_weights=False)
    assert means(by_head) == [None]
    assert "average_attn_weights=False returns" not in " ".join(by_head.notes)
    assert means(traced(layer, x, x, x, need_weights=False)) == []


class Returning(Right):
    """Returns a number of each query and key beside its output."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.heads(x)
        weights = (q @ k.mT / D**0.5).softmax(-1)
        reduced = {"mean": weights.mean(1), "first": weights[:, 0], "sum": weights.sum(1), "most": weights.amax(1)}
        return self.o(self.join(weights @ v)), reduced[self.kind]


@pytest.mark.parametrize("kind", ["mean", "first", "sum", "most"])
def test_a_mean_is_measured(kind: str) -> None:
    trace = traced(Returning(kind), torch.randn(2, N, E))
    assert means(trace) == [H if kind == "mean" else None]
    assert "average_attn_weights" not in str(trace)
