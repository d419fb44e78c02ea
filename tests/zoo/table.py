"""What the tables of configurations are written with."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from .oracle import Configuration


def of(path: str, *args: Any, **settings: Any) -> Callable[[], nn.Module]:
    """A function that makes a module, of a class by its path; settings that are such functions are called."""
    module, _, name = path.rpartition(".")

    def make() -> nn.Module:
        own = {key: value() if getattr(value, "makes", False) else value for key, value in settings.items()}
        made: nn.Module = getattr(import_module(module), name)(*(value() if getattr(value, "makes", False) else value for value in args), **own)
        return made

    make.makes = True  # type: ignore[attr-defined]
    return make


def given(text: str, below: int = 50) -> Callable[[], tuple[Any, ...]]:
    """A function that draws arguments: `2x13x42 i2x13` is a tensor of floats, and one of whole numbers."""

    def draw() -> tuple[Any, ...]:
        return tuple(_drawn(word, below) for word in text.split())

    return draw


def _drawn(word: str, below: int) -> torch.Tensor:
    shape = [int(size) for size in word.lstrip("ib").split("x")]
    if word.startswith("i"):
        return torch.randint(1, below, shape)
    return torch.ones(shape, dtype=torch.bool) if word.startswith("b") else torch.randn(shape)


def table(library: str, defaults: dict[str, Any], rows: dict[str, tuple[Any, ...]]) -> list[Configuration]:
    """Configurations of a library. A row: how it is made, its arguments, and what differs from the defaults."""
    made = []
    for name, (make, args, *more) in rows.items():
        expected = {**defaults, **(more[0] if more else {})}
        made.append(Configuration(f"{library}: {name}", make, given(args) if isinstance(args, str) else args, **expected))
    return made
