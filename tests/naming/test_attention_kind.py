"""The kind of an attention: self or cross, causal, grouped, each from evidence and never from a name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from ..built import trace_module

LOW = float("-inf")


class Masked(nn.Module):
    """One head over `batch seq 6`, its scores handed to a function that masks them."""

    def __init__(self, mask: Callable[[Tensor], Tensor], key_first: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.mask, self.key_first = mask, key_first
        self.register_buffer("seen", torch.ones(11, 11).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.key_first:
            weights: Tensor = self.mask((k @ q.mT).mT).mT.softmax(-2)
            return weights.mT @ v
        return self.mask(q @ k.mT).softmax(-1) @ v


def tril(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


def by_positions(scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1])
    return torch.where(place[None, :] <= place[:, None], scores, torch.finfo(scores.dtype).min)


OUTSIDE = torch.ones(11, 11).triu(1).bool()


def held_outside(scores: Tensor) -> Tensor:
    return scores.masked_fill(OUTSIDE[: scores.shape[-2], : scores.shape[-1]], LOW)


def padded(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.arange(scores.shape[-1]) > 2, LOW)


def window(scores: Tensor) -> Tensor:
    place = torch.arange(scores.shape[-1])
    return scores.masked_fill((place[None, :] - place[:, None]).abs() > 1, LOW)


def behind(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(scores.shape[-2:]).tril(-1).bool(), LOW)


CAUSAL = {
    "masked_fill": lambda s: s.masked_fill(~tril(s), LOW),
    "where": lambda s: torch.where(tril(s), s, torch.tensor(-1e9)),
    "added, as low as BERT's masks": lambda s: s + torch.zeros_like(s).masked_fill(~tril(s), -1e4),
    "from positions": by_positions,
    "held outside": held_outside,
    "and padded": lambda s: padded(s.masked_fill(~tril(s), LOW)),
}
OTHER = {
    "nothing": lambda s: s,
    "padding": padded,
    "a window": window,
    "the past": behind,
    "everything": lambda s: s.masked_fill(torch.ones(s.shape[-2:]).bool(), LOW),
    "a small bias": lambda s: s + torch.ones(s.shape[-2:]).triu(1) * -3.0,
}


def kinds(module: nn.Module, *args: Tensor, **kwargs: object) -> list[tuple[str, ...]]:
    with torch.no_grad():
        return [attention.kind for attention in trace_module(module.eval(), *args, **kwargs).attentions]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_mask_that_bars_the_future_is_causal(name):
    assert kinds(Masked(CAUSAL[name]), torch.randn(2, 5, 6)) == [("self", "causal")]


@pytest.mark.parametrize("name", OTHER)
def test_any_other_mask_is_not(name):
    assert kinds(Masked(OTHER[name]), torch.randn(2, 5, 6)) == [("self",)]


def test_a_mask_from_a_buffer_and_from_an_argument():
    module = Masked(lambda s: s)
    module.mask = lambda s: s.masked_fill(~module.seen[: s.shape[-2], : s.shape[-1]], LOW)
    assert kinds(module, torch.randn(2, 5, 6)) == [("self", "causal")]
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    x, above = torch.randn(2, 5, 6), torch.ones(5, 5).triu(1).bool()
    assert kinds(layer, x, x, x, attn_mask=above) == [("self", "causal")]
    assert kinds(layer, x, x, x, attn_mask=above.T) == [("self",)]


@pytest.mark.parametrize(("ahead", "causal"), [(3, True), (4, False)])
def test_fewer_queries_than_keys_end_together(ahead, causal):
    """As with a cache: the last query of 2 is at the last key of 5."""

    class Last(Masked):
        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x[:, -2:].clone()) @ self.k(x).mT
            return scores.masked_fill(torch.ones(2, 5).triu(ahead + 1).bool(), LOW).softmax(-1) @ self.v(x)

    (kind,) = kinds(Last(lambda s: s), torch.randn(2, 5, 6))
    assert ("causal" in kind) is causal


def test_keys_first():
    assert kinds(Masked(CAUSAL["masked_fill"], key_first=True), torch.randn(2, 5, 6)) == [("self", "causal")]


def test_self_is_one_tensor_and_cross_is_two():
    layer = nn.MultiheadAttention(6, 2, batch_first=True)
    x, y = torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    assert kinds(layer, x, x, x) == [("self",)]
    assert kinds(layer, x, y, y) == [("cross",)]
    stack = nn.TransformerDecoderLayer(6, 2, 7, batch_first=True)
    assert kinds(stack, x, y) == [("self",), ("cross",)]


def test_a_mask_that_was_written_after_the_block_tells_nothing():
    layer, x = nn.MultiheadAttention(6, 2, batch_first=True).eval(), torch.randn(2, 5, 6)
    mask = torch.ones(5, 5).tril(-1).bool()
    with torch.no_grad(), mha_inspect.recording() as seen:
        layer(x, x, x, attn_mask=mask)
    mask.copy_(torch.ones(5, 5).triu(1))
    assert [attention.kind for attention in seen.trace.attentions] == [("self",)]
