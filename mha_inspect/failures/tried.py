"""Try the fix of a failing call before it is printed: run the call again with an operand edited.

A fix that is no edit of an operand has no edits; its cause has the evidence for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..record.arguments import parts_of, with_parts
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

    @classmethod
    def editing(cls, operand: Operand, edit: Edit, way: str, shape: tuple[int, ...] | None = None) -> Fix:
        """Return the fix that edits one operand: `way` says how to write it."""
        return cls(way, [(operand, edit)], shape)


def fix_that_runs(call: Call, fixes: Iterable[Fix]) -> str:
    """Return the fixes with which the call runs as a sentence; empty without one."""
    texts = []
    for fix in fixes:
        if not fix.is_tried or runs(call, fix):
            texts.append(fix.text)
    if not texts:
        return ""
    sentence = f"{', or '.join(texts)}."
    first_word = sentence.partition(" ")[0]
    if first_word in _VERBS:
        return f"{sentence[0].upper()}{sentence[1:]}"
    return sentence


def runs(call: Call, fix: Fix) -> bool:
    """Return whether the failing call runs with a fix, on the real operands. Nothing that it reads is changed."""
    function = fix.function or call.function
    if function is None:
        return False
    tensors = _tensors((call.args, dict(call.kwargs)))
    if any(type(tensor) not in _PLAIN for tensor in tensors):
        return False
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    try:
        with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
            replaced = _replaced_by(fix)
            if _changes_operands(call):
                replaced = _copies(tensors, replaced)
            args = _with(call.args, replaced)
            kwargs = _with(dict(call.kwargs), replaced)
            kwargs.update(fix.settings)
            result = function(*args, **kwargs)
    except Exception:  # user code may raise anything, and so may torch
        return False
    if fix.shape is None:
        return True
    return isinstance(result, Tensor) and result.shape == fix.shape


def _replaced_by(fix: Fix) -> dict[int, Tensor]:
    """Return the edited operands, by the id of the tensor that they replace."""
    replaced = {}
    for operand, edit in fix.edits:
        tensor = operand.given.value
        replaced[id(tensor)] = edit(tensor)
    return replaced


def _copies(tensors: Iterable[Tensor], replaced: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return a copy of each tensor, or of the edited one in its place: a call may write into it."""
    copies = {}
    for tensor in tensors:
        source = replaced.get(id(tensor), tensor)
        copies[id(tensor)] = source.clone()
    return copies


def _changes_operands(call: Call) -> bool:
    """Return whether a call writes into an operand."""
    if "out" in call.kwargs:
        return True
    if call.name.startswith("aten."):
        operation = call.name.split(".")[1]
        return operation.endswith("_")
    method = call.name.rpartition(".")[2]
    if method.endswith("__"):
        return method in _IN_PLACE
    return method.endswith("_")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    tensors = []
    for _, part in parts_of(value):
        tensors += _tensors(part)
    return tensors


def _with(value: Any, replaced: Mapping[int, Tensor]) -> Any:
    """Return an argument with its tensors replaced."""
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    parts = parts_of(value)
    if not parts:
        return value
    return with_parts(value, [_with(part, replaced) for _, part in parts])


def resized(dimension: int, size: int) -> Edit:
    """Return an edit that cuts a dimension to a size, or fills it up with zeros."""

    def edit(tensor: Tensor) -> Tensor:
        length = tensor.shape[dimension]
        if length >= size:
            return tensor.narrow(dimension, 0, size)
        shape_of_zeros = list(tensor.shape)
        shape_of_zeros[dimension] = size - length
        zeros = tensor.new_zeros(shape_of_zeros)
        return torch.cat([tensor, zeros], dimension)

    return edit


def of_shape(shape: Sequence[int], dtype: torch.dtype | None = None) -> Edit:
    """Return an edit that gives zeros of this shape, for a tensor that another part of the forward must make."""

    def edit(tensor: Tensor) -> Tensor:
        return tensor.new_zeros(
            tuple(shape),
            dtype=dtype or tensor.dtype,
        )

    return edit


def transposed(first: int, second: int) -> Edit:
    """Return an edit that swaps two dimensions: `-2` and `-1` for `x.mT`."""

    def edit(tensor: Tensor) -> Tensor:
        return tensor.transpose(first, second)

    return edit


def cut(dimension: int, start: int, length: int) -> Edit:
    """Return an edit that keeps a range of a dimension: `x[start : start + length]` for dimension 0."""

    def edit(tensor: Tensor) -> Tensor:
        return tensor.narrow(dimension, start, length)

    return edit


def widened(place: int) -> Edit:
    """Return an edit that adds a dimension of size 1: `x[:, None]` for place 1."""

    def edit(tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(place)

    return edit


def to_dtype(dtype: str) -> Edit:
    """Return an edit that converts to a dtype of torch: `float16`."""
    torch_dtype: torch.dtype = getattr(torch, dtype)

    def edit(tensor: Tensor) -> Tensor:
        return tensor.to(torch_dtype)

    return edit
