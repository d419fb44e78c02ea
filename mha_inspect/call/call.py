"""The arguments of one forward, what was decided about them, and what the forward does wrong with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from ..build.importing import in_one_line
from ..errors import ExitCode, MhaInspectError, is_out_of_memory
from ..running.subject import Subject


@dataclass(frozen=True)
class Call:
    """The arguments of one forward, and what was decided about them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    described: str
    """`x float32 [2, 10, 512]`."""
    drawn: tuple[str, ...] = ()
    """Names of the tensors in whose place another forward's may stand: nobody gave them."""
    guessed: Mapping[str, str] = field(default_factory=dict)
    """Those among them of whose shape nobody said anything, with the shape that they got: `2x10x512:float32`."""
    origin: str = "drawn from the seed"
    """Where those come from."""
    batch_first: bool = True
    """Whether sequences are `batch sequence ...`, and not `sequence batch ...`."""
    said: tuple[str, ...] = ()
    """What else was decided about them, as sentences."""

    def of(self, module: nn.Module) -> Subject:
        """Return the module with these arguments, ready to run."""
        return Subject(module, self.args, self.kwargs)

    @property
    def told(self) -> tuple[str, ...]:
        """What the forward was called with and why, as sentences; empty where it takes nothing."""
        if not self.described:
            return self.said
        were = "was" if len(self.drawn) == 1 else "were"
        drawn = f" {', '.join(self.drawn)} {were} {self.origin}." if self.drawn else ""
        return (f"The forward was called with {self.described}.{drawn}", *self.said)

    @property
    def hint(self) -> str:
        """How to call it with other inputs than those that were guessed; empty where none were."""
        ways = [f"--input-shape {name}={shape}" for name, shape in self.guessed.items()]
        hint = f"If that is not what it takes: {' '.join(ways)}, or --set." if ways else ""
        masks = [name for name, value in self.kwargs.items() if value is None and "mask" in name]
        return f"{hint} No mask was given: {masks[0]} is made by --causal or --padding." if hint and masks else hint


class TargetFailedError(MhaInspectError):
    """The target's own forward raised."""

    exit_code = ExitCode.CONDITION


@contextmanager
def explaining(subject: Subject, how: str = "") -> Iterator[None]:
    """Run a subject inside: an error of its forward is raised as one that says how it was called, and a way out.

    Any other is a fault of ours and stays as it is, as does that of a module which somebody made: who calls the library
    sees their own. `how` says how it was built.
    """
    try:
        yield
    except Exception as error:
        of_forward = any(frame.f_code is nn.Module._call_impl.__code__ for frame, _ in walk_tb(error.__traceback__))
        if not subject.label or isinstance(error, MhaInspectError) or is_out_of_memory(error) or not of_forward:
            raise
        called = subject.described or "a call without tensors"
        said = f"{subject.label}{how} failed on {called}: {in_one_line(error)}. {way_out(subject)}"
        raise TargetFailedError(said.rstrip()) from error


def way_out(subject: Subject) -> str:
    """Return how to call a forward that raised otherwise, as a sentence: in training mode, where it runs so.

    Empty where nothing was guessed.
    """
    if subject.module.training:
        return subject.hint
    try:
        with torch.no_grad(), subject.apart() as fresh:
            fresh.module.train()
            fresh.plain()
    except Exception:  # it has another reason
        return subject.hint
    return "It runs in training mode: --train."
