"""The facts of a failing call from which its cause is found: operands, their roles, and sizes that clash."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from torch import Tensor, nn

from .. import text
from ..naming.pattern import dims_of
from ..record.ops import Op, Recording, TensorRef
from ..record.ranks import local, piece_of
from ..record.recorder import Recorder
from ..reports.trace import FailedOperand
from ..running.subject import Run
from ..text import shortened
from .call import Call, Site, tensors_of, written
from .reached import PRODUCTS, Given, Reached, reach

Shape = tuple[int, ...]
Dims = list[list[str]]
"""The names of the axes of each dimension; a size stands for an unnamed axis."""

HEADS = ("heads", "kv_heads")
SEQUENCES = ("query", "key", "sequence")
BROADCASTS = {"add", "sub", "mul", "div", "truediv", "masked_fill", "where", "addcmul", "iadd", "isub", "imul", "pow"}
"""Calls that broadcast their operands, by name without underscores."""
TAKE_MASKS = ("add", "iadd", "sub", "masked_fill", "where")
LOGICAL = {"and", "or", "xor", "iand", "ior", "logical_and", "logical_or"}
"""Calls that combine masks."""
VIEWS = ("view", "reshape", "unflatten")
"""Calls that split or merge dimensions."""
_LONGEST_NAME = 42
"""The most characters of the name of an operand in a sentence: its code may be longer."""
NORMS = ("layer_norm", "rms_norm")


@dataclass(frozen=True, eq=False)
class Operand(FailedOperand):
    """One tensor argument of the failing call, with its properties. It references the tensor."""

    code: str
    """Its source code, whole, or the argument that it is; empty if it has a number alone: `operand 1`."""
    variable: str
    """The variable it comes from: `k` for `k.transpose(-2, -1)`; its name if there is no variable."""
    given: Given
    part: str
    """Its role in the attention: `query`, `key`, `value`, `weights`; empty if unknown."""
    from_scores: bool
    """Whether it is computed from the scores."""
    is_table: bool
    """Whether it is computed from parameters or buffers alone."""
    is_learned: bool
    """Whether a parameter has a part in it."""
    is_swapped: bool
    """Whether it is its variable with the last two dimensions swapped: `k.mT`."""
    source: str
    """The source of what it is transposed from: `k` of `k.permute(0, 2, 3, 1)`; empty if unknown."""
    order: tuple[int, ...]
    """The dimensions of that source in its own order."""

    @property
    def is_code(self) -> bool:
        """Whether it can be written in code."""
        return bool(self.code)

    @property
    def spelled(self) -> str:
        """Its source code, for what to write; its name if no line has it."""
        return self.code or self.name

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of a module."""
        return isinstance(self.given.value, nn.Parameter)

    @property
    def dims(self) -> Dims:
        """The axis names of each dimension; a size stands for an unnamed axis."""
        return dims_of(self.axes)

    @property
    def is_shape(self) -> str:
        """`q is [2, 8, 5, 64]`."""
        return f"{self.name} is {text.shape(self.shape)}"

    @property
    def text(self) -> str:
        """`q is [2, 8, 5, 64] batch heads query head_dim`; without axes if none has a name."""
        names = chain.from_iterable(self.dims)
        if all(name.isdigit() for name in names):
            return self.is_shape
        return f"{self.is_shape} {self.axes}"

    def place(self, *names: str) -> int | None:
        """Return the first dimension that contains one of these axes; None if there is none."""
        for place, dim in enumerate(self.dims):
            if not set(names).isdisjoint(dim):
                return place
        return None

    def size(self, *names: str) -> int:
        """Return the size of the first dimension that is exactly one of these axes; 0 if there is none."""
        for size, dim in zip(self.shape, self.dims, strict=True):
            if len(dim) == 1 and dim[0] in names:
                return size
        return 0

    def axis(self, place: int) -> str:
        """Return name and size of a dimension: `head_dim 64`; only the size if it has no name."""
        size = self.shape[place]
        dim = self.dims[place]
        if len(dim) != 1:
            return f"({' '.join(dim)}) {size}"
        name = dim[0]
        if name.isdigit():
            return str(size)
        return f"{name} {size}"

    @property
    def has_integers(self) -> bool:
        """Whether it has whole numbers, as ids and some masks have."""
        return self.dtype.startswith(("int", "uint"))

    @property
    def heads_are_behind(self) -> bool:
        """Whether the heads come after the sequence."""
        heads = self.place(*HEADS)
        sequence = self.place(*SEQUENCES)
        if heads is None or sequence is None:
            return False
        return len(self.shape) >= 4 and sequence < heads


@dataclass(frozen=True, eq=False)
class Passed:
    """A tensor that the user's line gives a module."""

    name: str
    """Its source code: `attention_mask`."""
    value: Tensor


@dataclass(frozen=True, eq=False)
class Facts:
    """A failing call and its operands. It references tensors, so it must not outlive the error."""

    error: str
    message: str
    call: Call
    operands: tuple[Operand, ...]
    reached: Reached
    variables: Mapping[int, str]
    """TensorRef id to variable name in user code."""
    missing: tuple[str, ...] = ()
    """Arguments of the user's function that are None where the failing expression uses them."""
    unpacks_shape: bool = False
    """Whether the failing line reads a shape."""
    called: tuple[str, ...] = ()
    """The arguments of the module that the user's line calls: `tgt_mask`, `tgt_key_padding_mask`."""
    passed: Mapping[str, Passed] = field(default_factory=dict)
    """The tensors that the line gives that module, by argument."""
    numbers: frozenset[int] = frozenset()
    """The whole numbers that the module of the line keeps: of heads, of their features."""
    cut: Mapping[int, int] = field(default_factory=dict)
    """Rows of the weights of the module on this rank to those on all ranks, where they are cut."""

    @property
    def base(self) -> str:
        """Name of the call without namespace and underscores: `matmul`; empty without a call."""
        return self.call.base

    @property
    def attention(self) -> nn.MultiheadAttention | None:
        """The called nn.MultiheadAttention; None for other calls."""
        if isinstance(self.call.layer, nn.MultiheadAttention):
            return self.call.layer
        return None

    def given(self, *roles: str) -> Operand | None:
        """Return the first operand with one of these roles; None if there is none."""
        for operand in self.operands:
            if operand.role in roles:
                return operand
        return None

    @property
    def pair(self) -> tuple[Operand, Operand] | None:
        """The left and right factor of a product; None for other calls."""
        if self.base not in PRODUCTS or len(self.operands) < 2:
            return None
        left, right = self.operands[-2:]
        return left, right

    @property
    def factors(self) -> list[Operand]:
        """The operands that are queries, keys or values."""
        return [operand for operand in self.operands if operand.part not in ("", "weights")]

    @property
    def mask_and_scores(self) -> tuple[Operand, Operand] | None:
        """The mask, or a table of pairs, and the scores, if the call broadcasts them; else None."""
        if self.base not in BROADCASTS:
            return None
        scores = [operand for operand in self.operands if operand.from_scores]
        if not scores:
            return None
        for operand in self.operands:
            if operand.from_scores or not operand.shape:
                continue
            # What scales scores is no mask if it is as long as something else.
            scales = self.base not in TAKE_MASKS and len(operand.shape) < 2
            is_of_pairs = not operand.is_learned or (operand.is_table and len(operand.shape) > 1)
            if is_of_pairs and not scales:
                return operand, scores[0]
        return None

    @property
    def mixes_dtypes(self) -> bool:
        """Whether the error is about dtypes, and the operands have several."""
        if "boolean mask" in self.message:
            return False
        dtypes = {operand.dtype for operand in self.operands}
        return len(dtypes) > 1 and self._mentions("dtype", "scalar type", "data type")

    @property
    def mixes_devices(self) -> bool:
        """Whether the error is about devices, and the operands have several."""
        devices = {operand.device for operand in self.operands}
        return len(devices) > 1 and self._mentions("device")

    @property
    def sizes_clash(self) -> bool:
        """Whether shapes clash; other errors show nothing about shapes."""
        if self.pair is None:
            return self._mentions("size", "shape", "subscript", "dimension")
        left = self.pair[0].shape
        right = self.pair[1].shape
        if len(left) < 2 or len(right) < 2:
            return True
        if self.base == "bmm" and (len(left) != 3 or len(right) != 3):
            return True
        if left[-1] != right[-2]:
            return True
        return first_clash(left[:-2], right[:-2]) is not None

    def _mentions(self, *words: str) -> bool:
        """Return whether one of these words is in the message of the error."""
        return any(word in self.message for word in words)

    @property
    def fractions_of_view(self) -> tuple[float, ...]:
        """The sizes of a view that are floats, as those are that a division makes."""
        if self.base not in VIEWS:
            return ()
        return tuple(value for value in self.call.args if isinstance(value, float))

    @property
    def sizes_of_view(self) -> tuple[int, ...]:
        """The requested shape of a view; empty if unknown."""
        if self.fractions_of_view:
            return ()
        sizes = tuple(_numbers_in(self.call.args))
        if self.base != "unflatten" or not sizes or not self.operands:
            return sizes
        shape = self.operands[0].shape
        place = sizes[0] % max(len(shape), 1)
        return (*shape[:place], *sizes[1:], *shape[place + 1 :])

    def of_part(self, *parts: str) -> Operand | None:
        """Return the first operand with one of these roles in the attention; None if there is none."""
        for operand in self.operands:
            if operand.part in parts:
                return operand
        return None


def facts_of(error: str, message: str, run: Run, site: Site, recorder: Recorder, call: Call | None) -> Facts:
    """Return the facts of a failing call; if the call is unknown, those of its operands."""
    tensors = [Given(role, value, recorder.identify(value)) for role, value in tensors_of(call, site)]
    names = _Names.of(run, site, recorder)
    is_turned = len(tensors) > 1 and _is_key_by_query(*(names.written(given.tensor) for given in tensors[-2:]))
    reached = reach(run, call or Call(), tensors if call is not None else (), has_roles=not is_turned)
    operands = []
    sources = _sources_of(site, call, len(tensors))
    for number, given in enumerate(tensors, 1):
        source = sources[number - 1] if sources else ""
        operands.append(_operand_of(given, number, source, reached, names))
    return Facts(
        error=error,
        message=message,
        call=call or Call(),
        operands=tuple(operands),
        reached=reached,
        variables=names.variables,
        missing=site.missing,
        unpacks_shape=re.search(r"\.(shape|size\()", site.line) is not None,
        called=site.called,
        passed=_passed(site, recorder, names),
        numbers=_numbers_of(site.module),
        cut=_rows_cut(site.module),
    )


def _is_key_by_query(left: str, right: str) -> bool:
    """Return whether the user calls the left factor `k` and the right one `q`: neither is what its place says."""
    return left[:1] == "k" and right[:1] == "q"


def _sources_of(site: Site, call: Call | None, count: int) -> Sequence[str]:
    """Return the source of each tensor of the call, if the line shows which is which; else nothing."""
    if call is not None and len(site.operands) == count:
        return site.operands
    if call is not None and len(site.operands) == len(call.args):
        pairs = zip(site.operands, call.args, strict=True)
        sources = [source for source, value in pairs if isinstance(value, Tensor)]
        if len(sources) == count:
            return sources
    return ()


@dataclass(frozen=True)
class _Names:
    """The names of tensors where the line stands that failed."""

    recording: Recording
    variables: Mapping[int, str]
    """TensorRef id to variable of the user's frame."""
    names: Mapping[int, str]
    """TensorRef id to variable, or else to the path of a parameter or buffer, or to an attribute of the module."""
    path: str
    """The module of the line."""

    @classmethod
    def of(cls, run: Run, site: Site, recorder: Recorder) -> _Names:
        """Return the names of a line; of several variables for one tensor the first counts."""
        recording = run.recording
        names: dict[int, str] = {}
        for name, value in getattr(site.module, "__dict__", {}).items():
            if isinstance(value, Tensor):
                names[recorder.identify(value).id] = name
        for named in (*recording.parameters, *recording.buffers):
            names[named.tensor.id] = named.name
        variables: dict[int, str] = {}
        for name, value in site.variables.items():
            variables.setdefault(recorder.identify(value).id, name)
        return cls(
            recording=recording,
            variables=variables,
            names={**names, **variables},
            path=recorder.path_of(site.module),
        )

    def written(self, tensor: TensorRef) -> str:
        """Return source code for a tensor; empty if unknown."""
        return written(self.recording, tensor, self.names, self.path)


def _operand_of(given: Given, number: int, source: str, reached: Reached, names: _Names) -> Operand:
    """Return an argument of the failing call with its properties; `source` is that of the line, empty if unknown."""
    tensor = given.tensor
    known = names.written(tensor)
    called = _stage_of(tensor, reached) or given.role
    code = known or source or called
    name = known or called or shortened(source, _LONGEST_NAME) or f"operand {number}"
    variable = _variable_of(tensor, reached, names)
    op = names.recording.producer(tensor)
    source_tensor, order = _transposed_from(names, tensor)
    is_swapped = op is not None and op.swaps_last_two and names.variables.get(op.inputs[0].id, "") == variable != ""
    return Operand(
        role=given.role,
        name=name,
        code=code,
        variable=variable or code or name,
        given=given,
        shape=tensor.shape,
        dtype=tensor.dtype,
        device=str(given.value.device),
        axes=reached.of(tensor),
        part=reached.roles.get(tensor.id, ""),
        from_scores=reached.is_of_scores(tensor),
        is_table=reached.is_table(tensor),
        is_learned=reached.is_learned(tensor),
        is_swapped=is_swapped,
        source=names.written(source_tensor),
        order=order,
    )


def _transposed_from(names: _Names, tensor: TensorRef) -> tuple[TensorRef, tuple[int, ...]]:
    """Return the tensor before the transposes that end in a tensor, and its dimensions in the order of that.

    A tensor that has a name is the last one.
    """
    recording = names.recording
    order = tuple(range(len(tensor.shape)))
    op = recording.producer(tensor)
    while op is not None and tensor.id not in names.names:
        turned = _order_of(op)
        if not turned:
            break
        order = tuple(turned[place] for place in order)
        tensor = op.inputs[0]
        op = recording.producer(tensor)
    return tensor, order


def _order_of(op: Op) -> tuple[int, ...]:
    """Return the dimensions of the input of a transpose in the order of its output; empty for other operations."""
    rank = len(op.output.shape) if op.outputs else 0
    if not rank:
        return ()
    if op.base_name == "permute":
        return tuple(place % rank for place in op.args[1])
    if op.base_name != "transpose":
        return ()
    first, second = (place % rank for place in op.args[1:3])
    order = list(range(rank))
    order[first], order[second] = second, first
    return tuple(order)


def _stage_of(tensor: TensorRef, reached: Reached) -> str:
    """Return the stage that a tensor is: `scores`; empty for others."""
    for stage, reference in reached.stages.items():
        if reference.id == tensor.id:
            return stage
    return ""


def _variable_of(tensor: TensorRef, reached: Reached, names: _Names) -> str:
    """Return the variable of a tensor, or of the one before its last reshape or scaling: `k` of `k.mT`; else empty."""
    for step, _ in islice(reached.steps_back(tensor), 2):
        variable = names.variables.get(step.id, "")
        if variable:
            return variable
    return ""


def _passed(site: Site, recorder: Recorder, names: _Names) -> dict[str, Passed]:
    """Return the tensors that the line gives a module, by argument."""
    passed = {}
    for argument, value in site.given.items():
        name = names.written(recorder.identify(value))
        passed[argument] = Passed(name or argument, value)
    return passed


def _numbers_of(module: object) -> frozenset[int]:
    """Return the whole numbers among the attributes of a module."""
    values = getattr(module, "__dict__", {}).values()
    return frozenset(value for value in values if type(value) is int and value > 1)


def _rows_cut(module: object) -> dict[int, int]:
    """Return the rows of the weights of a module on this rank, with those on all ranks, where they are cut."""
    if not isinstance(module, nn.Module):
        return {}
    cut: dict[int, int] = {}
    for weight in module.parameters():
        piece = piece_of(weight)
        if piece is None:
            continue
        rows = local(weight).shape[:1]
        whole = piece.whole[:1]
        if rows != whole:
            cut[rows[0]] = whole[0]
    return cut


def written_dims(dims: Dims) -> str:
    """Return the names of dimensions as a pattern: `batch (heads head_dim)`."""
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)


def first_clash(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Return the last dimension, counted from -1, in which two shapes cannot be broadcast; None if they can."""
    common = min(len(left), len(right))
    for back in range(1, common + 1):
        sizes = {left[-back], right[-back]}
        if len(sizes) == 2 and 1 not in sizes:
            return -back
    return None


def _numbers_in(settings: Any) -> Iterator[int]:
    for value in settings:
        if isinstance(value, (tuple, list)):
            yield from _numbers_in(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield value
