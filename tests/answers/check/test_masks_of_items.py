"""A mask with an entry for each batch item: that of one item must not reach another; other masks are not accused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.reports.check import Finding

from ...corpus.planted import E, H, Right

LENGTH = 7


class OfTorch(nn.Module):
    """A layer of torch whose mask is repeated for the heads."""

    def __init__(self, heads: int, *, by_item: bool) -> None:
        super().__init__()
        self.by_item, self.heads = by_item, heads
        self.attention = nn.MultiheadAttention(E, heads, batch_first=True)

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        repeated = attn_mask.repeat_interleave(self.heads, 0) if self.by_item else attn_mask.repeat(self.heads, 1, 1)
        return self.attention(x, x, x, attn_mask=repeated)[0]


class Masked(Right):
    """Attention with scores of `batch heads query key`; `placed` lays a mask on them."""

    def __init__(self, placed: Callable[[Tensor], Tensor] = lambda mask: mask) -> None:
        super().__init__()
        self.placed = placed

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.keep = self.placed(mask)
        return super().forward(x)

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(~self.keep, -torch.inf)


def of_item() -> Masked:
    return Masked(lambda mask: mask[:, None])


def of_segments() -> Masked:
    """Tokens of equal segments see each other."""
    return Masked(lambda mask: (mask[:, :, None] == mask[:, None])[:, None])


def masks(count: int, *, hidden: bool) -> Tensor:
    """Masks of `count query key`, each another, in which every query sees the first key and itself."""
    torch.manual_seed(1)
    drawn = torch.rand(count, LENGTH, LENGTH) < 0.4
    drawn[:, range(LENGTH), range(LENGTH)] = False
    drawn[:, :, 0] = False
    return drawn if hidden else ~drawn


def findings(module: nn.Module, mask: Tensor, items: int) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    x = torch.randn(items, LENGTH, E)
    return mha_inspect.check(module.eval(), x, mask, intent=Intent(batch_axis=0)).findings


@pytest.mark.parametrize(("items", "heads"), [(2, 4), (8, 2)])
def test_a_mask_that_is_repeated_in_another_order_reaches_other_items(items: int, heads: int) -> None:
    (finding,) = findings(OfTorch(heads, by_item=False), masks(items, hidden=True), items)
    assert (finding.check, finding.sure) == ("batch", True)
    assert finding.sentence == "The attn_mask of one batch item changes the output of another."
    assert "repeat_interleave(heads, 0)" in finding.fix


@pytest.mark.parametrize("items", [2, H])
def test_a_mask_of_each_item_is_right(items: int) -> None:
    assert not findings(OfTorch(H, by_item=True), masks(items, hidden=True), items)
    assert not findings(of_item(), masks(items, hidden=False), items)


@pytest.mark.parametrize(
    ("module", "mask"),
    [
        (Masked(), masks(H, hidden=False)),  # of the heads, which are as many as the items
        (of_segments(), torch.arange(H * LENGTH).view(H, LENGTH) % 3 // 2),
    ],
)
def test_other_masks_are_right(module: nn.Module, mask: Tensor) -> None:
    assert "batch" not in {finding.check for finding in findings(module, mask, H)}
