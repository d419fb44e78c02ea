"""Weights are called a softmax only where they are one, and what is done to them is told: measured, not matched."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import trace

B, N, H, D = 2, 9, 4, 8
WIDTH = H * D


def divided(numbers: Tensor) -> Tensor:
    return numbers / numbers.sum(-1, keepdim=True)


def below(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:]).tril()


def distance(scores: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    return (places[:, None] - places).abs()


class Weighed(nn.Module):
    """Attention with any weights of scores, `batch heads query key`, which are scaled by 1/√head_dim."""

    def __init__(self, weights: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.weights = weights

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, D)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        weights = self.weights(q @ k.mT / math.sqrt(D))
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def formulas(module: nn.Module) -> dict[str, str]:
    torch.manual_seed(0)
    (attention,) = trace(module.eval(), torch.randn(B, N, WIDTH)).attentions
    assert attention.scale is not None
    return {stage.name: stage.formula for stage in attention.stages}


NONE = {
    "a Taylor series": lambda a: divided(1 + a + a * a / 2),
    "a power": lambda a: divided((1 + a / 16) ** 16),
}


@pytest.mark.parametrize("name", NONE)
def test_what_is_linear_for_small_scores_only_is_no_softmax(name: str) -> None:
    torch.manual_seed(0)
    report = trace(Weighed(NONE[name]).eval(), torch.randn(B, N, WIDTH))
    for attention in report.attentions:
        told = {stage.name: stage.formula for stage in attention.stages}
        assert "softmax" not in told["weights"]


ONE = {
    "guarded and masked": (
        lambda a: (a.exp() * below(a)) / ((a.exp() * below(a)).sum(-1, keepdim=True) + 1e-6),
        "softmax(mask(scores))",
    ),
    "decayed and masked": (lambda a: divided(a.exp() * below(a) * 0.8 ** distance(a)), "softmax(mask(scores + bias))"),
}


@pytest.mark.parametrize("name", ONE)
def test_factors_of_exponentials_are_masks_and_biases_of_scores(name: str) -> None:
    weights, formula = ONE[name]
    module = Weighed(weights)
    texts = formulas(module)
    assert (texts["weights"], texts["context"]) == (formula, "weights · v_heads")
    # The formula with the numbers of this test, against the weights of the run.
    torch.manual_seed(0)
    x = torch.randn(B, N, WIDTH)
    (attention,) = trace(module, x, keep=True).attentions
    stages = {stage.name: stage.tensor for stage in attention.stages}
    scores = stages["scores"].double()
    if "bias" in formula:
        scores = scores + math.log(0.8) * distance(scores)
    if "mask" in formula:
        scores = scores.masked_fill(below(scores) == 0, -math.inf)
    assert torch.allclose(scores.softmax(-1), stages["weights"].double(), atol=1e-5)


SCALED = {
    "a mean over heads": (lambda a: a.mean(1, keepdim=True).softmax(-1), "mean(scores)"),
    "the largest": (lambda a: a.topk(N, -1).values.softmax(-1), "topk(scores)"),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_before_scores_are_mixed_is_no_part_of_that(name: str) -> None:
    weights, formula = SCALED[name]
    texts = formulas(Weighed(weights))
    assert texts["scores"] == "q_heads · k_headsᵀ / √8"
    assert texts["masked_scores"] == formula


def test_scores_that_are_added_to_their_own_transpose_have_no_mask() -> None:
    torch.manual_seed(0)
    report = trace(Weighed(lambda a: ((a + a.mT) / 2).softmax(-1)).eval(), torch.randn(B, N, WIDTH))
    (attention,) = report.attentions
    told = {stage.name: stage.formula for stage in attention.stages}
    assert told["masked_scores"] == "(scores + …) / √4"
    assert not report.findings
