"""A mask that is given and changes nothing: a block takes it and does not pass it on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject

IMAGES = torch.block_diag(torch.ones(5, 5), torch.ones(4, 4)).bool()
"""Two images of 5 and 4 patches in one sequence: `query key`."""


class Block(nn.Module):
    """One sequence of patches, `patch embed`, with a mask that is used or forgotten."""

    def __init__(self, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use, self.qkv, self.out = use, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(0, 1) for part in self.qkv(x).chunk(3, -1))
        used: Tensor | None = mask
        if self.use == "forgotten" or (self.use == "unless all true" and bool(mask.all())):
            used = None
        y = scaled_dot_product_attention(q, k, v, attn_mask=used)
        result: Tensor = x + self.out(y.transpose(0, 1).flatten(1))
        return result


def report_of(use: str, mask: Tensor) -> CheckReport:
    torch.manual_seed(1)
    return check(Subject(Block(use), (torch.randn(9, 16), mask), {}), Intent())


@pytest.mark.parametrize("mask", [IMAGES, IMAGES.float().masked_fill(~IMAGES, -1e9).masked_fill(IMAGES, 0.0)])
def test_a_forgotten_mask_may_be_a_mistake(mask: Tensor) -> None:
    (finding,) = report_of("forgotten", mask).findings
    assert finding.sentence == "mask is given and has no effect on the output."
    assert finding.evidence.endswith("no operation reads it.")
    assert not finding.sure


def test_a_mask_with_an_effect_is_none() -> None:
    assert report_of("always", IMAGES).findings == ()


def test_a_mask_that_is_left_out_where_it_masks_nothing_is_none() -> None:
    assert report_of("unless all true", torch.ones_like(IMAGES)).findings == ()
