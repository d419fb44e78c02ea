"""Refuse a forward that would not fit in memory before it is tried, where that is sure, and say what would.

Nothing is known of a target's code: its forward is run on meta, by a copy of it that has shapes and no memory. What
cannot be told so is let pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..record.copying import copy_module
from ..record.subject import Subject
from .fit import SAFE
from .footprint import given_bytes, kept_bytes, peak_bytes
from .inputs import Asked, make_call
from .memory import free_memory, largest, require_memory
from .target import Target

_HEADS = 64
"""More heads than most have."""
_HELD = 1.5
"""What a forward's own names hold on to after its last use, beside what has to be there."""


@dataclass
class Room:
    """What a command holds of its targets' runs at one time, one target after the other."""

    kept: bool = False
    """Whether every tensor of a run is kept, and not only what has to be there at one time."""
    exact: bool = False
    """Whether a run in float64 is kept beside it, to measure rounding against."""
    shapes_do: bool = False
    """Whether the command has an answer for shapes without numbers."""
    taken: int = 0
    """Bytes that the targets before this one will take."""

    def require(self, target: Target, asked: Asked) -> None:
        """Let it pass where the forward of one more target fits, or where that cannot be told.

        Importing what meta needs takes a second: it is spent only where a rough estimate comes near to what is free.

        Args:
            target: a module that was built.
            asked: what its inputs are to be.

        Raises:
            DoesNotFitError: the tensors that have to be there at one time take more than is free.
        """
        first = next(target.module.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        free = free_memory(device)
        if free is None or any(map(is_lazy, target.module.parameters())):
            return
        if _rough_need(target.module, asked) * SAFE < free:
            return
        try:
            meta = replace(target, module=_on_meta(target.module))
            need, described = self._need(meta, asked)
        except Exception:  # whatever somebody's code may raise where there are shapes and no numbers
            return
        self.taken += need
        if self.taken <= free:
            return
        share = need / self.taken
        best = 0
        if not asked.shapes and asked.inputs.input is None and asked.inputs.attn_mask is None:

            def fits(seq_len: int) -> bool:
                inputs = replace(asked.inputs, seq_len=seq_len, padding=())
                return self._need(meta, replace(asked, inputs=inputs), held=_HELD)[0] <= share * free

            try:
                best = largest(fits, asked.inputs.seq_len)
            except Exception:  # a length that it cannot take
                best = 0
        way_out = f"The largest seq_len that fits is {best}." if best else "Try a smaller batch, length or model."
        way_out += " --device meta shows every shape without memory." if self.shapes_do else ""
        beside = ", with what it is compared with," if self.taken > need else ""
        require_memory(self.taken, device, f"{target.name} on {described}{beside}", way_out)

    def _need(self, meta: Target, asked: Asked, *, held: float = 1.0) -> tuple[int, str]:
        """Bytes that have to be there at one time beside the module itself, and what its forward was called with."""
        with torch.device("meta"), torch.no_grad():
            call = make_call(meta, asked)
            recording = Subject(meta.module, call.args, call.kwargs).recorded().recording
        own = sum(t.numel() * t.element_size() for t in (*meta.module.parameters(), *meta.module.buffers()))
        given = given_bytes(recording)
        run = kept_bytes(recording) if self.kept else int(held * peak_bytes(recording))
        first = next((p for p in meta.module.parameters() if p.is_floating_point()), None)
        size = 8 if first is None else first.element_size()
        # In training mode, and of what is in float64 itself, it may do without.
        exact = (given + run) * 8 // size if self.exact and size < 8 and not meta.module.training else 0
        return max(0, given - own) + run + exact, call.described


def _rough_need(module: nn.Module, asked: Asked) -> int:
    """More bytes than most modules take, by the sizes of their parameters and inputs."""
    parameters = list(module.parameters())
    held = sum(p.numel() * p.element_size() for p in parameters)
    # Not the number of tokens: the other side of an embedding is as wide as what runs through.
    width = max((sorted(p.shape)[-2] for p in parameters if p.dim() > 1), default=512)
    layers = sum(next(part.parameters(recurse=False), None) is not None for part in module.modules()) or 1
    inputs = asked.inputs
    length = max(inputs.seq_len, inputs.key_len or 0, *(max(shape.shape) for shape in asked.shapes.values()), 1)
    rows = max(inputs.batch * length, *(prod(shape.shape) for shape in asked.shapes.values()), 1)
    return 3 * held + 8 * layers * (rows * length * _HEADS // 4 + rows * width * 4)


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy without memory."""
    held: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        held[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        held[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy_module(module, held)
