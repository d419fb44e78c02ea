"""A table of positions of which one row is added to all tokens; other rows that all tokens share are not accused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.reports.check import Finding
from mha_inspect.running.subject import Subject

LENGTH, WIDTH, ROWS = 9, 32, 50


class Encoder(nn.Module):
    """Attention over tokens with positions; `learned` is whether the table is a parameter."""

    def __init__(self, *, learned: bool = True, pooled: bool = False) -> None:
        super().__init__()
        table = torch.randn(1, ROWS, WIDTH)
        if learned:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)
        self.pooled = pooled
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def positions(self, length: int) -> Tensor:
        return self.table[:, :length]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(x.shape[1])
        y = self.attention(x, x, x, need_weights=False)[0]
        return y.mean(1) if self.pooled else y


class OneRow(Encoder):
    def positions(self, length: int) -> Tensor:
        return self.table[:, length, :]


class LastRow(Encoder):
    def positions(self, length: int) -> Tensor:
        return self.table[0, length - 1].expand(length, -1)


class SameRow(Encoder):
    """One row for any number of tokens, e.g. of a layer or of a time."""

    def positions(self, length: int) -> Tensor:
        return self.table[:, LENGTH]


class OfLength(Encoder):
    """Positions, and a row that says the number of tokens."""

    def positions(self, length: int) -> Tensor:
        return self.table[:, :length] + self.table[:, length, None]


def findings_of(module: nn.Module, length: int = LENGTH) -> list[Finding]:
    torch.manual_seed(0)
    report = check(Subject(module.eval(), (torch.randn(2, length, WIDTH),), {}))
    return [each for each in report.findings if "row" in each.sentence]


@pytest.mark.parametrize("module", [OneRow, LastRow])
@pytest.mark.parametrize(("learned", "pooled"), [(True, False), (False, False), (True, True)])
def test_one_row_for_all_tokens_is_a_suspicion(module: type[Encoder], learned: bool, pooled: bool) -> None:
    (finding,) = findings_of(module(learned=learned, pooled=pooled))
    row = LENGTH if module is OneRow else LENGTH - 1
    assert finding.sentence == (
        f"The order of the tokens makes no difference: table adds one row to all of them, row {row} of {ROWS}."
    )
    assert (finding.check, finding.sure) == ("mixing", False)
    assert f"With {LENGTH - 1} tokens, row {row - 1} is added." in finding.evidence


@pytest.mark.parametrize("module", [Encoder, SameRow, OfLength])
def test_other_rows_are_right(module: type[Encoder]) -> None:
    assert not findings_of(module())


def test_one_token_has_one_row() -> None:
    assert not findings_of(OneRow(), length=1)
