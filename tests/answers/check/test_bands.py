"""The words for a mask that is the same around every query."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mha_inspect

from ...corpus.planted import E, Right, before

LENGTH = 12
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
"""The distances at which a query sees keys: positive ones are before it."""


@pytest.mark.parametrize("words", WORDS)
def test_a_band_is_named_by_its_distances(words: str) -> None:
    def mask(_: Right, scores: Tensor) -> Tensor:
        return scores.masked_fill(~torch.isin(before(scores), torch.tensor(WORDS[words])), -torch.inf)

    facts = mha_inspect.check(Right(mask=mask).eval(), torch.randn(2, LENGTH, E), only="softmax").facts
    assert [fact.sentence for fact in facts if fact.name == "who sees whom"] == [words]
