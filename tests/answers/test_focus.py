"""What heads look at, against closed forms and cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from mha_inspect import compare_heads
from mha_inspect.answers.focus import entropy_of, focus_of

LN2 = math.log(2)


def test_equal_weights_look_at_every_key():
    (head,) = focus_of(torch.full((2, 1, 3, 5), 0.2, dtype=torch.float64)).by_head
    assert head.entropy == pytest.approx(math.log(5))
    assert head.effective_keys == pytest.approx(5)
    # Queries 0, 1, 2 are 0+1+2+3+4, 1+0+1+2+3 and 2+1+0+1+2 positions from the five keys.
    assert head.distance == pytest.approx((10 + 7 + 6) / 5 / 3)


def test_one_key_is_no_choice():
    weights = torch.zeros(1, 1, 4, 4)
    weights[..., 1] = 1
    (head,) = focus_of(weights).by_head
    assert (head.entropy, head.effective_keys) == (0.0, 1.0)
    assert head.distance == pytest.approx((1 + 0 + 1 + 2) / 4)


def test_entropy_of_a_case_worked_by_hand():
    weights = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    assert entropy_of(weights).item() == pytest.approx(1.5 * LN2)


def test_divergence_of_cases_worked_by_hand():
    same = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, 3, 2, 4)
    assert focus_of(same).divergence == 0.0
    apart = torch.eye(3).view(1, 3, 1, 3)
    found = focus_of(apart)
    assert found.divergence == pytest.approx(math.log(3))
    assert found.largest_divergence == pytest.approx(math.log(3))
    # P = (1, 0), Q = (1/2, 1/2): the mean (3/4, 1/4) has entropy 2 ln 2 - 3/4 ln 3, and the heads 0 and ln 2.
    half = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64).view(1, 2, 1, 2)
    assert focus_of(half).divergence == pytest.approx(2 * LN2 - 0.75 * math.log(3) - LN2 / 2)


def test_one_head_differs_from_nothing():
    assert focus_of(torch.rand(1, 1, 3, 4).softmax(-1)).divergence == 0.0


def test_queries_without_a_key_are_left_out():
    weights = torch.full((1, 2, 2, 4), 0.25)
    weights[0, 1, 0] = math.nan
    found = focus_of(weights)
    assert [head.effective_keys for head in found.by_head] == [pytest.approx(4), pytest.approx(4)]
    assert math.isnan(focus_of(torch.full((1, 2, 2, 4), math.nan)).by_head[0].entropy)


def test_keys_that_the_layer_appends_have_no_position():
    weights = torch.tensor([0.0, 0.5, 0.5]).view(1, 1, 1, 3)
    (head,) = focus_of(weights, key_len=2).by_head
    assert head.distance == pytest.approx(1)
    assert head.effective_keys == pytest.approx(2)


def test_one_key_is_spoken_of_as_one():
    report = compare_heads((1, 3), embed_dim=30, seq_len=7, key_len=1, focus=True)
    assert report.focus.answer.startswith("With 3 heads, each effectively attends to 1 key. ")
    assert report.focus.answer.endswith(" With 1 head: 1 key.")


def test_the_strongest_pairs_of_a_case_worked_by_hand():
    """Query 0 of both sequences sees one key alone, and has no choice to tell of."""
    first = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.8, 0.0], [0.3, 0.3, 0.4]])
    second = torch.tensor([[1.0, 0.0, 0.0], [0.4, 0.6, 0.0], [0.9, 0.0, 0.1]])
    (head,) = focus_of(torch.stack([first, second])[:, None]).by_head
    assert [(one.query, one.key, pytest.approx(one.weight)) for one in head.strongest] == [
        (1, 1, 0.7),
        (2, 0, 0.6),
        (1, 0, 0.3),
    ]


def test_how_alike_two_heads_are():
    """Heads 0 and 2 are the same; between (1, 0) and (1/2, 1/2) lies what the case worked by hand above says."""
    weights = torch.tensor([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64).view(1, 3, 1, 2)
    found = focus_of(weights)
    assert (found.most_alike.left, found.most_alike.right, found.most_alike.divergence) == (0, 2, 0.0)
    assert (found.least_alike.left, found.least_alike.right) == (1, 2)
    assert found.least_alike.divergence == pytest.approx(2 * LN2 - 0.75 * math.log(3) - LN2 / 2)
    assert focus_of(torch.rand(1, 1, 3, 4).softmax(-1)).most_alike is None


def test_what_is_learned_to_look_at_is_that_of_the_trained_weights():
    from torch import nn

    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))

    def made(heads: int) -> nn.Module:
        torch.manual_seed(1)
        return nn.MultiheadAttention(6, heads, batch_first=True).eval()

    report = compare_heads((1, 3), made, x, x, x, steps=4, focus=True)
    assert (report.focus.weights, report.focus_after.weights) == ("as given", "after 4 steps")
    assert compare_heads((1, 3), made, x, x, x, focus=True).focus == report.focus
    module = made(3)
    target = torch.randn(x.shape, generator=torch.Generator("cpu").manual_seed(0x746172676574))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (module(x, x, x)[0] - target).square().mean().backward()
        optimizer.step()
    weights = module(x, x, x, average_attn_weights=False)[1].detach().double()
    entropy = -(weights * weights.log()).sum(-1).mean(dim=(0, 2))
    after, before = (focus.counts[1].by_head for focus in (report.focus_after, report.focus))
    assert [head.entropy for head in after] == pytest.approx(entropy.tolist(), rel=1e-5)
    assert [head.entropy for head in before] != pytest.approx(entropy.tolist(), rel=1e-3)
