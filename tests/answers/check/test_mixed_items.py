"""Batch items that affect each other are reported at the line that mixes them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.running.subject import Subject


class Collected(nn.Module):
    """Heads that are collected one by one: `heads batch position head_dim`, merged with or without a permutation."""

    def __init__(self, *, is_permuted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_permuted = is_permuted
        self.query, self.key, self.value = (nn.Parameter(torch.randn(4, 16, 4) / 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        collected = torch.zeros(4, *x.shape[:2], 4)
        for head in range(4):
            q, k, v = (x @ weight[head] for weight in (self.query, self.key, self.value))
            collected[head] = (q @ k.mT / 2).softmax(-1) @ v
        if self.is_permuted:
            collected = collected.permute(1, 2, 0, 3).contiguous()
        return collected.view(*x.shape[:2], -1)  # merged here


def test_the_line_of_a_view_that_mixes_items() -> None:
    torch.manual_seed(1)
    given = (torch.randn(2, 9, 16),)
    (finding,) = check(Subject(Collected(is_permuted=False), given, {}), Intent()).findings
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    expected = next(number for number, line in enumerate(lines, 1) if line.endswith("# merged here"))
    assert finding.sentence == "Changing one batch item changes the output of another."
    assert finding.source.endswith(f":{expected}")
    assert check(Subject(Collected(is_permuted=True), given, {}), Intent()).findings == ()
