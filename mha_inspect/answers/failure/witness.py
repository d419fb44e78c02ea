"""See which call of torch raised, with its arguments, also where torch refused before it dispatched anything.

A function mode changes which path torch takes (its fast paths step aside when one is active), so none is on while a
forward is recorded for its own sake: this is for running once more what has failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.overrides import TorchFunctionMode, resolve_name


@dataclass(frozen=True)
class Call:
    """One call of a function of torch."""

    function: Any
    name: str
    """`torch.matmul`, `Tensor.view`, `F.linear`."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Witness(TorchFunctionMode):
    """The function mode that remembers the call which raised last."""

    def __init__(self) -> None:
        super().__init__()
        self._call: Call | None = None
        self._error: BaseException | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the call, and remember it if it raises."""
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self._call, self._error = Call(func, name_of(func), args, kwargs or {}), error
            raise

    def took(self, error: BaseException) -> Call | None:
        """The call that this error came out of; None where it came from elsewhere. Nothing is kept afterwards."""
        call = self._call if self._error is error else None
        # The error's traceback holds this object: what it holds in turn must go, or neither is ever freed.
        self._call = self._error = None
        return call


def name_of(function: Any) -> str:
    """What people call a function of torch: `torch.matmul`, `Tensor.view`, `F.linear`."""
    name = resolve_name(function) or getattr(function, "__qualname__", None) or str(function)
    for long, short in (("torch.nn.functional.", "F."), ("torch.Tensor.", "Tensor."), ("torch.functional.", "torch.")):
        if name.startswith(long):
            return short + name[len(long) :]
    return str(name)
