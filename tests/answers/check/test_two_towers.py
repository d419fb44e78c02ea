"""A declared order of two towers with pooled outputs: it is that of one tower, and a leak in it is found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect import Intent, check


class Tower(nn.Module):
    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.attention, self.is_causal = nn.MultiheadAttention(16, 2, batch_first=True), is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1) if self.is_causal else None
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class TwoTowers(nn.Module):
    """An image that sees all of itself, and a text of several layers in order; both are pooled."""

    def __init__(self, *text: bool) -> None:
        super().__init__()
        self.image = Tower(is_causal=False)
        self.text = nn.ModuleList(Tower(is_causal=is_causal) for is_causal in text)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        for layer in self.text:
            text = layer(text)
        return torch.cat((self.image(image).mean(1), text[:, -1]), -1)


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 9, 16), torch.randn(3, 7, 16)


def test_the_tower_without_order_is_not_accused() -> None:
    report = check(TwoTowers(True, True).eval(), *given(), intent=Intent(causal=True))
    assert [finding.sentence for finding in report.findings if finding.check == "causal"] == []


@pytest.mark.parametrize("text", [(True, False), (False, False)])
def test_a_text_with_a_layer_that_sees_the_future_is(text: tuple[bool, ...]) -> None:
    report = check(TwoTowers(*text).eval(), *given(), intent=Intent(causal=True))
    assert [finding.sure for finding in report.findings if finding.check == "causal"] == [True]
