"""Sizes and numbers that are zero: whatever the module itself computes with them is traced and told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import InputError
from mha_inspect.layers.spec import Show
from mha_inspect.render.formats import to_text

from ..built import trace_module


class Attention(nn.Module):
    """Three heads of eight, with a product of the test's choosing."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.attend = attend

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(t).view(*t.shape[:2], 3, 8).transpose(1, 2)
            for p, t in zip((self.q, self.k, self.v), (x, memory, memory), strict=True)
        )
        return self.o(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> Any:
        return self.attn(x, memory, memory)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT / 8**0.5).softmax(-1) @ v


def by_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def scaled_by(number: float) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: (q @ k.mT * number).softmax(-1) @ v


def divided_by(number: float) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: (q @ k.mT / number).nan_to_num().softmax(-1) @ v


def capped_at_nothing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ((q @ k.mT / 0.0).tanh() * 0.0).nan_to_num().softmax(-1) @ v


def with_numbers_of_no_dimension(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = q.sum()
    s = s.sum(0) + s.amax(0) + s.softmax(0) + s.cumsum(0) + s.logsumexp(0) + s.max(0)[0] + s.squeeze(0) + s.mean(0)
    s = s + s.exp() / s.exp().sum(0) + s.log_softmax(0) + s.argmax(0) + s.std(0, correction=0) + s.flip(0)
    return by_hand(q, k, v) * s


EMPTY = [((0, 7), (0, 11)), ((2, 0), (2, 11)), ((2, 7), (2, 0)), ((0, 0), (0, 0))]
WITH_ELEMENTS = ((2, 7), (2, 11))
NUMBERS = [
    with_numbers_of_no_dimension,
    capped_at_nothing,
    scaled_by(0.0),
    scaled_by(float("inf")),
    divided_by(0.0),
]
CASES = [
    *((Attention(by_hand), *shapes) for shapes in EMPTY),
    (Attention(by_einsum), *EMPTY[0]),
    *((Torch().eval(), *shapes) for shapes in EMPTY),
    *((Attention(attend), *WITH_ELEMENTS) for attend in NUMBERS),
]


@pytest.mark.parametrize(("module", "x", "memory"), CASES, ids=str)
def test_what_runs_is_told(module: nn.Module, x: tuple[int, ...], memory: tuple[int, ...]) -> None:
    args = torch.randn(*x, 24), torch.randn(*memory, 24)
    try:
        module(*args)
    except (RuntimeError, IndexError) as refused:  # torch itself takes no softmax, or no view, of nothing
        pytest.skip(f"torch refuses it: {str(refused)[:60]}")
    trace = trace_module(module, *args, show=Show(ops=True, stats=True, values=True))
    for format in ("json", "plain", "html"):
        assert to_text(trace, format)
    assert repr(mha_inspect.params(module, *args))
    with mha_inspect.recording(keep=True) as seen:
        module(*args)
    assert repr(seen.trace)


@pytest.mark.parametrize("shape", [(0, 5, 24), (2, 0, 24)])
def test_an_input_without_elements(shape):
    """What runs is traced and shown; to compare nothing, or to change it, is refused in a line."""
    layer, x = nn.MultiheadAttention(24, 3, batch_first=True).eval(), torch.zeros(shape)
    trace = mha_inspect.trace(layer, x, x, x, show=Show(stats=True, values=True), keep=True)
    assert trace.attentions[0].query.shape == shape
    assert "query" in trace._repr_html_()
    assert trace.verdict.endswith("an input has no elements")
    with pytest.raises(InputError, match=r"no numbers to compare"):
        mha_inspect.diff(layer, layer, x, x, x)
    with pytest.raises(InputError, match=r"has the shape .* no element"):
        mha_inspect.check(layer, x, x, x)
    with pytest.raises(InputError, match=r"no numbers to compare"):
        mha_inspect.compare_heads((1, 3), lambda heads: nn.MultiheadAttention(24, heads, batch_first=True), x, x, x)
