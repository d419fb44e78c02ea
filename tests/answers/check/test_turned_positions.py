"""Rotations that do not follow the position: the finding says what they follow, and right layouts are not accused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import CheckReport

from ...corpus.planted import D, E, H, Right, angles


class Rotated(Right):
    """Attention whose queries and keys, `batch heads seq head_dim`, are rotated by the angles of `table`."""

    def table(self, x: Tensor) -> Tensor:
        """Return the angles, `seq half` or what is broadcast to `batch heads seq half`."""
        return angles(x.shape[-2])

    def turn(self, x: Tensor) -> Tensor:
        table, (a, b) = self.table(x), x.chunk(2, -1)
        cos, sin = table.cos(), table.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.turn(q), self.turn(k), v


class HeadsFirst(Rotated):
    """The heads beside the batch: `(heads batch) seq head_dim`."""

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, D)).permute(2, 0, 1, 3).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (H, -1)).permute(1, 2, 0, 3).flatten(2)


class Complex(Rotated):
    """Pairs of features are complex numbers."""

    def turn(self, x: Tensor) -> Tensor:
        table = self.table(x)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(table), table)).flatten(-2)


class ByItem(Rotated):
    """The table is cut by the batch size."""

    def table(self, x: Tensor) -> Tensor:
        return angles(len(x))[:, None, None]


class ByItemHeadsFirst(HeadsFirst):
    """The same, where heads and batch are one axis."""

    def table(self, x: Tensor) -> Tensor:
        return angles(len(x) // H).repeat(H, 1)[:, None]


class ByHead(Rotated):
    """The table is cut by the number of heads."""

    def table(self, x: Tensor) -> Tensor:
        return angles(H)[:, None]


class AllTheSame(Rotated):
    """Every position is rotated as position 5."""

    def table(self, x: Tensor) -> Tensor:
        return angles(1, 5)


class Zero(Rotated):
    """Every position is position 0."""

    def table(self, x: Tensor) -> Tensor:
        return angles(1)


class Gated(Rotated):
    """Nothing is rotated; a mask of ones and one of zeros multiply."""

    def turn(self, x: Tensor) -> Tensor:
        return x * torch.ones(x.shape[-2], 1) + x * torch.zeros(x.shape[-2], 1)


BY_ITEM = "The rotation depends on the batch item instead of the position."
BY_HEAD = "The rotation depends on the head instead of the position."
ZERO = "Cosines and sines are applied, all of position 0: nothing is rotated."


def checked(kind: type[nn.Module], batch: int, length: int) -> CheckReport:
    torch.manual_seed(3)
    return mha_inspect.check(kind().eval(), torch.randn(batch, length, E))


def said(report: CheckReport) -> list[str]:
    return [finding.sentence for finding in report.findings if finding.check == "rotary"]


@pytest.mark.parametrize(
    ("kind", "batch", "length"),
    [
        (Rotated, 4, 4),
        (Rotated, 1, 7),
        (HeadsFirst, 2, 2),
        (Complex, 4, 3),
    ],
)
def test_right_layouts_are_not_accused(kind: type[nn.Module], batch: int, length: int) -> None:
    report = checked(kind, batch, length)
    assert said(report) == []
    assert "rotary" in {passed.check for passed in report.passed}


@pytest.mark.parametrize(("kind", "batch"), [(Rotated, 1), (HeadsFirst, 2)])
def test_a_single_token_is_not_accused(kind: type[nn.Module], batch: int) -> None:
    assert said(checked(kind, batch, 1)) == []


@pytest.mark.parametrize(
    ("kind", "batch", "length"),
    [
        (ByItem, 2, 7),
        (ByItem, 4, 4),
        (ByItemHeadsFirst, 3, 5),
    ],
)
def test_a_table_that_is_cut_by_the_batch_size(kind: type[nn.Module], batch: int, length: int) -> None:
    assert said(checked(kind, batch, length)) == [BY_ITEM]


@pytest.mark.parametrize("kind", [ByItem, ByItemHeadsFirst])
def test_with_one_batch_item_all_positions_are_position_0(kind: type[nn.Module]) -> None:
    assert said(checked(kind, 1, 7)) == [ZERO]


@pytest.mark.parametrize(("kind", "batch", "length"), [(ByHead, 4, 4), (ByHead, 2, 7)])
def test_a_table_that_is_cut_by_the_heads(kind: type[nn.Module], batch: int, length: int) -> None:
    assert said(checked(kind, batch, length)) == [BY_HEAD]


def test_every_position_is_position_0() -> None:
    assert said(checked(Zero, 2, 7)) == [ZERO]


def test_every_position_is_the_same_position() -> None:
    (sentence,) = said(checked(AllTheSame, 2, 7))
    assert sentence.startswith("All positions are rotated by the same angles")


def test_masks_of_ones_and_zeros_are_no_rotation() -> None:
    report = checked(Gated, 2, 7)
    assert said(report) == []
    assert "rotary" in {skipped.check for skipped in report.left_out}
