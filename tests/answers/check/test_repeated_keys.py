"""Keys that are there several times: a sequence was repeated in the place of the heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import Finding

Repeat = Callable[[Tensor], Tensor]
"""Takes keys or values `batch heads sequence head_dim`."""


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, length, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, head_dim).reshape(batch, -1, length, head_dim)


def heads_twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(4, dim=1)


class Grouped(nn.Module):
    """8 query heads of 4 share `kv_heads` key heads."""

    def __init__(self, repeat: Repeat, kv_heads: int = 2) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)
        self.k, self.v = nn.Linear(32, 4 * kv_heads), nn.Linear(32, 4 * kv_heads)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side(x).unflatten(-1, (-1, 4)).transpose(1, 2) for side in (self.q, self.k, self.v))
        k, v = self.repeat(k), self.repeat(v)
        return self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


def findings(module: nn.Module, x: Tensor) -> list[Finding]:
    return [finding for finding in mha_inspect.check(module.eval(), x).findings if finding.check == "grouped"]


@pytest.mark.parametrize(
    "repeat",
    [
        lambda k: heads_twice(repeat_kv(k.transpose(1, 2), 4).transpose(1, 2)),
        lambda k: heads_twice(k.repeat(1, 1, 4, 1)),
        lambda k: heads_twice(k.repeat_interleave(4, dim=2)),
    ],
)
def test_each_key_is_there_as_often_as_query_heads_share_it(repeat: Repeat) -> None:
    (finding,) = findings(Grouped(repeat), torch.randn(2, 7, 32))
    assert finding.sure
    assert finding.sentence == "Each key occurs 4 times: the sequence was repeated instead of the heads."
    assert finding.evidence == "28 keys and values are 7 tokens of k_proj, each repeated 4 times, bit for bit."


def test_keys_of_all_heads_that_are_there_twice_may_be_on_purpose() -> None:
    (finding,) = findings(Grouped(lambda k: k.repeat_interleave(2, dim=2), 8), torch.randn(2, 7, 32))
    assert not finding.sure
    assert finding.sentence == "Each key occurs 2 times."


@pytest.mark.parametrize(
    ("repeat", "kv_heads"),
    [
        (heads_twice, 2),
        (lambda k: k, 8),
        (lambda k: heads_twice(torch.cat([k, k.flip(2) + 1], 2)), 2),
        (lambda k: heads_twice(torch.cat([k, k[:, :, :3]], 2)), 2),
    ],
)
def test_keys_that_are_there_once_have_no_finding(repeat: Repeat, kv_heads: int) -> None:
    assert not findings(Grouped(repeat, kv_heads), torch.randn(2, 7, 32))


def test_tokens_that_are_the_same_are_not_repeated_keys() -> None:
    assert not findings(Grouped(heads_twice), torch.ones(2, 8, 32))
    assert not findings(Grouped(heads_twice), torch.randn(2, 4, 32).repeat(1, 2, 1))
