"""Two contents of a stage: cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from einops import rearrange

from mha_inspect.measure.content import compare_stage, stage_noise
from mha_inspect.record.rounding import distances


def test_distances_worked_by_hand():
    left = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    right = torch.tensor([[3.0, 4.0], [1.5, -2.0]])
    assert distances(left, right) == (2.0, pytest.approx(0.5))
    assert distances(left, left.clone()) == (0.0, 0.0)
    assert distances(torch.zeros(2), torch.ones(2)) == (1.0, math.inf)


def test_what_is_not_finite_is_equal_beside_itself_and_infinitely_far_from_the_rest():
    nan, inf = math.nan, math.inf
    assert distances(torch.tensor([nan, inf, -inf, 1.0]), torch.tensor([nan, inf, -inf, 1.0])) == (0.0, 0.0)
    assert distances(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.5])) == (0.5, 0.5)
    for unequal in (0.0, nan, -inf):
        assert distances(torch.tensor([inf, 1.0]), torch.tensor([unequal, 1.0]))[0] == inf


def exactly() -> float:
    return 0.0


def test_scores_of_other_head_counts_are_compared_by_their_mean():
    scores = torch.arange(2 * 3 * 5 * 7.0).view(2, 3, 5, 7)
    mean = scores.mean(dim=1, keepdim=True)
    same = compare_stage("scores", scores, mean, exactly)
    assert (same.verdict, same.compared) == ("same", "the mean over heads")
    differs = compare_stage("scores", scores, mean + 1, lambda: 0.01)
    assert differs.max_abs_difference == pytest.approx(1)
    assert (differs.verdict, differs.times_noise) == ("differs", pytest.approx(100))


def test_heads_of_another_width_are_compared_side_by_side():
    whole = torch.arange(2 * 5 * 12.0).view(2, 5, 12)
    two, three = (rearrange(whole, "b q (h d) -> b h q d", h=heads) for heads in (2, 3))
    comparison = compare_stage("context", two, three, exactly)
    assert (comparison.verdict, comparison.compared) == ("same", "the heads side by side")
    assert compare_stage("context", two, three.flip(1), exactly).verdict == "differs"


def test_what_cannot_be_subtracted_says_why():
    comparison = compare_stage("q_proj", torch.zeros(1, 2, 6), torch.zeros(1, 2, 12), exactly)
    assert (comparison.verdict, comparison.max_abs_difference) == ("differs", None)
    assert "[1, 2, 6] and [1, 2, 12]" in comparison.note
    comparison = compare_stage("context", torch.zeros(1, 2, 5, 6), torch.zeros(1, 3, 5, 6), exactly)
    assert comparison.max_abs_difference is None


def test_the_noise_floor_is_measured_only_where_it_is_needed():
    def never() -> float:
        raise AssertionError("measured for nothing")

    content = torch.randn(2, 3, 5)
    assert compare_stage("query", content, content.clone(), never).verdict == "same"
    with pytest.raises(AssertionError):
        compare_stage("query", content, content + 1, never)


@pytest.mark.parametrize("heads", [1, 2])
def test_blocked_positions_are_equal_whatever_number_blocks_them(heads):
    left = torch.tensor([[1.0, -math.inf], [2.0, -math.inf]]).expand(1, heads, 2, 2)
    for blocked in (-1e9, torch.finfo(torch.float32).min):
        right = torch.tensor([[1.0, blocked], [2.0, blocked]]).expand(1, 2, 2, 2)
        assert compare_stage("masked_scores", left, right, exactly).verdict == "same"
        assert compare_stage("masked_scores", left, right + 0.5, exactly).max_abs_difference == 0.5
        assert compare_stage("scores", left, right, exactly).verdict == "differs"


def test_the_noise_of_a_mean_is_that_of_the_mean():
    exact = torch.zeros(1, 2, 1, 1, dtype=torch.float64)
    content = torch.tensor([0.5, -0.25]).view(1, 2, 1, 1)
    assert stage_noise("scores", content, exact) == 0.5
    assert stage_noise("scores", content, exact, torch.zeros(1, 3, 1, 1)) == 0.125
