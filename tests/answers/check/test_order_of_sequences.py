"""Causal is declared for the sequence that the output follows: an encoder, and the attention to it, see all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import Intent, check
from mha_inspect.reports.check import CheckReport


class Translator(nn.Module):
    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_causal, self.embed = is_causal, nn.Embedding(30, 16)
        self.transformer, self.out = nn.Transformer(16, 4, 1, 2, 32, batch_first=True), nn.Linear(16, 30)

    def forward(self, source: Tensor, goal: Tensor) -> Tensor:
        mask = torch.ones(goal.shape[1], goal.shape[1], dtype=torch.bool).triu(1) if self.is_causal else None
        return self.out(self.transformer(self.embed(source), self.embed(goal), tgt_mask=mask))


class Named(Translator):
    """Both sequences may have one length: the names say which is continued."""

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(src, tgt)


def report_of(module: nn.Module, *lengths: int) -> CheckReport:
    torch.manual_seed(1)
    ids = tuple(torch.randint(30, (2, length)) for length in lengths)
    return check(module.eval(), *ids, intent=Intent(causal=True))


@pytest.mark.parametrize(("module", "lengths"), [(Translator(), (9, 7)), (Named(), (7, 7))])
def test_an_encoder_may_see_its_whole_source(module: nn.Module, lengths: tuple[int, int]) -> None:
    report = report_of(module, *lengths)
    assert report.findings == ()
    assert "causal" in {passed.check for passed in report.passed}


def test_a_decoder_without_a_mask_is_a_fault() -> None:
    (finding,) = report_of(Translator(is_causal=False), 9, 7).findings
    assert finding.check == "causal"
    assert "decoder" in finding.module


class Tower(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.attention, self.is_causal = nn.MultiheadAttention(16, 2, batch_first=True), is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.is_causal else None
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class TwoTowers(nn.Module):
    """An image that sees all of itself, and a text of two layers, of which one or both are in order; both pooled."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.image = Tower(is_causal=False)
        self.text = nn.Sequential(Tower(is_causal=True), Tower(is_causal=is_causal))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        return torch.cat((self.image(image).mean(1), self.text(text)[:, -1]), -1)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_tower_without_order_is_not_accused_and_a_text_that_sees_the_future_is(is_causal: bool) -> None:
    images, texts = torch.randn(3, 9, 16), torch.randn(3, 7, 16)
    report = check(TwoTowers(is_causal=is_causal).eval(), images, texts, intent=Intent(causal=True))
    assert [finding.sure for finding in report.findings if finding.check == "causal"] == [True] * (not is_causal)
