"""What is seen when a module runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..graph.attention import Attention
from ..naming.axes import AxisNames
from ..naming.named_run import NamedRun
from ..record.arguments import argument_names
from ..record.ops import Recording
from ..record.tensors import Stages, unshared
from ..record.xray import XRay


@dataclass(frozen=True)
class Run(NamedRun):
    """A recorded run, and the attentions in it."""

    returned: Any = None
    error: Exception | None = None
    """What it raised; None where it returned."""
    recorder: XRay | None = None
    """What recorded a run that raised, to be asked what any tensor of it is."""


def run_and_record(
    module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, keep: bool = False
) -> Run:
    """Run `module(*args, **kwargs)` once and record it, as far as it comes; with `keep` every tensor is kept.

    An exception that is no `Exception` (an interrupt) passes through.
    """
    recorder = XRay(module if isinstance(module, nn.Module) else None, keep=keep)
    recorder.take_inputs(argument_names(module, args, kwargs))
    try:
        with recorder:
            returned = module(*args, **kwargs)
    except Exception as error:
        # Not kept in a variable of this frame: the error's traceback holds the frame.
        return Run(recorder.finish(), error=error, recorder=recorder)
    return Run(recorder.finish(returned), returned=returned)


def keep_stages(recording: Recording, attentions: Sequence[tuple[Attention, AxisNames]]) -> Stages:
    """Return the tensors of each attention's stages, in memory of their own. The recording keeps none any longer."""
    values = recording.values
    stages = tuple(
        {stage: values[tensor.id] for stage, tensor in attention.stages.items()} for attention, _ in attentions
    )
    values.clear()
    return unshared(stages)
