"""A mask with an entry for each batch item: that of one item must not reach another; other masks are not accused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject

LENGTH, WIDTH = 7, 32


class OfTorch(nn.Module):
    """A layer of torch whose mask is repeated for the heads."""

    def __init__(self, heads: int, *, by_item: bool, batch_first: bool = True) -> None:
        super().__init__()
        self.by_item, self.heads = by_item, heads
        self.attention = nn.MultiheadAttention(WIDTH, heads, batch_first=batch_first)

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        repeated = attn_mask.repeat_interleave(self.heads, 0) if self.by_item else attn_mask.repeat(self.heads, 1, 1)
        return self.attention(x, x, x, attn_mask=repeated)[0]


class Plain(nn.Module):
    """Attention with scores of `batch heads query key`, and a mask of any of its axes."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def placed(self, mask: Tensor) -> Tensor:
        return mask

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (self.heads, -1)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~self.placed(mask), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class OfItem(Plain):
    def placed(self, mask: Tensor) -> Tensor:
        return mask[:, None]


class OfFirst(Plain):
    """The mask of the first item is taken for all."""

    def placed(self, mask: Tensor) -> Tensor:
        return mask[0]


class OfSegments(Plain):
    """Tokens of equal segments see each other."""

    def placed(self, mask: Tensor) -> Tensor:
        return (mask[:, :, None] == mask[:, None])[:, None]


def masks(count: int, *, hidden: bool) -> Tensor:
    """Masks of `count query key`, each another, in which every query sees the first key and itself."""
    torch.manual_seed(1)
    drawn = torch.rand(count, LENGTH, LENGTH) < 0.4
    drawn[:, range(LENGTH), range(LENGTH)] = False
    drawn[:, :, 0] = False
    return drawn if hidden else ~drawn


def report_of(module: nn.Module, mask: Tensor, items: int, *, seq_first: bool = False) -> CheckReport:
    torch.manual_seed(0)
    x = torch.randn(LENGTH, items, WIDTH) if seq_first else torch.randn(items, LENGTH, WIDTH)
    return check(Subject(module.eval(), (x, mask), {}), Intent(batch_axis=int(seq_first)))


@pytest.mark.parametrize(("items", "heads"), [(2, 4), (8, 2), (3, 2)])
def test_a_mask_that_is_repeated_in_another_order_reaches_other_items(items: int, heads: int) -> None:
    (finding,) = report_of(OfTorch(heads, by_item=False), masks(items, hidden=True), items).findings
    assert (finding.check, finding.sure) == ("batch", True)
    assert finding.sentence == "The attn_mask of one batch item changes the output of another."
    assert "repeat_interleave(heads, 0)" in finding.fix


def test_one_mask_that_is_taken_for_all_items_is_found_where_they_differ() -> None:
    assert [each.check for each in report_of(OfFirst(4), masks(2, hidden=False), 2).findings] == ["batch"]


@pytest.mark.parametrize(("items", "heads"), [(2, 4), (8, 2), (4, 4), (7, 2)])
def test_a_mask_of_each_item_is_right(items: int, heads: int) -> None:
    assert not report_of(OfTorch(heads, by_item=True), masks(items, hidden=True), items).findings
    assert not report_of(OfItem(heads), masks(items, hidden=False), items).findings


@pytest.mark.parametrize("items", [2, 4, 7])
def test_other_masks_are_right(items: int) -> None:
    of_all = masks(1, hidden=False)
    segments = torch.randint(0, 2, (items, LENGTH))
    for module, mask in (
        (Plain(4), of_all),
        (Plain(4), masks(4, hidden=False)),  # of the heads
        (Plain(4), masks(items * 4, hidden=False).view(items, 4, LENGTH, LENGTH)),
        (OfFirst(4), of_all.expand(items, -1, -1).clone()),
        (OfSegments(4), segments),
    ):
        assert not [each for each in report_of(module, mask, items).findings if each.check == "batch"]


def test_the_sequence_may_come_first() -> None:
    wrong, right = (OfTorch(4, by_item=by_item, batch_first=False) for by_item in (False, True))
    found = [report_of(module, masks(2, hidden=True), 2, seq_first=True).findings for module in (wrong, right)]
    assert [[each.sure for each in findings if "attn_mask" in each.sentence] for findings in found] == [[True], []]
