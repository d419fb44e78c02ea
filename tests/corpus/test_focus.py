"""What heads look at, against closed forms and cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mha_inspect.questions.focus import focus_of


def test_equal_weights_look_at_every_key():
    (head,) = focus_of(torch.full((2, 1, 3, 5), 0.2, dtype=torch.float64)).by_head
    assert head.effective_keys == pytest.approx(5)
    # Queries 0, 1, 2 are 0+1+2+3+4, 1+0+1+2+3 and 2+1+0+1+2 positions from the five keys.
    assert head.distance == pytest.approx((10 + 7 + 6) / 5 / 3)


def test_queries_without_a_key_are_left_out():
    weights = torch.full((1, 2, 2, 4), 0.25)
    weights[0, 1, 0] = math.nan
    focus = focus_of(weights)
    assert [head.effective_keys for head in focus.by_head] == [pytest.approx(4), pytest.approx(4)]
    nothing = focus_of(torch.full((1, 2, 2, 4), math.nan)).by_head[0]
    assert math.isnan(nothing.effective_keys)
    assert math.isnan(nothing.share)


def test_keys_that_the_layer_appends_have_no_position():
    weights = torch.tensor([0.0, 0.5, 0.5]).view(1, 1, 1, 3)
    (head,) = focus_of(weights, key_len=2).by_head
    assert head.distance == pytest.approx(1)
    assert head.effective_keys == pytest.approx(2)


def test_the_key_with_the_largest_share_of_a_case_worked_by_hand():
    """Both sequences and all queries count the same: key 0 has 3.8 of 6, key 1 has 1.7, key 2 has 0.5."""
    first = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.8, 0.0], [0.3, 0.3, 0.4]])
    second = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.9, 0.0, 0.1]])
    (head,) = focus_of(torch.stack([first, second])[:, None]).by_head
    assert (head.most_attended_key, head.share) == (0, pytest.approx(3.8 / 6))
