"""An edit of a failing call, as data: what its operands are made into, tried on the real call, and written as code.

    Change(k, (("transpose", 1, 2), ("flatten", -2)))       k.transpose(1, 2).flatten(-2)

A step is a method of tensors with its arguments. The same steps make the tensor, the names of its axes, and the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..record.arguments import parts_of, with_parts
from .call import Call
from .facts import Dims, Operand, Shape

Step = tuple[Any, ...]
"""The name of a method of tensors, and its arguments: `("transpose", 1, 2)`. An index is `("__getitem__", index)`."""

SWAP = ("transpose", -2, -1)
"""The step that swaps the last two dimensions."""
_TURNS = ("transpose", "permute")
_IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__", "__ipow__")
PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""Operands of other classes may belong to several ranks, and a call with them may wait for the others."""


@dataclass(frozen=True, eq=False)
class Change:
    """What one operand is made into."""

    operand: Operand
    steps: Sequence[Step]
    inside: bool = False
    """Whether the steps come before the swap of the last two dimensions: those of `k` in `k.mT`."""

    @property
    def all_steps(self) -> list[Step]:
        """The steps from the operand itself."""
        return [SWAP, *self.steps, SWAP] if self.inside else list(self.steps)

    def apply(self, tensor: Tensor) -> Tensor:
        """Return what a tensor is made into."""
        for name, *arguments in self.all_steps:
            method = _OWN.get(name) or getattr(type(tensor), name)
            tensor = method(tensor, *arguments)
        return tensor

    @property
    def dims(self) -> Dims:
        """The names of the axes of each dimension, where the steps keep them."""
        dims = self.operand.dims
        for name, *arguments in self.all_steps:
            dims = _MOVES[name](dims, *arguments) if name in _MOVES else dims
        return dims

    @property
    def code(self) -> str:
        """How to write it: `mask[:, None]`, `k.transpose(1, 2)`."""
        if self.operand.source and not self.inside and all(name in _TURNS for name, *_ in self.steps):
            return self._turned
        code = self.operand.variable if self.inside else self.operand.code
        for name, *arguments in self.steps:
            code = _CODES[name](code, *arguments) if name in _CODES else f"{code}.{name}({_listed(arguments)})"
        return code

    @property
    def _turned(self) -> str:
        """One transpose of the source of the operand, for its own and those of the steps."""
        dims = unnamed(self.operand.order)
        for name, *arguments in self.steps:
            dims = _MOVES[name](dims, *arguments)
        order = [int(dim[0]) for dim in dims]
        moved = [place for place, to in enumerate(order) if place != to]
        if not moved:
            return self.operand.source
        if moved == [len(order) - 2, len(order) - 1]:
            return f"{self.operand.source}.transpose(-2, -1)"
        if len(moved) == 2:
            return f"{self.operand.source}.transpose({_listed(moved)})"
        return f"{self.operand.source}.permute({_listed(order)})"


@dataclass(frozen=True, eq=False)
class Edit:
    """A suspected cause of a failing call, and the change with which the call would run."""

    cause: str
    """One of `causes.CAUSES`."""
    why: str
    """What is wrong, as sentences with the real numbers."""
    changes: Sequence[Change] = ()
    way: str = ""
    """What to write, as a clause that begins with a verb; empty for the code of the change."""
    note: str = ""
    """What follows the code: `if 0 means masked out`."""
    cost: int = 1
    """How far it is from the code as it stands."""
    shape: Shape | None = None
    """The shape that the result must have; None for any."""
    args: Sequence[Any] | None = None
    """All positional arguments of the call, if they are others; its keyword arguments are then `kwargs` alone."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the call to replace."""
    function: Callable[..., Any] | None = None
    """What to call instead of the failing function; None for the same function."""

    @property
    def is_tried(self) -> bool:
        """Whether the failing call can show that it is right."""
        return bool(self.changes or self.kwargs) or self.args is not None or self.function is not None

    @property
    def text(self) -> str:
        """The clause that says what to write; empty if nothing is known to be right."""
        if self.way or not self.changes:
            return self.way
        if not all(change.operand.is_code for change in self.changes):
            return ""
        code = " and ".join(dict.fromkeys(change.code for change in self.changes))
        return f"{code} {self.note}" if self.note else code


def sentence(edits: Iterable[Edit]) -> str:
    """Return what to write as a sentence: all of several ways."""
    texts = [edit.text for edit in edits if edit.text]
    unique = list(dict.fromkeys(texts))
    if not unique:
        return ""
    joined = ", or ".join(unique)
    is_clause = any(edit.way == unique[0] for edit in edits)
    return f"{joined[0].upper()}{joined[1:]}." if is_clause else f"{joined}."


# -- names and code of steps ------------------------------------------------------------------------------------------


def _transposed(dims: Dims, first: int, second: int) -> Dims:
    dims = list(dims)
    dims[first], dims[second] = dims[second], dims[first]
    return dims


def _indexed(dims: Dims, index: tuple[Any, ...]) -> Dims:
    """Return the names after new dimensions of size one; a cut keeps the names."""
    result: Dims = []
    rest = list(dims)
    for part in index:
        if part is None:
            result.append(["1"])
        elif part is not ... and rest:
            result.append(rest.pop(0))
    return [*result, *rest]


def _flattened(dims: Dims, first: int, last: int = -1) -> Dims:
    first %= len(dims)
    last %= len(dims)
    joined = [name for dim in dims[first : last + 1] for name in dim]
    return [*dims[:first], joined, *dims[last + 1 :]]


def _unflattened(dims: Dims, place: int, sizes: Sequence[int]) -> Dims:
    place %= len(dims)
    return [*dims[:place], *unnamed(sizes), *dims[place + 1 :]]


def _created(dims: Dims, shape: Sequence[int]) -> Dims:
    return dims if len(shape) == len(dims) else unnamed(shape)


def unnamed(shape: Sequence[int]) -> Dims:
    """Return the names of dimensions of which only the sizes are known."""
    return [[str(size)] for size in shape]


_MOVES: dict[str, Callable[..., Dims]] = {
    "transpose": _transposed,
    "permute": lambda dims, *order: [dims[place] for place in order],
    "__getitem__": _indexed,
    "unsqueeze": lambda dims, place: [*dims[:place], ["1"], *dims[place:]],
    "flatten": _flattened,
    "unflatten": _unflattened,
    "view": lambda _, *shape: unnamed(shape),
    "new_zeros": _created,
}
"""What a step makes of the names of the axes of each dimension."""


def _created_on(tensor: Tensor, device: str) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)


_OWN: dict[str, Callable[..., Tensor]] = {"created_on": _created_on}
"""Steps that are no methods of tensors."""


def _listed(arguments: Sequence[Any]) -> str:
    return ", ".join(map(str, arguments))


def _written_index(code: str, index: tuple[Any, ...]) -> str:
    """Return `mask[:, None]` or `mask[..., :7]`."""
    parts = []
    for part in index:
        if isinstance(part, slice):
            parts.append(f"{'' if part.start is None else part.start}:{'' if part.stop is None else part.stop}")
        else:
            parts.append("..." if part is ... else str(part))
    return f"{code}[{', '.join(parts)}]"


_CODES: dict[str, Callable[..., str]] = {
    "__getitem__": _written_index,
    "eq": lambda code, number: f"{code} == {number}",
    "repeat_interleave": lambda code, times, dim: f"{code}.repeat_interleave({times}, dim={dim})",
}
"""How a step is written behind its operand, where that is no call of a method by position."""


# -- trying -----------------------------------------------------------------------------------------------------------


def runs(call: Call, edit: Edit) -> bool:
    """Return whether the failing call runs with an edit, on the real operands. Nothing that it reads is changed."""
    function = edit.function or call.function
    if function is None:
        return False
    args = call.args if edit.args is None else edit.args
    tensors = _tensors((args, dict(call.kwargs)))
    if any(type(tensor) not in PLAIN for tensor in tensors):
        return False
    devices = {tensor.get_device() for tensor in tensors if tensor.is_cuda}
    try:
        with torch.no_grad(), torch.random.fork_rng(sorted(devices)):
            replaced = _changed(edit.changes)
            if _changes_operands(call):
                replaced = {id(tensor): replaced.get(id(tensor), tensor).clone() for tensor in tensors}
            kept = dict(call.kwargs) if edit.args is None else {}
            kwargs = {**_with(kept, replaced), **edit.kwargs}
            result = function(*_with(tuple(args), replaced), **kwargs)
    except Exception:  # user code may raise anything, and so may torch
        return False
    if edit.shape is None:
        return True
    return isinstance(result, Tensor) and result.shape == edit.shape


def _changed(changes: Iterable[Change]) -> dict[int, Tensor]:
    """Return what operands are made into, by the id of the tensor that is replaced."""
    changed = {}
    for change in changes:
        tensor = change.operand.given.value
        changed[id(tensor)] = change.apply(tensor)
    return changed


def _changes_operands(call: Call) -> bool:
    """Return whether a call writes into an operand."""
    if "out" in call.kwargs:
        return True
    if call.name.startswith("aten."):
        return call.name.split(".")[1].endswith("_")
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
