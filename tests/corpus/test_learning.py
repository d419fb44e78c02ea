"""What each head count learns: where it must be the same, and what cannot be compared."""

from __future__ import annotations

import pytest
import torch

from mha_inspect import compare_heads
from mha_inspect.errors import InputError, SpecError
from mha_inspect.record.rounding import same_bits

EMBED = 30
SIZES = {"embed_dim": EMBED, "batch": 3, "seq_len": 7}


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
