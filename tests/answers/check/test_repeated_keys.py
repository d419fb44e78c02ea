"""Keys that are there several times: a sequence was repeated in the place of the heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mha_inspect
from mha_inspect.reports.check import Finding

from ...corpus.planted import E, H, Right

Repeat = Callable[[Tensor], Tensor]
"""Takes keys or values `batch heads sequence head_dim`."""


def repeat_kv(x: Tensor, times: int) -> Tensor:
    batch, heads, length, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, times, length, head_dim).reshape(batch, -1, length, head_dim)


def heads_twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=1)


class Grouped(Right):
    """Query heads share key heads, which `repeat` repeats."""

    def __init__(self, repeat: Repeat, kv_heads: int = 2) -> None:
        super().__init__(kv_heads)
        self.repeat = repeat

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, self.repeat(k), self.repeat(v))


def findings(module: Grouped, x: Tensor) -> list[Finding]:
    return [finding for finding in mha_inspect.check(module.eval(), x).findings if finding.check == "grouped"]


@pytest.mark.parametrize(
    "repeat",
    [
        lambda k: heads_twice(repeat_kv(k.transpose(1, 2), 2).transpose(1, 2)),
        lambda k: heads_twice(k.repeat(1, 1, 2, 1)),
    ],
)
def test_each_key_is_there_as_often_as_query_heads_share_it(repeat: Repeat) -> None:
    (finding,) = findings(Grouped(repeat), torch.randn(2, 7, E))
    assert finding.sure
    assert finding.sentence == "Each key occurs 2 times: the sequence was repeated instead of the heads."
    assert finding.evidence == "14 keys and values are 7 tokens of k_proj, each repeated 2 times, bit for bit."


def test_keys_of_all_heads_that_are_there_twice_may_be_on_purpose() -> None:
    (finding,) = findings(Grouped(lambda k: k.repeat_interleave(2, dim=2), H), torch.randn(2, 7, E))
    assert not finding.sure
    assert finding.sentence == "Each key occurs 2 times."


@pytest.mark.parametrize(
    "repeat",
    [
        heads_twice,
        lambda k: heads_twice(torch.cat([k, k.flip(2) + 1], 2)),
        lambda k: heads_twice(torch.cat([k, k[:, :, :3]], 2)),
    ],
)
def test_keys_that_are_there_once_have_no_finding(repeat: Repeat) -> None:
    assert not findings(Grouped(repeat), torch.randn(2, 7, E))


def test_tokens_that_are_the_same_are_not_repeated_keys() -> None:
    assert not findings(Grouped(heads_twice), torch.ones(2, 8, E))
    assert not findings(Grouped(heads_twice), torch.randn(2, 4, E).repeat(1, 2, 1))
