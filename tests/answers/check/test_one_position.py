"""A table of positions of which one row is added to all tokens; other rows that all tokens share are not accused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import Finding

from ...corpus.planted import E, Right

LENGTH, ROWS = 9, 50


class Encoder(Right):
    """Attention over tokens with positions; `is_learned` is whether the table is a parameter."""

    def __init__(self, *, is_learned: bool = True) -> None:
        super().__init__()
        table = torch.randn(1, ROWS, E)
        if is_learned:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def positions(self, length: int) -> Tensor:
        return self.table[:, :length]

    def enter(self, x: Tensor) -> Tensor:
        return x + self.positions(x.shape[1])


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
    report = mha_inspect.check(module.eval(), torch.randn(2, length, E))
    return [finding for finding in report.findings if "row" in finding.sentence]


@pytest.mark.parametrize(
    ("module", "row"),
    [
        (OneRow(), LENGTH),
        (LastRow(is_learned=False), LENGTH - 1),
    ],
)
def test_one_row_for_all_tokens_is_a_suspicion(module: Encoder, row: int) -> None:
    (finding,) = findings_of(module)
    assert finding.sentence == (
        f"The order of the tokens makes no difference: table adds one row to all of them, row {row} of {ROWS}."
    )
    assert (finding.check, finding.sure) == ("mixing", False)
    assert f"With {LENGTH - 1} tokens, row {row - 1} is added." in finding.evidence


@pytest.mark.parametrize("module", [SameRow, OfLength])
def test_other_rows_are_right(module: type[Encoder]) -> None:
    assert not findings_of(module())
