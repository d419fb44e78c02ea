"""Rotations that do not follow the position: the finding says what they follow, and right layouts are not accused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.check import CheckReport

HEADS, WIDTH = 4, 8


def angles(length: int, start: int = 0) -> Tensor:
    """Return the angles of each position: `seq half`."""
    return torch.outer(torch.arange(start, start + length, dtype=torch.float32), 100.0 ** (-torch.arange(4) / 4))


class Rotated(nn.Module):
    """Attention whose queries and keys, `batch heads seq head_dim`, are rotated by the angles of `table`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)

    def table(self, x: Tensor) -> Tensor:
        """Return the angles, `seq half` or what is broadcast to `batch heads seq half`."""
        return angles(x.shape[-2])

    def turn(self, x: Tensor) -> Tensor:
        table, (a, b) = self.table(x), x.chunk(2, -1)
        cos, sin = table.cos(), table.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        q, k = self.turn(q), self.turn(k)
        return self.o(self.merge((q @ k.mT / WIDTH**0.5).softmax(-1) @ v))


class SeqFirst(Rotated):
    """The same for `seq batch embed`."""

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, WIDTH)).permute(1, 2, 0, 3)

    def merge(self, y: Tensor) -> Tensor:
        return y.permute(2, 0, 1, 3).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        t, b, _ = x.shape
        assert t + b > 0
        return super().forward(x)


class HeadsFirst(Rotated):
    """The heads beside the batch: `(heads batch) seq head_dim`."""

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, WIDTH)).permute(2, 0, 1, 3).flatten(0, 1)

    def merge(self, y: Tensor) -> Tensor:
        return y.unflatten(0, (HEADS, -1)).permute(1, 2, 0, 3).flatten(2)


class Buffers(Rotated):
    """Cosines and sines are buffers; `places` says which rows are used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", angles(64).cos())
        self.register_buffer("sin", angles(64).sin())

    def places(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[-2])

    def turn(self, x: Tensor) -> Tensor:
        (a, b), places = x.chunk(2, -1), self.places(x)
        cos, sin = self.cos[places], self.sin[places]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Complex(Rotated):
    """Pairs of features are complex numbers."""

    def turn(self, x: Tensor) -> Tensor:
        table = self.table(x)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(table), table)).flatten(-2)


class Partial(Rotated):
    """Only the first half of each head is rotated."""

    def turn(self, x: Tensor) -> Tensor:
        table = self.table(x)[..., :2]
        (a, b), rest = x[..., :4].chunk(2, -1), x[..., 4:]
        return torch.cat([a * table.cos() - b * table.sin(), b * table.cos() + a * table.sin(), rest], -1)


class ByItem(Rotated):
    """The table is cut by the batch size."""

    def table(self, x: Tensor) -> Tensor:
        return angles(len(x))[:, None, None]


class ByItemSeqFirst(SeqFirst, ByItem):
    """The same for `seq batch embed`."""


class ByItemComplex(Complex, ByItem):
    """The same with complex numbers."""


class ByItemPartial(Partial, ByItem):
    """The same of a part of each head."""


class ByItemBuffers(Buffers):
    """The same with buffers."""

    def places(self, x: Tensor) -> Tensor:
        return torch.arange(len(x))[:, None, None]


class ByHead(Rotated):
    """The table is cut by the number of heads."""

    def table(self, x: Tensor) -> Tensor:
        return angles(HEADS)[:, None]


class ByHeadHeadsFirst(HeadsFirst):
    """The same, where heads and batch are one axis."""

    def table(self, x: Tensor) -> Tensor:
        return angles(HEADS).repeat_interleave(len(x) // HEADS, 0)[:, None]


class ByItemHeadsFirst(HeadsFirst):
    """Cut by the batch size, where heads and batch are one axis."""

    def table(self, x: Tensor) -> Tensor:
        return angles(len(x) // HEADS).repeat(HEADS, 1)[:, None]


class AllTheSame(Rotated):
    """Every position is rotated as position 5."""

    def table(self, x: Tensor) -> Tensor:
        return angles(1, 5)


class Zero(Rotated):
    """Every position is position 0."""

    def table(self, x: Tensor) -> Tensor:
        return angles(1)


class ZeroBuffers(Buffers):
    """Every position is position 0."""

    def places(self, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[-2], dtype=torch.long)


class Gated(Rotated):
    """Nothing is rotated; a mask of ones and one of zeros multiply."""

    def turn(self, x: Tensor) -> Tensor:
        return x * torch.ones(x.shape[-2], 1) + x * torch.zeros(x.shape[-2], 1)


def checked(make: type[nn.Module], *shape: int) -> CheckReport:
    torch.manual_seed(3)
    return mha_inspect.check(make().eval(), torch.randn(*shape))


def said(report: CheckReport) -> list[str]:
    return [finding.sentence for finding in report.findings if finding.check == "rotary"]


RIGHT = [Rotated, SeqFirst, HeadsFirst, Buffers, Complex, Partial]


@pytest.mark.parametrize("shape", [(2, 7, 32), (3, 4, 32), (1, 7, 32), (4, 3, 32), (1, 2, 32), (2, 2, 32)], ids=str)
@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_right_layouts_are_not_accused(make: type[nn.Module], shape: tuple[int, ...]) -> None:
    given = (shape[1], shape[0], shape[2]) if make is SeqFirst else shape
    report = checked(make, *given)
    assert said(report) == []
    assert any(each.check == "rotary" for each in report.held)


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_a_single_token_is_not_accused(make: type[nn.Module]) -> None:
    assert said(checked(make, 1, 1, 32)) == []
    assert said(checked(make, 2, 1, 32) if make is not SeqFirst else checked(make, 1, 2, 32)) == []


BY_ITEM = [ByItem, ByItemSeqFirst, ByItemComplex, ByItemPartial, ByItemBuffers, ByItemHeadsFirst]


@pytest.mark.parametrize("make", BY_ITEM, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("batch", "length"), [(2, 7), (3, 5), (4, 4)])
def test_a_table_that_is_cut_by_the_batch_size(make: type[nn.Module], batch: int, length: int) -> None:
    shape = (length, batch, 32) if make is ByItemSeqFirst else (batch, length, 32)
    assert said(checked(make, *shape)) == ["The rotation depends on the batch item instead of the position."]


@pytest.mark.parametrize("make", BY_ITEM, ids=lambda make: make.__name__)
def test_with_one_batch_item_all_positions_are_position_0(make: type[nn.Module]) -> None:
    shape = (7, 1, 32) if make is ByItemSeqFirst else (1, 7, 32)
    assert said(checked(make, *shape)) == ["Cosines and sines are applied, all of position 0: nothing is rotated."]


@pytest.mark.parametrize("make", [ByHead, ByHeadHeadsFirst], ids=lambda make: make.__name__)
@pytest.mark.parametrize("shape", [(2, 7, 32), (1, 7, 32), (4, 4, 32)], ids=str)
def test_a_table_that_is_cut_by_the_heads(make: type[nn.Module], shape: tuple[int, ...]) -> None:
    assert said(checked(make, *shape)) == ["The rotation depends on the head instead of the position."]


@pytest.mark.parametrize("make", [Zero, ZeroBuffers], ids=lambda make: make.__name__)
def test_every_position_is_position_0(make: type[nn.Module]) -> None:
    assert said(checked(make, 2, 7, 32)) == ["Cosines and sines are applied, all of position 0: nothing is rotated."]


def test_every_position_is_the_same_position() -> None:
    (sentence,) = said(checked(AllTheSame, 2, 7, 32))
    assert sentence.startswith("All positions are rotated by the same angles")


def test_masks_of_ones_and_zeros_are_no_rotation() -> None:
    report = checked(Gated, 2, 7, 32)
    assert said(report) == []
    assert any(each.check == "rotary" and each.reason for each in report.left_out)
