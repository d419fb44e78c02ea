"""What a forward may return that is no tensor of a number for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


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
