"""Record a forward that may raise: what was recorded up to there, and what to ask the recorder about the rest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .arguments import argument_names
from .ops import Recording, TensorRef
from .xray import XRay


class AttemptRecorder(XRay):
    """A recorder that tells after the run what any tensor of it is."""

    def identify(self, tensor: torch.Tensor) -> TensorRef:
        """Return what the recording calls this tensor."""
        return self._catch_up().read(self._look(tensor, self._weak))

    def path_of(self, module: object) -> str:
        """Return the path of a module inside the recorded one; empty for that one itself, and for any other."""
        return self._path(module) or ""


@dataclass(frozen=True)
class Attempt:
    """A run that may have raised, and what was recorded of it."""

    recording: Recording
    recorder: AttemptRecorder
    returned: Any = None
    error: Exception | None = None
    """What it raised; None where it returned."""


def record_until_failure(
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keep: bool = False,
    watching: AbstractContextManager[Any] | None = None,
) -> Attempt:
    """Run `module(*args, **kwargs)`, under `watching` where it is given, and record it as far as it comes.

    With `keep` every tensor is kept. An exception that is no `Exception` (an interrupt) passes through.
    """
    recorder = AttemptRecorder(module if isinstance(module, nn.Module) else None, keep=keep)
    recorder.take_inputs(argument_names(module, args, kwargs))
    try:
        with recorder, watching or nullcontext():
            returned = module(*args, **kwargs)
    except Exception as error:
        # Not kept in a variable of this frame: the error's traceback holds the frame.
        return Attempt(recorder.finish(), recorder, None, error)
    return Attempt(recorder.finish(returned), recorder, returned)
