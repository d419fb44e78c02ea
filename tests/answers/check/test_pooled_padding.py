"""Padding where the output has an entry for each batch item and none for each token: classes, labels, pooled tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import Intent, check
from mha_inspect.errors import InputError
from mha_inspect.reports.check import CheckReport

KEEP = Intent(padding="mask", padding_true="keep")


class ClassToken(nn.Module):
    """The output of a class token that is put before the tokens."""

    def __init__(self, *, masks_class_token: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masks_class_token = masks_class_token
        self.token, self.mha = nn.Parameter(torch.randn(1, 1, 16)), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        z = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        keeps = torch.ones(len(x), z.shape[1], z.shape[1], dtype=torch.bool)
        keeps[:, 0 if self.masks_class_token else 1 :, 1:] = mask[:, None]
        keeps |= torch.eye(z.shape[1], dtype=torch.bool)
        y: Tensor = self.mha(z, z, z, attn_mask=~keeps.repeat_interleave(4, 0))[0]
        return y[:, 0]


class Pooled(nn.Module):
    """Self-attention, and the mean over all tokens or the real ones, or every second token."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool, self.mha, self.head = pool, nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = x + self.mha(x, x, x, key_padding_mask=~mask.bool())[0]
        real = mask[..., None].to(y)
        if self.pool == "halved":
            return y[:, ::2]
        if self.pool == "mean":
            return self.head(y.mean(1))
        total = (y * real).sum(1)
        return self.head(total / (real.sum(1) if self.pool == "real" else y.shape[1]))


def report_of(module: nn.Module) -> CheckReport:
    torch.manual_seed(1)
    return check(module, torch.randn(2, 12, 16), torch.ones(2, 12, dtype=torch.bool), intent=KEEP)


@pytest.mark.parametrize("module", [ClassToken(masks_class_token=True), Pooled("real")])
def test_right_pooling_passes(module: nn.Module) -> None:
    report = report_of(module)
    assert report.findings == ()
    assert "padding" in {passed.check for passed in report.passed}


def test_a_mask_that_spares_the_class_token_is_not_said_to_reach_no_score() -> None:
    (finding,) = report_of(ClassToken(masks_class_token=False)).findings
    assert finding.sentence == "mask has no effect on the output: query 0 sees the same keys with any mask."
    assert "Queries 1–12 lose keys" in finding.evidence


def test_a_mean_over_padding_or_that_counts_padding_is_a_fault() -> None:
    (over,) = report_of(Pooled("mean")).findings
    assert "although no real query attends to it" in over.sentence
    assert "Pool over the real tokens" in over.fix
    (count,) = report_of(Pooled("count")).findings
    assert count.sentence.startswith("The number of padding tokens changes the output of their batch item")


def test_entries_that_may_belong_to_tokens_are_not_judged() -> None:
    with pytest.raises(InputError, match="its size changes with their number"):
        report_of(Pooled("halved"))
