"""Sizes and numbers that are zero: whatever the module itself computes with them is traced and told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.errors import InputError
from mha_inspect.layers.spec import Show
from mha_inspect.render.formats import to_text

from ..built import trace_module


class Attention(nn.MultiheadAttention):
    """Three heads of eight, with a product of the test's choosing."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(24, 3, batch_first=True)
        self.attend = attend

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        parts = zip(self.in_proj_weight.chunk(3), (x, memory, memory), strict=True)
        q, k, v = ((t @ weight.mT).view(*t.shape[:2], 3, 8).transpose(1, 2) for weight, t in parts)
        return self.out_proj(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8**0.5).softmax(-1) @ v


def scaled_by_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.0).softmax(-1) @ v


def capped_at_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT / 0.0).tanh() * 0.0).nan_to_num().softmax(-1) @ v


def with_numbers_of_no_dimension(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q.sum()
    s = s.sum(0) + s.amax(0) + s.softmax(0) + s.cumsum(0) + s.logsumexp(0) + s.max(0)[0] + s.squeeze(0) + s.mean(0)
    s = s + s.exp() / s.exp().sum(0) + s.log_softmax(0) + s.argmax(0) + s.std(0, correction=0) + s.flip(0)
    return by_hand(q, k, v) * s


CASES = [
    *((by_hand, *shapes) for shapes in (((0, 7), (0, 11)), ((2, 0), (2, 11)), ((2, 7), (2, 0)))),
    *((attend, (2, 7), (2, 11)) for attend in (scaled_by_nothing, capped_at_nothing, with_numbers_of_no_dimension)),
]


@pytest.mark.parametrize(("attend", "x", "memory"), CASES)
def test_what_runs_is_told(attend: Callable[..., Tensor], x: tuple[int, ...], memory: tuple[int, ...]) -> None:
    module, args = Attention(attend), (torch.randn(*x, 24), torch.randn(*memory, 24))
    module(*args)
    trace = trace_module(module, *args, show=Show(ops=True, stats=True, values=True))
    for format in ("json", "plain", "html"):
        assert to_text(trace, format)
    assert str(mha_inspect.params(module, *args))
    with mha_inspect.recording(keep=True) as seen:
        module(*args)
    assert str(seen.trace)


def test_an_input_without_elements() -> None:
    """What runs is traced and shown; to compare nothing, or to change it, is refused in a line."""
    layer, x = nn.MultiheadAttention(24, 3, batch_first=True).eval(), torch.zeros(0, 5, 24)
    trace = mha_inspect.trace(layer, x, x, x, show=Show(stats=True, values=True), keep=True)
    assert trace.attentions[0].query.shape == (0, 5, 24)
    assert trace.verdict.endswith("an input has no elements")
    with pytest.raises(InputError, match=r"no numbers to compare"):
        mha_inspect.diff(layer, layer, x, x, x)
    with pytest.raises(InputError, match=r"has the shape .* no element"):
        mha_inspect.check(layer, x, x, x)
    with pytest.raises(InputError, match=r"no numbers to compare"):
        mha_inspect.compare_heads((1, 3), lambda heads: nn.MultiheadAttention(24, heads, batch_first=True), x, x, x)
