"""One recorded run of a function or a module, for tests of what is read off it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mha_inspect.record.arguments import argument_names
from mha_inspect.record.ops import Recording
from mha_inspect.record.recorder import Recorder
from mha_inspect.record.xray import XRay


def record(module: Callable[..., Any], *args: Any, keep: bool = False, **kwargs: Any) -> tuple[Recording, Any]:
    """Run `module(*args, **kwargs)` once, and return its recording with fused kernels as they are, and what it gave."""
    return _recorded(Recorder, module, args, kwargs, keep)


def record_opened(module: Callable[..., Any], *args: Any, keep: bool = False, **kwargs: Any) -> tuple[Recording, Any]:
    """Do the same with fused kernels opened, as the program does."""
    return _recorded(XRay, module, args, kwargs, keep)


def _recorded(kind: type[Recorder], module: Any, args: Any, kwargs: Any, keep: bool) -> tuple[Recording, Any]:
    recorder = kind(module if isinstance(module, nn.Module) else None, keep=keep)
    recorder.take_inputs(argument_names(module, args, kwargs))
    with recorder:
        returned = module(*args, **kwargs)
    return recorder.finish(returned), returned
