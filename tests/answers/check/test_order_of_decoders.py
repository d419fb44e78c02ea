"""Causal is declared for the sequence that the output follows: an encoder, and the attention to it, see all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject


class Translator(nn.Module):
    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_causal, self.embed = is_causal, nn.Embedding(30, 16)
        self.transformer, self.out = nn.Transformer(16, 4, 1, 2, 32, batch_first=True), nn.Linear(16, 30)

    def forward(self, source: Tensor, goal: Tensor) -> Tensor:
        length = goal.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if self.is_causal else None
        result: Tensor = self.out(self.transformer(self.embed(source), self.embed(goal), tgt_mask=mask))
        return result


class Named(Translator):
    """Both sequences may have one length: the names say which is continued."""

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(src, tgt)


def report_of(module: nn.Module, *lengths: int) -> CheckReport:
    torch.manual_seed(1)
    ids = tuple(torch.randint(30, (2, length)) for length in lengths)
    return check(Subject(module.eval(), ids, {}), Intent(causal=True))


@pytest.mark.parametrize(("module", "lengths"), [(Translator(), (9, 7)), (Translator(), (6, 8)), (Named(), (7, 7))])
def test_an_encoder_may_see_its_whole_source(module: nn.Module, lengths: tuple[int, int]) -> None:
    report = report_of(module, *lengths)
    assert report.findings == ()
    assert "causal" in {passed.check for passed in report.held}


def test_a_decoder_without_a_mask_is_a_fault() -> None:
    (finding,) = report_of(Translator(is_causal=False), 9, 7).findings
    assert finding.check == "causal"
    assert "decoder" in finding.module
