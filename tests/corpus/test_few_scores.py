"""Attention is measured on a few of its scores, and what is said is the same as of all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mha_inspect
from mha_inspect.errors import InputError
from mha_inspect.layers.spec import Show

from .base import Base
from .entry import E
from .every import ENTRIES, entries
from .runs import traced


class Doubles(TorchDispatchMode):
    """Counts the numbers in double precision that are computed."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float64 and not result.is_meta:
            self.count += result.numel()
        return result


class Causal(Base):
    """Attention written out, with a mask."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return scores.softmax(-1) @ v


class OneWarmQuery(Base):
    """The scores of one query, or those with one key, are doubled."""

    warm = (100,)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        factors = torch.ones(q.shape[-2], k.shape[-2])
        factors[self.warm] = 2
        return (q @ k.mT / q.shape[-1] ** 0.5 * factors).softmax(-1) @ v


class OneWarmKey(OneWarmQuery):
    warm = (..., 100)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_measured_does_not_grow_with_the_scores(device: str) -> None:
    with torch.device(device):
        module, x = nn.Sequential(Causal(), Causal()).eval(), torch.randn(2, 256, E)
    with torch.no_grad(), Doubles() as doubles:
        trace = mha_inspect.trace(module, x, show=Show())
    assert [attention.kind for attention in trace.attentions] == [("self", "causal")] * 2 or device == "meta"
    assert len(trace.attentions) == 2
    # Each attention has 393,216 scores, and dozens of numbers were computed of each.
    assert doubles.count < 8_000_000


class WrittenQuery(OneWarmQuery):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores[:, :, 100] *= 2
        return scores.softmax(-1) @ v


class AssignedKey(OneWarmQuery):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.clone()
        scores[..., 100] = 2 * scores[..., 100]
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("make", [OneWarmQuery, OneWarmKey, WrittenQuery, AssignedKey])
def test_scores_that_differ_for_one_token_of_many_have_no_scale_that_passes(make: type[Base]) -> None:
    args = (make().eval(), torch.randn(1, 256, E))
    with pytest.raises(InputError, match="scale"):
        mha_inspect.check(*args, intent=mha_inspect.Intent(scale="sqrt_head_dim"), only="scale")


@pytest.mark.parametrize("name", entries()[::3])
def test_a_few_scores_say_what_all_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES[name]
    args, kwargs = entry.arguments()
    of_all = traced(name)
    monkeypatch.setattr("mha_inspect.graph.narrow.MOST", 40)
    with torch.set_grad_enabled(entry.grad):
        of_few = mha_inspect.trace(entry.made(), *args, keep=True, **kwargs)
    assert str(of_few) == str(of_all)
