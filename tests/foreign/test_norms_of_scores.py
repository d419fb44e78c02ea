"""A norm between the scores and the softmax: the scores are before it, the masked scores after it."""

from __future__ import annotations

import math
from collections.abc import Callable

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


NORMS = {
    "batch": lambda: Normed(nn.BatchNorm2d(HEADS)),
    "layer, of two": lambda: Normed(nn.LayerNorm((LENGTH, LENGTH))),
    "group": lambda: Normed(nn.GroupNorm(HEADS, HEADS)),
    "over heads": lambda: OverHeads(nn.LayerNorm(HEADS)),
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


def standardised(scores: Tensor) -> Tensor:
    return (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, keepdim=True)


def by_variance(scores: Tensor) -> Tensor:
    centred = scores - scores.mean((-2, -1), keepdim=True)
    return centred * torch.rsqrt(scores.var((-2, -1), keepdim=True) + 1e-5)


def by_root(scores: Tensor) -> Tensor:
    var, mean = torch.var_mean(scores, -1, keepdim=True)
    return (scores - mean) / (var + 1e-5).sqrt()


def by_squares(scores: Tensor) -> Tensor:
    return scores * torch.rsqrt(scores.pow(2).mean(-1, keepdim=True) + 1e-6)


def by_length(scores: Tensor) -> Tensor:
    return torch.nn.functional.normalize(scores, dim=-1)


def by_largest(scores: Tensor) -> Tensor:
    return scores / scores.abs().amax(-1, keepdim=True)


def in_place(scores: Tensor) -> Tensor:
    mean, std = scores.mean(-1, keepdim=True), scores.std(-1, keepdim=True)
    return scores.sub_(mean).div_(std)


def between_extremes(scores: Tensor) -> Tensor:
    low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
    return (scores - low) / (high - low)


def then_scaled(scores: Tensor) -> Tensor:
    return 3 * standardised(scores)


def then_masked(scores: Tensor) -> Tensor:
    return standardised(scores) + torch.full((LENGTH, LENGTH), -torch.inf).triu(1)


BY_HAND = {
    by_variance: "(scores - mean) / std",
    by_root: "(scores - mean) / std",
    by_squares: "scores / rms",
    by_length: "scores / norm",
    by_largest: "scores / max",
    in_place: "(scores - mean) / std",
    between_extremes: "(scores - min) / …",
    then_scaled: "3 · ((scores - mean) / std)",
    then_masked: "(scores - mean) / std + mask",
}


class ByHand(Normed):
    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.Identity())
        self.normed = norm


@pytest.mark.parametrize("norm", BY_HAND, ids=lambda norm: norm.__name__)
def test_scores_may_be_normed_in_several_operations(norm: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, x = ByHand(norm).eval(), torch.randn(BATCH, LENGTH, WIDTH)
    (attention,) = attentions(module, x)
    assert_true(attention)
    with torch.no_grad():
        q, k = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (module.q, module.k))
        scores = q @ k.mT / math.sqrt(HEAD_DIM)
        assert_close(attention.value("masked_scores").double(), norm(scores.clone()).double())
    assert attention.found.scores_scale == pytest.approx(HEAD_DIM**-0.5)
    assert len(attention.found.masks) == ("mask" in BY_HAND[norm])
    (shown,) = mha_inspect.trace(module, x).attentions
    assert math.isnan(shown.scale)
    assert {stage.name: stage.formula for stage in shown.stages}["masked_scores"] == BY_HAND[norm]


def test_centred_scores_keep_their_scale() -> None:
    torch.manual_seed(0)
    module = ByHand(lambda scores: scores - scores.mean(-1, keepdim=True)).eval()
    (shown,) = mha_inspect.trace(module, torch.randn(BATCH, LENGTH, WIDTH)).attentions
    assert shown.scale == pytest.approx(HEAD_DIM**-0.5)
    assert {stage.name: stage.formula for stage in shown.stages}["masked_scores"] == "scores - mean"
