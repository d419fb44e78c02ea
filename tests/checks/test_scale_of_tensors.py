"""A scale that is a tensor of equal numbers, and a module that drops in eval: neither is named wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.trace import Trace

from ..corpus.planted import D, E, N, Right

SCALE = D**-0.5
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "full_like": lambda scores: scores * torch.full_like(scores, SCALE),
    "of each key": lambda scores: scores * torch.full((scores.shape[-1],), SCALE),
    "of each head": lambda scores: scores * torch.full((scores.shape[1], 1, 1), SCALE),
    "divided": lambda scores: scores / torch.full_like(scores, 1 / SCALE),
    "computed": lambda scores: scores * (torch.ones_like(scores) * SCALE),
}


def traced(module: nn.Module) -> Trace:
    torch.manual_seed(0)
    return mha_inspect.trace(module.eval(), torch.randn(2, N, E))


@pytest.mark.parametrize("kind", FACTORS)
def test_equal_numbers_are_a_scale(kind: str) -> None:
    def attend(_: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return FACTORS[kind](q @ k.mT).softmax(-1) @ v

    trace = traced(Right(attend=attend))
    assert trace.findings == ()
    assert trace.attentions[0].scale == pytest.approx(SCALE)
    assert "masked_scores" not in {stage.name for stage in trace.attentions[0].stages}


@pytest.mark.parametrize(("factor", "accused"), [(SCALE, False), (1.0, True)])
def test_queries_that_are_multiplied_are_scaled(factor: float, accused: bool) -> None:
    def attend(_: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q * torch.full_like(q, factor)) @ k.mT).softmax(-1) @ v

    assert bool(traced(Right(attend=attend)).findings) == accused


class Dropping(Right):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT * SCALE).softmax(-1)
        weights = F.dropout(weights, 0.5)  # here
        return weights @ v


def test_the_line_of_a_dropout_is_its_own() -> None:
    (finding,) = traced(Dropping()).findings
    number = int(finding.source.rpartition(":")[2])
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert lines[number - 1].endswith("# here")
