"""How long each head count takes: the operations by hand, the times in an order that a sleep decides."""

from __future__ import annotations

import torch
from torch import nn

from mha_inspect import compare_heads
from mha_inspect.questions.learning import few_threads
from mha_inspect.running.subject import Subject

from .head_counts import Slow


def test_the_head_count_that_sleeps_takes_longest_and_products_are_counted_by_hand():
    report = compare_heads((1, 3), Slow, torch.randn(2, 5, 6), time=True)
    single, triple = report.timing.counts
    # Rows, features in and out, a multiply-add counted as two; every pair of 5 queries and keys in all 6 features.
    projection, product = 2 * 2 * 5 * 6 * 6, 2 * 2 * 5 * 5 * 6
    expected = {"q_proj": projection, "k_proj": projection, "v_proj": projection, "scores": product, "context": product}
    for count in (single, triple):
        assert {row.stage: row.flops for row in count.flops} == expected
        assert count.low_ms <= count.median_ms <= count.high_ms
    assert triple.low_ms > 40
    assert report.timing.answer.startswith("Every head count needs the same number of operations. 3 heads took ")


def test_without_being_asked_nothing_is_timed():
    """What is another in every run would make two reports of one seed differ."""
    first, second = (compare_heads((1, 3), embed_dim=6, seq_len=4).to_dict() for _ in range(2))
    assert first == second
    assert "timing" not in first


def test_small_steps_take_one_thread_and_large_ones_those_that_there_are():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        small, large = Subject(nn.Linear(8, 8), (torch.zeros(4, 8),), {}), nn.Linear(512, 512)
        with few_threads(small):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with few_threads(Subject(large, (torch.zeros(8, 512, 512),), {})):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
