"""Gradients and training of each head count, against autograd, finite differences in float64 and steps done by hand."""

from __future__ import annotations

import pytest
import torch

from mha_inspect import compare_heads
from mha_inspect.answers.compare_heads import HeadRun
from mha_inspect.answers.learning import LEARNING_RATE, Learner, train
from mha_inspect.errors import InputError, SpecError
from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.spec import InputSpec, RunSpec
from mha_inspect.record.rounding import same_bits

from ..built import built_layer

EMBED = 30
SIZES = {"embed_dim": EMBED, "batch": 3, "seq_len": 7}


def forward_of(heads: int, layer: str = "torch", dtype: str = "float32", **inputs):
    spec = LAYERS[layer].spec(embed_dim=EMBED, num_heads=heads, dtype=dtype)
    return built_layer(spec, InputSpec(**{"batch": 3, "seq_len": 7, **inputs}), RunSpec(), layer)


def learner_of(forward) -> Learner:
    return Learner.of(forward.spec.num_heads, HeadRun(forward.spec.num_heads, forward))


def first_step(forward):
    return train(learner_of(forward), 1, lambda words: None)


def gradient_of(forward) -> dict[str, torch.Tensor]:
    """What the first step takes from the weights, by its learning rate."""
    step = first_step(forward)
    return {part: (step.before[part] - after) / LEARNING_RATE for part, after in step.parts.items()}


def loss_of(forward) -> float:
    return first_step(forward).loss


@pytest.mark.parametrize("part", ["W_k", "W_o", "b_v"])
def test_the_gradient_is_the_slope_of_the_loss(part):
    forward = forward_of(5, dtype="float64")
    gradient = gradient_of(forward)[part].flatten()
    names = ["W_q", "W_k", "W_v"] if part.startswith("W") else ["b_q", "b_k", "b_v"]
    module = forward.module
    if part in names:
        place = names.index(part) * EMBED
        whole = module.in_proj_weight if part.startswith("W") else module.in_proj_bias
        weights = whole.detach()[place : place + EMBED].view(-1)
    else:
        weights = (module.out_proj.weight if part == "W_o" else module.out_proj.bias).detach().view(-1)
    for element in (0, 17, weights.numel() - 1):
        start, losses = weights[element].item(), []
        for step in (1e-5, -1e-5):
            weights[element] = start + step
            losses.append(loss_of(forward))
        weights[element] = start
        assert gradient[element].item() == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-5, abs=1e-10)


def test_with_one_key_what_is_learned_is_the_same():
    report = compare_heads((1, 2, 5), **{**SIZES, "seq_len": 1}, steps=3)
    for row in report.training.counts:
        assert {part.verdict for part in row.parts} == {"same"}
        # Nothing that goes into a softmax over one key has a slope.
        moved = {part.part: part.moved for part in row.parts}
        assert {moved[part] for part in ("W_q", "W_k", "b_q", "b_k")} == {0.0}
        assert min(moved["W_v"], moved["W_o"]) > 0
    assert {row.verdict for row in report.training.counts} == {"same"}
    assert min(row.moved for row in report.training.counts) > 0
    assert "the weights are the same for every head count" in report.training.answer


@pytest.mark.parametrize(("layer", "compared"), [("wide", {"b_o"}), ("narrow", {"W_o", "b_o"})])
def test_what_has_another_shape_is_not_compared(layer, compared):
    report = compare_heads((2, 3), **SIZES, layer=layer, steps=2)
    parts = {part.part: part for part in report.training.counts[1].parts}
    assert compared <= {name for name, part in parts.items() if part.verdict is not None}
    assert parts["W_q"].verdict is None
    assert report.training.counts[1].apart is None
    assert report.training.counts[1].verdict is None
    assert report.training.answer.startswith("The head count changes the parameters, so weights cannot start the same")


def test_what_cannot_be_learned_is_refused():
    with pytest.raises(InputError, match="would be NaN: 210 of 630 numbers of the output of torch are NaN"):
        compare_heads((1, 2), **SIZES, padding=(7, 0, 0), steps=2)
    with pytest.raises(SpecError, match="steps -1"):
        compare_heads((1, 2), **SIZES, steps=-1)


def test_bits_are_compared_one_by_one():
    zero, minus, nan = torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([float("nan"), 1.0])
    assert same_bits(zero, zero.clone())
    assert not same_bits(zero, minus)
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, nan.double())
