"""Slopes of ALiBi and frequencies of a rotation: shown, and a suspicion where a ladder is one step off its formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.reports.check import CheckReport

from ...corpus.planted import D, E, H, N, Right, before

PAIRS = D // 2


class Sloped(Right):
    """Causal attention with a slope for each head."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = slopes

    def mask(self, scores: Tensor) -> Tensor:
        distance = before(scores)
        return (scores - self.slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)


class SixHeads(Sloped):
    """Slopes of a number of heads that is no power of 2, as published: those of 4 heads, and every second one of 8."""

    def __init__(self) -> None:
        super().__init__(torch.cat((slopes(1), 2.0 ** torch.tensor([-1.0, -3.0]))))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (6, -1)).transpose(1, 2)


class Rotated(Right):
    """Attention that is rotated by frequencies."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.turn(q), self.turn(k), v

    def turn(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2]).float(), self.frequencies)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def report_of(module: nn.Module) -> CheckReport:
    torch.manual_seed(4)
    intent = Intent(causal=True) if isinstance(module, Sloped) else Intent()
    return mha_inspect.check(module.eval(), torch.randn(2, N, E), intent=intent)


def facts_of(module: nn.Module) -> dict[str, str]:
    return {fact.name: fact.sentence for fact in report_of(module).facts}


def slopes(first: int) -> Tensor:
    return 2.0 ** (-8 * torch.arange(first, first + H) / H)


def pairs(first: int, base: float = 10000.0) -> Tensor:
    return base ** (-torch.arange(first, first + PAIRS) / PAIRS)


@pytest.mark.parametrize(("first", "said"), [(0, "has 1"), (2, "has 0.0625")])
def test_slopes_that_are_counted_from_another_head_are_a_suspicion(first: int, said: str) -> None:
    (finding,) = report_of(Sloped(slopes(first))).findings
    assert (finding.check, finding.sure) == ("masking", False)
    assert said in finding.sentence
    assert "expected 2^(-8/4) = 0.25" in finding.sentence


def test_slopes_of_the_wrong_sign_are_a_suspicion() -> None:
    (finding,) = report_of(Sloped(-slopes(1))).findings
    assert (finding.check, finding.sure) == ("masking", False)
    assert "raises the scores of keys that are far from their query" in finding.sentence


def test_frequencies_that_are_counted_from_another_pair_are_a_suspicion() -> None:
    (finding,) = report_of(Rotated(pairs(1))).findings
    assert (finding.check, finding.sure) == ("rotary", False)
    assert "one step off" in finding.sentence


RIGHT = {
    "slopes": Sloped(slopes(1)),
    "slopes of another height": Sloped(2.0 ** (-4 * torch.arange(1, 5) / 4)),
    "slopes of six heads": SixHeads(),
    "one slope for all": Sloped(torch.full((4,), 0.5)),
    "frequencies": Rotated(pairs(0)),
    "longer sequences": Rotated(pairs(0) / 4),
    "frequencies of an image": Rotated(torch.linspace(1, 3, PAIRS)),
    "scaled in parts": Rotated(pairs(0) * torch.tensor([1.0, 1.0, 0.5])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_ladders_are_not_accused(name: str) -> None:
    assert report_of(RIGHT[name]).findings == ()


def test_ladders_are_shown() -> None:
    assert facts_of(Sloped(slopes(1)))["slopes by head"] == "0.25, 0.0625, 0.0156, 0.00391"
    assert facts_of(Rotated(pairs(0, 1000.0)))["rotary by pair"] == "1, 0.1, 0.01 a position: base 1,000"
