"""What a forward may return that is no tensor of a number for each token: nobody is accused, and no command fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect


@dataclass
class Kept:
    y: Tensor


class Closed:
    """Holds a tensor where nobody looks."""

    def __init__(self, y: Tensor) -> None:
        self.__y = y


COMPARED: dict[str, Callable[[Tensor], Any]] = {
    "a loss and ids": lambda y: {"loss": y.mean(), "ids": y.argmax(-1)},
    "complex": lambda y: torch.complex(y, y),
    "sparse": Tensor.to_sparse,
    "nested": lambda y: torch.nested.nested_tensor([y[0], y[1, :3]]),
    "quantized": lambda y: torch.quantize_per_tensor(y.detach(), 0.1, 0, torch.qint8),
    "a dataclass": Kept,
}
NOTHING: dict[str, Callable[[Tensor], Any]] = {
    "ids": lambda y: y.argmax(-1),
    "nothing": lambda y: None,
    "an object": Closed,
    "numbers of numpy": lambda y: y.detach().numpy(),
    "no row": lambda y: y[:0],
}


class Returning(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self._made = make

    def forward(self, x: Tensor) -> Any:
        return self._made(self.attention(x, x, x)[0])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", [*COMPARED, *NOTHING])
def test_what_is_returned_accuses_nobody(name: str) -> None:
    module, x = Returning({**COMPARED, **NOTHING}[name]), torch.randn(2, 5, 8)
    report = mha_inspect.check(module, x)
    assert report.findings == ()
    reasons = {skipped.check: skipped.reason for skipped in report.left_out}
    assert (reasons.get("finite") == "the forward returns no tensor of numbers") == (name in NOTHING)


@pytest.mark.parametrize("name", ["a loss and ids", "sparse", "nested", "a dataclass"])
def test_what_is_returned_is_compared(name: str) -> None:
    module, changed, x = Returning(COMPARED[name]), Returning(COMPARED[name]), torch.randn(2, 5, 8)
    assert mha_inspect.diff(module, changed, x, same_weights=False).outcome == "differs"
    assert mha_inspect.diff(module, changed, x, same_weights=True).outcome == "same"


def test_an_imaginary_part_is_compared() -> None:
    x = torch.randn(2, 5, 8)
    once, again, twice = (Returning(lambda y, by=by: torch.complex(y.detach() * 0 + 1, by * y)) for by in (1, 1, 2))
    assert mha_inspect.diff(once, twice, x, same_weights=True).outcome == "differs"
    assert mha_inspect.diff(once, again, x, same_weights=True).outcome == "same"


class Slots(nn.Module):
    """A memory that goes through steps unchanged: a stage in one of them, and only read in another."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v, self.q, self.cell = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        slots, k, v = torch.linspace(-1, 1, 24).view(1, 3, 8).expand(len(x), 3, 8), self.k(x), self.v(x)
        for _ in range(2):
            weights = torch.einsum("bid,bjd->bij", self.q(slots), k).softmax(1)
            read = torch.einsum("bij,bjd->bid", weights / weights.sum(-1, keepdim=True), v)
            slots = self.cell(read.reshape(-1, 8), slots.reshape(-1, 8)).view(slots.shape)
        return slots


def test_what_one_look_holds_for_several_tensors_is_held_for_each() -> None:
    report = mha_inspect.check(Slots(), torch.randn(2, 5, 8))
    assert report.findings == ()
    assert "softmax" in {passed.check for passed in report.passed}
