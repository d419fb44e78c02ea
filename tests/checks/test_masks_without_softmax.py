"""What a mask does in linear attention is measured by outputs: no weights show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.reports.check import CheckReport

Mask = Callable[[Tensor], Tensor]


class Linear(nn.Module):
    """Katharopoulos et al. 2020, with a mask that multiplies the keys."""

    def __init__(self, keep: Mask) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.keep = keep

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, (F.elu(k) + 1) * self.keep(mask)[:, None, :, None]
        context = q @ (k.mT @ v) / (q @ k.sum(-2)[..., None] + 1e-6)
        return self.out(context.transpose(1, 2).flatten(2))


def checked(keep: Mask, **intent: Any) -> CheckReport:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8, [1, 1, 1, 1, 0, 0, 0, 0]]).float()
    return mha_inspect.check(Linear(keep), torch.randn(3, 8, 16), mask, intent=Intent(**intent))


@pytest.mark.parametrize(
    ("keep", "means"),
    [
        (lambda mask: mask, "mask: 1 keeps a key, 0 ignores it"),
        (lambda mask: 1 - mask, "mask: 0 keeps a key, 1 ignores it"),
    ],
)
def test_the_value_that_hides_a_token_is_named(keep: Mask, means: str) -> None:
    assert means in [fact.sentence for fact in checked(keep).facts]


def test_a_mask_that_hides_what_it_should_keep_is_inverted() -> None:
    declared = {"padding": "mask", "padding_true": "keep"}
    assert checked(lambda mask: mask, **declared).findings == ()
    (finding,) = checked(lambda mask: 1 - mask, **declared).findings
    assert finding.sentence == "The mask is inverted: the keys that mask keeps are masked out."


class SummedFirst(nn.Module):
    """A mistake: the letter of the keys is missing in the values, so the weights are summed to 1 before they meet."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.equation = equation

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)) for t in self.qkv(x).chunk(3, -1))
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5).softmax(-1)
        return self.out(torch.einsum(self.equation, weights, v).flatten(2))


def test_queries_and_keys_without_a_part_in_the_output_are_named() -> None:
    torch.manual_seed(0)
    (finding,) = mha_inspect.check(SummedFirst("bhqk,bqhd->bqhd"), torch.randn(2, 6, 16)).findings
    assert finding.sentence == "The output is the same with any numbers in features 0–31 of qkv.weight."
    assert mha_inspect.check(SummedFirst("bhqk,bkhd->bqhd"), torch.randn(2, 6, 16)).findings == ()
