"""Record a forward that may raise: what was recorded up to there, and the operation that the error came out of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .ops import Op, Recording, Tensor
from .recorder import Recorder, argument_names, tensors_in


@dataclass(frozen=True)
class Attempt:
    """A run that may have raised, and what was recorded of it."""

    recording: Recording
    returned: Any = None
    error: Exception | None = None
    """What it raised; None where it returned."""


def record_until_failure(
    module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool = False
) -> Attempt:
    """Run `module(*args, **kwargs)` and record it as far as it comes; with `keep` every tensor is kept.

    An exception that is no `Exception` (an interrupt) passes through.
    """
    recorder = Recorder(module if isinstance(module, nn.Module) else None, keep=keep)
    recorder.take_inputs(argument_names(module, args, kwargs))
    try:
        with recorder:
            returned = module(*args, **kwargs)
    except Exception as error:
        # Not kept in a variable of this frame: the error's traceback holds the frame.
        return Attempt(recorder.finish(), None, error)
    return Attempt(recorder.finish(returned), returned)


class FailureRecorder(Recorder):
    """A recorder that notes the operation which raises, and still tells after the run what any tensor of it is."""

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__(root)
        self._failed: tuple[int, Op] | None = None

    def run(
        self,
        module: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        watching: AbstractContextManager[Any],
    ) -> Attempt:
        """Run `module(*args, **kwargs)` under `watching`, and record it as far as it comes."""
        self.take_inputs(argument_names(module, args, kwargs))
        try:
            with self, watching:
                returned = module(*args, **kwargs)
        except Exception as error:
            return Attempt(self.finish(), None, error)
        return Attempt(self.finish(returned), returned)

    def failed_with(self, error: Exception) -> Op | None:
        """The operation that this error came out of, without outputs; None where torch raised before it had any."""
        return self._failed[1] if self._failed is not None and self._failed[0] == id(error) else None

    def identify(self, tensor: torch.Tensor) -> Tensor:
        """What the recording calls this tensor."""
        return self._read(tensor)

    def path_of(self, module: object) -> str:
        """Path of a module inside the recorded one; empty for that one itself, and for any other."""
        return self._paths.get(id(module), "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and write it down; note it if it raises."""
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except Exception as error:
            # Of the error only its id: its traceback holds this recorder.
            if self.failed_with(error) is None:
                self._failed = (id(error), self._op(str(func), args, kwargs or {}))
            raise
        self._failed = None
        return result

    def _op(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op:
        source, module, call = self._where(sys._getframe(2))
        return Op(
            index=len(self._ops),
            name=name,
            args=(),
            kwargs={},
            inputs=tuple(self._read(tensor) for _, tensor in tensors_in((args, kwargs))),
            outputs=(),
            kind="compute",
            pointwise=False,
            source=source,
            module=module,
            call=call,
        )
