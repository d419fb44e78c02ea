"""What is done to the scores before the softmax: the formula on the page gives the numbers in the stage."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.naming.score_formulas import masked_text

BIAS = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))
BARRED = torch.ones(5, 5).triu(1).bool()


class Scored(nn.Module):
    """One head over `batch seq 6`, its scores made by a function of queries and keys."""

    def __init__(self, score: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.score = score

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.q(x), self.k(x)).softmax(-1) @ self.v(x)


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float, str, str]] = {
    "in the product": (
        lambda q, k: torch.baddbmm(BIAS, q, k.mT, alpha=0.25),
        0.25,
        "q_heads · k_headsᵀ / √16",
        "scores + bias",
    ),
    "in the product, times 0": (
        lambda q, k: torch.baddbmm(BIAS, q, k.mT, beta=0, alpha=0.25),
        0.25,
        "q_heads · k_headsᵀ / √16",
        "",
    ),
    "a mask that fills": (
        lambda q, k: (q @ k.mT / 2).masked_fill(BARRED, -1e9),
        0.5,
        "q_heads · k_headsᵀ / √4",
        "mask(scores)",
    ),
    "a mask that multiplies": (lambda q, k: q @ k.mT * BIAS, 1.0, "q_heads · k_headsᵀ", "scores · mask"),
    "a soft cap and a mask": (
        lambda q, k: 1.5 * torch.tanh(q @ k.mT / 2 / 1.5) + BIAS,
        0.5,
        "q_heads · k_headsᵀ / √4",
        "1.5 · tanh(scores / 1.5) + bias",
    ),
    "scaled twice": (
        lambda q, k: (q @ k.mT / 2 + BIAS) / 2,
        0.25,
        "q_heads · k_headsᵀ / √4",
        "(scores + bias) / √4",
    ),
    "bent": (lambda q, k: (q @ k.mT / 2).relu() * 3, 1.5, "q_heads · k_headsᵀ / √4", "3 · relu(scores)"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_formula_gives_the_stage(name: str) -> None:
    score, scale, scores, masked = CASES[name]
    x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        (attention,) = mha_inspect.trace(Scored(score).eval(), x, keep=True).attentions
    formulas = {stage.name: stage.formula for stage in attention.stages}
    assert (formulas.get("scores", ""), formulas.get("masked_scores", "")) == (scores, masked)
    assert attention.scale == pytest.approx(scale)
    tensors = {stage.name: stage.tensor for stage in attention.stages}
    if "mask(" not in masked and "twice" not in name:
        for stage in ("scores", "masked_scores"):
            if stage in formulas:
                torch.testing.assert_close(tensors[stage], evaluated(formulas[stage], tensors))


def evaluated(formula: str, tensors: dict[str, Tensor]) -> Tensor:
    """What a formula gives, read as one would on paper."""
    text = formula.replace("q_heads · k_headsᵀ", "(q_heads @ k_heads.mT)").replace("·", "*")
    text = re.sub(r"√(\d+)", r"(\1 ** 0.5)", text)
    names = {**tensors, "mask": BIAS, "bias": BIAS, "tanh": torch.tanh, "relu": torch.relu}
    result: Tensor = eval(text, names)
    return result


def test_what_comes_in_another_order() -> None:
    assert masked_text("scores", [("add", None), ("scale", 0.125), ("fill", None)]) == "mask((scores + mask) / √64)"
    assert masked_text("scores", [("mixed", None), ("add", None)]) == "mix(scores) + mask"
    assert masked_text("scores", [("relu", None), ("scale", None)]) == "relu(scores) · scale"
