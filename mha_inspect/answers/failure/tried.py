"""Try the fix of a failing call before it is printed: run the call again with an operand edited.

A fix that is no edit of an operand has no edits; its cause has the evidence for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...record.arguments import parts_of, with_parts
from .call import Call
from .facts import Operand

Edit = Callable[[Tensor], Tensor]
"""What a fix makes of an operand."""

_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ipow__")
_VERBS = (
    *("apply", "build", "convert", "create", "cut", "divide", "give", "make", "multiply", "pass", "remove", "repeat"),
    *("replace", "run", "split", "swap", "take", "use"),
)
"""The first words of fixes that are no code. Names in code keep their case."""
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Operands of other classes may belong to several ranks, and a call with them may wait for the others."""


@dataclass(frozen=True)
class Fix:
    """A clause that says what to write, and how to try it on the operands of the failing call."""

    text: str
    edits: Sequence[tuple[Operand, Edit]] = ()
    shape: tuple[int, ...] | None = None
    """The shape that the result must have; None for any."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments to replace."""
    function: Callable[..., Any] | None = None
    """What to call instead of the failing function; None for the same function."""

    @property
    def is_tried(self) -> bool:
        """Whether the failing call must run with it before it is printed."""
        return bool(self.edits or self.settings) or self.function is not None


def fix_that_runs(call: Call, fixes: Iterable[Fix]) -> str:
    """Return the fixes with which the call runs as a sentence; empty without one."""
    texts = [fix.text for fix in fixes if not fix.is_tried or runs(call, fix)]
    if not texts:
        return ""
    sentence = f"{', or '.join(texts)}."
    return f"{sentence[0].upper()}{sentence[1:]}" if sentence.partition(" ")[0] in _VERBS else sentence


def runs(call: Call, fix: Fix) -> bool:
    """Return whether the failing call runs with a fix, on the real operands. Nothing that it reads is changed."""
    function = fix.function or call.function
    tensors = _tensors((call.args, dict(call.kwargs)))
    if function is None or any(type(tensor) not in _PLAIN for tensor in tensors):
        return False
    devices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            edited = {id(operand.given.value): edit(operand.given.value) for operand, edit in fix.edits}
            if _changes_operands(call):
                edited = {id(tensor): edited.get(id(tensor), tensor).clone() for tensor in tensors}
            args, kwargs = (_with(value, edited) for value in (call.args, dict(call.kwargs)))
            result = function(*args, **{**kwargs, **fix.settings})
    except Exception:  # user code may raise anything, and so may torch
        return False
    return fix.shape is None or (isinstance(result, Tensor) and result.shape == fix.shape)


def _changes_operands(call: Call) -> bool:
    """Return whether a call writes into an operand."""
    if "out" in call.kwargs:
        return True
    if call.name.startswith("aten."):
        return call.name.split(".")[1].endswith("_")
    method = call.name.rpartition(".")[2]
    is_dunder = method.endswith("__")
    return method in _IN_PLACE or (method.endswith("_") and not is_dunder)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    tensors = []
    for _, part in parts_of(value):
        tensors += _tensors(part)
    return tensors


def _with(value: Any, edited: Mapping[int, Tensor]) -> Any:
    """Return an argument with its tensors replaced."""
    if isinstance(value, Tensor):
        return edited.get(id(value), value)
    parts = parts_of(value)
    return with_parts(value, [_with(part, edited) for _, part in parts]) if parts else value


def resized(dimension: int, size: int) -> Edit:
    """Return an edit that cuts a dimension to a size, or fills it up with zeros."""

    def edit(tensor: Tensor) -> Tensor:
        if tensor.shape[dimension] >= size:
            return tensor.narrow(dimension, 0, size)
        more = [*tensor.shape]
        more[dimension] = size - tensor.shape[dimension]
        return torch.cat([tensor, tensor.new_zeros(more)], dimension)

    return edit


def of_shape(shape: Sequence[int], dtype: torch.dtype | None = None) -> Edit:
    """Return an edit that gives zeros of this shape, for a tensor that another part of the forward must make."""
    return lambda tensor: tensor.new_zeros(tuple(shape), dtype=dtype or tensor.dtype)
