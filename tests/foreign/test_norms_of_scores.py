"""A norm between the scores and the softmax: the scores are before it, the masked scores after it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from .truth import assert_close, assert_true, attentions

BATCH, LENGTH, HEADS, HEAD_DIM = 5, 11, 3, 4
WIDTH = HEADS * HEAD_DIM


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = norm

    def normed(self, scores: Tensor) -> Tensor:
        return self.norm(scores)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (self.q, self.k, self.v))
        context = self.normed(q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v
        return self.o(context.transpose(1, 2).flatten(2))


class OverHeads(Normed):
    def normed(self, scores: Tensor) -> Tensor:
        return self.norm(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ThenMasked(Normed):
    def normed(self, scores: Tensor) -> Tensor:
        return self.norm(scores) + torch.full((LENGTH, LENGTH), -torch.inf).triu(1)


NORMS = {
    "batch": lambda: Normed(nn.BatchNorm2d(HEADS)),
    "batch, in train": lambda: Normed(nn.BatchNorm2d(HEADS, track_running_stats=False)),
    "layer": lambda: Normed(nn.LayerNorm(LENGTH)),
    "layer, of two": lambda: Normed(nn.LayerNorm((LENGTH, LENGTH))),
    "group": lambda: Normed(nn.GroupNorm(HEADS, HEADS)),
    "instance": lambda: Normed(nn.InstanceNorm2d(HEADS)),
    "over heads": lambda: OverHeads(nn.LayerNorm(HEADS)),
    "masked": lambda: ThenMasked(nn.BatchNorm2d(HEADS)),
}


@pytest.mark.parametrize("name", NORMS)
def test_scores_may_be_normed(name: str) -> None:
    torch.manual_seed(0)
    module, x = NORMS[name]().eval(), torch.randn(BATCH, LENGTH, WIDTH)
    if isinstance(module.norm, nn.BatchNorm2d):
        module.norm.weight.data = torch.rand(HEADS) + 0.5
    (attention,) = attentions(module, x)
    assert_true(attention)
    assert attention.axes()["masked_scores"] == "batch heads query key"
    with torch.no_grad():
        q, k = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (module.q, module.k))
        scores = q @ k.mT / math.sqrt(HEAD_DIM)
        normed = module.normed(scores)
    assert_close(attention.value("scores").double(), scores.double())
    assert_close(attention.value("masked_scores").double(), normed.double())
    assert_close(attention.value("weights").double(), normed.double().softmax(-1))
    assert attention.found.scores_scale == pytest.approx(HEAD_DIM**-0.5)
    (shown,) = mha_inspect.trace(module, x).attentions
    assert math.isnan(shown.scale)
    formulas = {stage.name: stage.formula for stage in shown.stages}
    assert "_norm(scores)" in formulas["masked_scores"]
