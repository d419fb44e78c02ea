"""What diff runs, and how often: five forwards for a module against torch; and which weights go where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import DeviceError, InputError

from ..corpus.pairs import WIDTH, Attention, H, Shared, TorchsLayer

DIM, HEADS, BATCH, LENGTH = 22, 2, 3, 5


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def seen() -> Iterator[Counter]:
    """The forwards of both modules and of all their copies, counted by class and dtype."""
    forwards: Counter = Counter()

    def count(module, args):
        if isinstance(module, (Shared, TorchsLayer)):
            forwards[type(module), args[0].dtype] += 1

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    yield forwards
    handle.remove()


def test_five_forwards_are_enough_for_a_module_against_torch(x, seen):
    report = mha_inspect.diff(Shared(kv_heads=H).eval(), TorchsLayer().eval(), x, same_weights=True)
    assert (report.outcome, report.weights.whole) == ("same", True)
    # What torch's layer is without the weights shows where they belong; then both as they are, and in float64.
    assert seen == {
        (Shared, torch.float32): 1,
        (TorchsLayer, torch.float32): 2,
        (Shared, torch.float64): 1,
        (TorchsLayer, torch.float64): 1,
    }


def test_numbers_that_are_drawn_in_the_forward_are_no_rounding(x):
    torch.manual_seed(0)
    noisy = Attention(leave=lambda m, output: output + torch.randn_like(output))
    with pytest.raises(
        InputError, match="Attention draws random numbers in its forward, different ones in another dtype"
    ):
        mha_inspect.diff(noisy.eval(), Attention().eval(), x)


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
