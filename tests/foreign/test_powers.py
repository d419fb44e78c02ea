"""Weights that are multiplied by themselves before the values: attention of two or three steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from .truth import assert_close, assert_true, attentions

BATCH, LENGTH, HEADS, HEAD_DIM = 5, 11, 3, 4
WIDTH = HEADS * HEAD_DIM

POWERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "once": (lambda weights: weights, 1),
    "twice": (lambda weights: weights @ weights, 2),
    "twice by bmm": (lambda weights: torch.bmm(*[weights.flatten(0, 1)] * 2).unflatten(0, (BATCH, HEADS)), 2),
    "thrice": (lambda weights: weights @ weights @ weights, 3),
    "by matrix_power": (lambda weights: torch.matrix_power(weights, 4), 4),
}


class Powers(nn.Module):
    def __init__(self, raised: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.raised = raised

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (self.q, self.k, self.v))
        weights = (q @ k.mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((self.raised(weights) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", POWERS)
def test_weights_may_be_multiplied_by_themselves(name: str) -> None:
    torch.manual_seed(0)
    raised, power = POWERS[name]
    module, x = Powers(raised).eval(), torch.randn(BATCH, LENGTH, WIDTH)
    (attention,) = attentions(module, x)
    assert_true(attention, dropped=True)
    axes = "batch heads query {}"
    weights, values = (
        attention.canonical("weights", axes.format("key")),
        attention.canonical("v_heads", "batch heads key head_dim"),
    )
    context = torch.linalg.matrix_power(weights, power) @ values
    assert_close(attention.canonical("context", axes.format("head_dim")), context)
    (shown,) = mha_inspect.trace(module, x).attentions
    formula = {stage.name: stage.formula for stage in shown.stages}["context"]
    times = " · ".join(["weights"] * power)
    assert formula == (f"({times}) · v_heads" if power > 1 else "weights · v_heads")
    assert not mha_inspect.check(module, x).findings
