"""Slopes of ALiBi and frequencies of a rotation: shown, and a suspicion where a ladder is one step off its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject

D = 8


class Laddered(nn.Module):
    """Attention with slopes by head, or rotated by frequencies."""

    def __init__(self, slopes: Tensor | None = None, frequencies: Tensor | None = None, heads: int = 4) -> None:
        super().__init__()
        self.slopes, self.frequencies, self.heads = slopes, frequencies, heads
        self.qkv, self.o = nn.Linear(16, 3 * heads * D), nn.Linear(heads * D, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1])
        if self.frequencies is not None:
            angles = torch.outer(at.float(), self.frequencies)
            q, k = (rotated(each, angles) for each in (q, k))
        scores = q @ k.mT / D**0.5
        if self.slopes is not None:
            scores = scores - self.slopes[:, None, None] * (at[:, None] - at)
        scores = scores.masked_fill(at > at[:, None], -torch.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def report_of(module: nn.Module) -> CheckReport:
    torch.manual_seed(4)
    return check(Subject(module.eval(), (torch.randn(2, 9, 16),), {}), Intent(causal=True))


def ladder(heads: int, first: int) -> Tensor:
    return 2.0 ** (-8 * torch.arange(first, first + heads) / heads)


def pairs(first: int, base: float = 10000.0) -> Tensor:
    return base ** (-torch.arange(first, first + D // 2) / (D // 2))


@pytest.mark.parametrize(("first", "said"), [(0, "has 1"), (2, "has 0.0625")])
def test_slopes_that_are_counted_from_another_head_are_a_suspicion(first: int, said: str) -> None:
    (finding,) = report_of(Laddered(ladder(4, first))).findings
    assert (finding.check, finding.sure) == ("masking", False)
    assert said in finding.sentence
    assert "expected 2^(-8/4) = 0.25" in finding.sentence


@pytest.mark.parametrize("base", [100.0, 10000.0])
def test_frequencies_that_are_counted_from_another_pair_are_a_suspicion(base: float) -> None:
    (finding,) = report_of(Laddered(frequencies=pairs(1, base))).findings
    assert (finding.check, finding.sure) == ("rotary", False)
    assert "one step off" in finding.sentence


RIGHT = {
    "slopes": Laddered(ladder(4, 1)),
    "slopes of six heads": Laddered(ladder(6, 1), heads=6),
    "slopes of six heads as published": Laddered(torch.cat((ladder(4, 1), 2.0 ** torch.tensor([-1.0, -3.0]))), heads=6),
    "slopes of another height": Laddered(2.0 ** (-4 * torch.arange(1, 5) / 4)),
    "one slope for all": Laddered(torch.full((4,), 0.5)),
    "frequencies": Laddered(frequencies=pairs(0)),
    "another base": Laddered(frequencies=pairs(0, 500000.0)),
    "longer sequences": Laddered(frequencies=pairs(0) / 4),
    "frequencies of an image": Laddered(frequencies=torch.linspace(1, 3, 4)),
    "scaled in parts": Laddered(frequencies=pairs(0) * torch.tensor([1.0, 1.0, 0.5, 0.25])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_ladders_are_not_accused(name: str) -> None:
    assert report_of(RIGHT[name]).findings == ()


def test_ladders_are_shown() -> None:
    facts = {fact.name: fact.sentence for fact in report_of(Laddered(ladder(4, 1), pairs(0, 100.0))).facts}
    assert facts["slopes by head"] == "0.25, 0.0625, 0.0156, 0.00391"
    assert facts["rotary by pair"] == "1, 0.316, 0.1, 0.0316 a position: base 100"


def test_a_large_base_is_a_number_of_digits() -> None:
    facts = {fact.name: fact.sentence for fact in report_of(Laddered(frequencies=pairs(0, 500000.0))).facts}
    assert facts["rotary by pair"].endswith("a position: base 500,000")


def test_slopes_of_the_wrong_sign_are_a_suspicion() -> None:
    (finding,) = report_of(Laddered(-ladder(4, 1))).findings
    assert (finding.check, finding.sure) == ("masking", False)
    assert "raises the scores of keys that are far from their query" in finding.sentence
    assert report_of(Laddered(ladder(4, 1))).findings == ()
