"""What diff runs, and how often: five forwards for a module against torch; and which weights go where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import DeviceError, InputError

DIM, HEADS, BATCH, LENGTH = 22, 2, 3, 5


class Own(nn.Module):
    """Written out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class LowRank(nn.Module):
    """Keys and values through a narrower layer: their matrices have 7 columns."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.up, self.o = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 7),
            nn.Linear(7, 2 * DIM),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.q(x), *self.up(self.down(x)).chunk(2, -1))
        )
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def seen() -> Iterator[Counter]:
    """The forwards of both modules and of all their copies, counted by class and dtype."""
    forwards: Counter = Counter()

    def count(module, args):
        if isinstance(module, (Own, Torch)):
            forwards[type(module), args[0].dtype] += 1

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    yield forwards
    handle.remove()


def test_five_forwards_are_enough_for_a_module_against_torch(x, seen):
    report = mha_inspect.diff(Own().eval(), Torch().eval(), x, same_weights=True)
    assert (report.outcome, report.weights.whole) == ("same", True)
    # What torch's layer is without the weights shows where they belong; then both as they are, and in float64.
    assert seen == {
        (Own, torch.float32): 1,
        (Torch, torch.float32): 2,
        (Own, torch.float64): 1,
        (Torch, torch.float64): 1,
    }


class Drawing(Own):
    """Adds noise of its own, in eval mode as well."""

    def forward(self, x):
        return super().forward(x) + torch.randn_like(x)


def test_numbers_that_are_drawn_in_the_forward_are_no_rounding(x):
    torch.manual_seed(0)
    with pytest.raises(
        InputError, match="Drawing draws random numbers in its forward, different ones in another dtype"
    ):
        mha_inspect.diff(Drawing().eval(), Own().eval(), x)


def test_what_has_no_numbers_is_not_compared():
    layer = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
    empty, meta = torch.zeros(BATCH, 0, DIM), torch.zeros(BATCH, LENGTH, DIM, device="meta")
    with pytest.raises(InputError, match=r"returns \[3, 0, 22\], which has no numbers to compare"):
        mha_inspect.diff(layer, layer, empty, empty, empty)
    with pytest.raises(InputError, match="no numbers to compare"):
        mha_inspect.compare_heads((1, 2), lambda heads: nn.MultiheadAttention(DIM, heads), empty, empty, empty)
    on_meta = nn.MultiheadAttention(DIM, HEADS, batch_first=True, device="meta")
    with pytest.raises(DeviceError, match="no numbers to compare"):
        mha_inspect.diff(on_meta, on_meta, meta, meta, meta)


def test_weights_of_other_sizes_are_said_to_be_so(x):
    report = mha_inspect.diff(LowRank().eval(), Own().eval(), x, same_weights=True)
    assert report.weights.sentence.endswith(", as far as they fit.")
    assert report.weights.left_out[0].startswith("W_k and W_v ")
    assert "[22, 7] in LowRank" in report.weights.left_out[0]


class ByMatrix(nn.Module):
    """A projection as `x @ weight`, with the names and the shapes of a square nn.Linear."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inner, outer)), nn.Parameter(torch.randn(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class Square(nn.Module):
    def __init__(self, make: type[nn.Module]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (make(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (side(x).unflatten(-1, (4, 6)).transpose(1, 2) for side in (self.q, self.k, self.v))
        return self.o(((q @ k.mT / 6**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_square_weights_that_are_read_transposed_are_copied_by_head():
    torch.manual_seed(0)
    sides, x = (Square(nn.Linear).eval(), Square(ByMatrix).eval()), torch.randn(2, 5, 24)
    report = mha_inspect.diff(*sides, x, same_weights=True)
    assert report.weights.whole
    assert report.weights.sentence.startswith("Copied by head")
    assert "q.weight, k.weight, v.weight and 1 more transposed" in report.weights.sentence
    assert all(stage.verdict == "same" for stage in report.stages)
