"""The arguments of one forward, and what was decided about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..record.subject import Subject


@dataclass(frozen=True)
class Call:
    """The arguments of one forward, and what was decided about them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    described: str
    """`x float32 [2, 10, 512]`."""
    drawn: tuple[str, ...] = ()
    """Names of those that nobody gave: another forward's may stand in their place."""
    guessed: tuple[str, ...] = ()
    """Names of those among them of whose shape nobody said anything."""
    origin: str = "drawn from the seed"
    """Where those come from."""
    wider: Callable[[nn.Module], Call] | None = field(default=None, compare=False)
    """Where a size that we chose is one, the arguments of a copy of the module with another in its place."""

    def of(self, module: nn.Module) -> Subject:
        """The module with these arguments, ready to run."""
        wider = self.wider
        return Subject(
            module,
            self.args,
            self.kwargs,
            wider=None if wider is None else lambda other: wider(other).of(other),
        )


def described(values: Mapping[str, Any]) -> str:
    """Arguments by name, a tensor as its dtype and shape."""
    return ", ".join(f"{name} {_described(value)}" for name, value in values.items())


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_described, value))})"
    return str(value)
