"""The words for a mask that is the same around every query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.running.subject import Subject

LENGTH = 12


class Banded(nn.Module):
    """Attention in which a query sees the keys at some distances: positive ones are before it."""

    def __init__(self, seen: list[int]) -> None:
        super().__init__()
        self.seen, self.qkv, self.out = seen, nn.Linear(20, 60), nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (5, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        places = torch.arange(x.shape[1])
        mask = torch.isin(places[:, None] - places, torch.tensor(self.seen))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


WORDS = {
    "each query sees itself, 5 before and 3 after": [*range(-3, 6)],
    "each query sees itself, all before and 3 after": [*range(-3, LENGTH)],
    "each query sees itself, 2 before and all after": [*range(-LENGTH, 3)],
    "each query sees 3 positions to each side": [*range(-3, 4)],
    "the keys 1–4 after a query are masked out, and none before": [*range(-LENGTH, -4), *range(LENGTH)],
    "the keys 2–3 before a query are masked out, and none after": [*range(-LENGTH, 2), *range(4, LENGTH)],
    "the keys 2–4 before and 1–3 after a query are masked out": [*range(-LENGTH, -3), 0, 1, *range(5, LENGTH)],
    "the key 2 after a query is masked out": [*range(-LENGTH, -2), *range(-1, LENGTH)],
    "a custom pattern": [*range(-LENGTH, LENGTH, 3), 0, 1],
    "causal": [*range(LENGTH)],
    "causal, a window of 4": [*range(4)],
}


@pytest.mark.parametrize("words", WORDS)
def test_a_band_is_named_by_its_distances(words: str) -> None:
    subject = Subject(Banded(WORDS[words]).eval(), (torch.randn(2, LENGTH, 20),), {})
    facts = check(subject, Intent(), only="softmax").facts
    assert [fact.sentence for fact in facts if fact.name == "who sees whom"] == [words]
