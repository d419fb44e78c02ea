"""Modules that break in a way of a test's choosing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Breaks(nn.Module):
    """Splits into 3 heads of 8, draws random numbers, counts its calls, then breaks in a way of the test's choosing."""

    def __init__(self, broken: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(7)
        self.broken = broken
        self.calls = 0
        self.made: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        heads = torch.dropout(self.proj(self.norm(x)), 0.5, True).view(2, 7, 3, 8)
        self.made.append(weakref.ref(heads))
        return self.broken(heads)


class Block(nn.Module):
    """Calls a function, and counts how often its own functions are called."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.proj, self.qkv = nn.Linear(24, 24), nn.Linear(24, 120)
        self.body, self.calls = body, 0

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self, x)


class Clashing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(2, 7, 3, 8).transpose(1, 2)
        k = self.k(x).view(2, 7, 3, 8)
        return q @ k.transpose(-2, -1)
