"""The random generator is left as one plain call leaves it, whatever is measured afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.running.subject import seed_everything

from .base import Base
from .every import ENTRIES, entries


class DropsByHand(Base):
    """Weights that are dropped by a mask of uniform numbers."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        if self.training:
            weights = weights * (torch.rand_like(weights) > 0.1) / 0.9
        return weights @ v


class DropsInTheKernel(Base):
    """Weights that are dropped inside of the fused attention, and what is projected before it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = nn.functional.dropout(k, 0.1, self.training)
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)


class DropsCoins(Base):
    """Keys that are kept by a coin whose share is computed of them, and noise of numpy."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full_like(k, 0.9))
        noise = torch.from_numpy(np.random.rand(*v.shape)).to(v)
        return nn.functional.scaled_dot_product_attention(q, k * kept, v + noise)


@torch.library.custom_op("mha_inspect_tests::noisy", mutates_args=())
def noisy(values: Tensor) -> Tensor:
    """Draw inside of an operation that no catalog knows."""
    return values + torch.rand(values.shape)


class DrawsInAnOperation(Base):
    """Keys with noise that an operation of the user draws."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, noisy(k), v)


def _encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(22, 2, 16, dropout=0.1, batch_first=True)


class TakesOneInput(nn.Module):
    """A layer of torch that takes queries, keys and values, given the same three."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(24, 4, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attend(x, x, x)[0]
        return attended


DROPPING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "torch": (TakesOneInput, (7, 3, 24)),
    "by hand": (DropsByHand, (2, 7, 22)),
    "kernel": (DropsInTheKernel, (2, 7, 22)),
    "coins": (DropsCoins, (2, 7, 22)),
    "an operation of the user": (DrawsInAnOperation, (2, 7, 22)),
    "encoder": (_encoder_layer, (2, 7, 22)),
}


def states_after(call: Callable[[], object]) -> tuple[float, int, int]:
    """Return what torch, numpy and Python draw next, after a call that begins at seed 0."""
    seed_everything(0)
    call()
    return float(torch.rand(())), int(np.random.randint(1 << 30)), random.getrandbits(30)


def require_same_states(module: nn.Module, *args: object, **kwargs: object) -> None:
    plain = states_after(lambda: module(*args, **kwargs))
    assert states_after(lambda: mha_inspect.trace(module, *args, **kwargs)) == plain, "trace"
    assert states_after(lambda: mha_inspect.trace(module, *args, keep=True, **kwargs)) == plain, "trace, kept"

    def recorded() -> None:
        with mha_inspect.recording() as block:
            module(*args, **kwargs)
        assert block.trace is not None

    assert states_after(recorded) == plain, "recording"


@pytest.mark.parametrize("name", DROPPING)
def test_a_module_that_drops_leaves_the_generator_as_one_call(name: str) -> None:
    make, shape = DROPPING[name]
    torch.manual_seed(0)
    module, other, x = make().train(), make().train(), torch.randn(shape)
    require_same_states(module, x)
    untouched = states_after(lambda: None)
    assert states_after(lambda: mha_inspect.params(module, x, per_head=True)) == untouched
    assert states_after(lambda: mha_inspect.check(module, x)) == untouched
    assert states_after(lambda: mha_inspect.diff(module, other, x)) == untouched


@pytest.mark.parametrize("name", entries())
def test_an_entry_in_training_leaves_the_generator_as_one_call(name: str) -> None:
    entry = ENTRIES[name]
    module, (args, kwargs) = entry.made().train(), entry.arguments()
    with torch.set_grad_enabled(entry.grad):
        plain = states_after(lambda: module(*args, **kwargs))
        assert states_after(lambda: mha_inspect.trace(module, *args, **kwargs)) == plain
