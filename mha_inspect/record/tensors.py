"""Identify the tensors of a recording: by memory, offset, shape and stride, at the time of each operation.

During the run only a snapshot (a `Look`) of each tensor is taken; its place in the dataflow is derived afterwards.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from .ops import TensorRef
from .ranks import by_rank, local

Look = tuple[Any, ...]
"""A snapshot of a tensor: weak reference to its memory, offset, shape, stride, dtype. A tensor without dimensions adds
its number or None; a kept tensor adds its number or None and the tensor itself. Python's object for a storage is the
same as long as the storage exists."""
_DTYPE_NAMES: dict[torch.dtype, str] = {}
DENSE = frozenset({Tensor, nn.Parameter})
_NO_STORAGE = NotImplementedError, RuntimeError, ValueError
"""What tensors without memory of their own raise if asked for it: sparse ones, subclasses, fake ones."""
PLAIN = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout})
_NUMBERS = frozenset({type(None), bool, int, float, complex, str})
_OF_TABLES = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FEW, _LARGEST = 64, 1 << 24
"""Sizes of tensors from outside the run: up to the first they are kept alive, above the second not read."""


def look_at(tensor: Tensor) -> Look:
    """Return the part of a snapshot that does not depend on whether the tensor is kept."""
    try:
        if type(tensor) in DENSE or not tensor.is_nested:
            memory = ref(tensor.untyped_storage())
            return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    except _NO_STORAGE:
        pass
    if tensor.is_nested:  # rows of different lengths have no shape: use their buffer
        rows = tensor if tensor.layout == torch.strided else tensor.__dict__["_values"]
        return ref(rows.untyped_storage()), 0, (rows.numel(),), (1,), tensor.dtype
    # Sparse and wrapped tensors have no storage of their own, and lazy ones have no shape.
    return ref(tensor), 0, () if nn.parameter.is_lazy(tensor) else tuple(tensor.shape), (), tensor.dtype


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `float32`."""
    return _DTYPE_NAMES.get(dtype) or _DTYPE_NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))


def strides_of(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape: 12, 4, 1 for 2, 3, 4."""
    from_last = accumulate(shape[:0:-1], mul, initial=1)
    return [*from_last][::-1]


def is_with_tensor(look: Look) -> bool:
    """Return whether the tensor of a look was kept, as its last part."""
    return len(look) > 6


def _number(tensor: Tensor) -> float | None:
    """Return the number in a real zero-dimensional tensor on the CPU; None for any other tensor."""
    if tensor.device.type == "cpu" and not tensor.dtype.is_complex:
        with suppress(RuntimeError, ValueError):  # no memory: fake, lazy, or a zero of forward-mode gradients
            return tensor.item()
    return None


class Storage:
    """One piece of memory and the tensors that use it."""

    __slots__ = ("kept", "made_by", "number", "seen")

    def __init__(self, number: int, made_by: int | None) -> None:
        self.number = number
        self.made_by = made_by
        """The last operation that wrote it; None if it came from outside the run."""
        self.seen: dict[Look, TensorRef] = {}
        """Offset, shape, stride and dtype to the tensor, for tensors seen since the last write."""
        self.kept: list[int] = []
        """The ids of the tensors kept since the last write: several if one view was made twice."""


class Tensors:
    """Every tensor of one recording; the torch tensors themselves are referenced only with `keep`."""

    def __init__(self, keep: bool, room: int | None = None, *, tables: bool = False) -> None:
        self.producers: dict[int, int] = {}
        self.scalars: dict[int, float] = {}
        self.values: dict[int, Tensor] = {}
        self.keep = keep
        self.keeps_tables = tables
        """Whether only integers and booleans are kept: what indexes and masks."""
        self.room = room
        """Bytes that tensors made in the run may take while they are kept; None for any number."""
        self.is_full = False
        """Whether they took more: no tensor is kept any more."""
        self._counted = set[ref[Any]]()
        """The memory that was counted, or that came from outside the run."""
        self._looks: dict[Look, Look] = {}
        """Every look so far, to share equal ones and save memory."""
        self._outside: list[tuple[Look, Callable[[], Tensor | None], int]] = []
        """Tensors first seen as arguments, with their version counters then."""
        self._storages: dict[ref[Any], Storage] = {}
        self._num_tensors = self._num_storages = 0
        self._names: dict[Any, str] = {}

    # -- while the run goes on ----------------------------------------------------------------------------------------

    def look(self, tensor: Tensor, from_outside: bool = True) -> Look:
        """Return a snapshot of a tensor; a new tensor that comes `from_outside` is noted as a possible constant."""
        try:
            if type(tensor) in DENSE:
                memory = ref(tensor.untyped_storage())
                look: Look = memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
            else:
                tensor = local(tensor)
                look = look_at(by_rank(tensor)[0])
        except _NO_STORAGE:
            look = look_at(tensor)
        if not look[2]:
            look = *look, _number(tensor)
        first = self._looks.setdefault(look, look)
        if first is look and from_outside:
            with suppress(RuntimeError, TypeError):  # inference tensors have no version counter
                # Numbers that the code has written down exist no longer than the operation that reads them.
                weak = ref(tensor) if tensor.numel() > _FEW or tensor.requires_grad else partial(Tensor.detach, tensor)
                self._outside.append((look, weak, tensor._version))
        wanted = self.keep and (not self.keeps_tables or tensor.dtype in _OF_TABLES)
        if wanted and not nn.parameter.is_lazy(tensor) and self._has_room(tensor, look[0], from_outside):
            return *first[:5], first[5] if len(first) > 5 else None, tensor.detach()
        return first

    def leave_uncounted(self, tensor: Tensor) -> None:
        """Take the memory of a parameter or an input as there before the run: it takes no room."""
        if self.room is not None:
            self._counted.add(look_at(tensor)[0])

    def _has_room(self, tensor: Tensor, memory: ref[Any], from_outside: bool) -> bool:
        """Count the memory of a tensor that the run made, and return whether tensors may still be kept."""
        if self.room is None:
            return True
        if self.is_full:
            return False
        if memory in self._counted:
            return True
        self._counted.add(memory)
        # A view of a parameter takes no memory that the parameter did not take before.
        return from_outside or self._takes(tensor.nbytes)

    def _takes(self, nbytes: int) -> bool:
        """Count memory that the run made, and return whether tensors may still be kept."""
        if self.room is not None and not self.is_full:
            self.room -= nbytes
            self.is_full = self.room < 0
        if self.is_full:
            self.values.clear()
        return not self.is_full

    def has_room_for(self, nbytes: int) -> bool:
        """Return whether tensors of so many bytes may still be kept."""
        return self.room is None or (not self.is_full and nbytes <= self.room)

    def note(self, value: Any) -> Any:
        """Return a snapshot of an argument: a tensor as its look, a sequence as a list, other objects as text."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, Tensor):
            return self.look(value)
        if isinstance(value, (list, tuple)):
            return [self.note(item) for item in value]
        return value if isinstance(value, (int, float, complex, str)) else str(value)

    def copy_kept(self, tensor: Tensor) -> None:
        """Copy the kept tensors that share a tensor's memory, because it is about to be overwritten."""
        self.read(self.look(tensor))
        kept = self._storages[look_at(by_rank(tensor)[0])[0]].kept
        for number in kept:
            if number in self.values:  # all were let go of when there was no more room
                self.values[number] = self.values[number].clone()
        kept.clear()

    # -- afterwards, in the same order --------------------------------------------------------------------------------

    def plain(self, value: Any, inputs: list[TensorRef]) -> Any:
        """Return a noted argument as plain data, with a `TensorRef` for each tensor, which is added to `inputs`."""
        kind = type(value)
        if kind is tuple:
            tensor = self.read(value)
            inputs.append(tensor)
            return tensor
        if kind is list:
            return tuple([self.plain(item, inputs) for item in value])
        if kind in _NUMBERS:
            return value
        return self._names.get(value) or self._names.setdefault(value, str(value))

    def read(self, look: Look) -> TensorRef:
        """Return the reference of a tensor that an operation reads, or that has a name outside the run."""
        storage = self._storages.get(look[0]) or self._add_storage(look[0], None)
        # If another view was written since, or the tensor is new, the last writer of the memory made its content.
        return storage.seen.get(look[1:5]) or self._add(look, storage, storage.made_by)

    def write(self, look: Look, op: int, inputs: Sequence[TensorRef], in_place: bool, known_memory: bool) -> TensorRef:
        """Return the reference of a tensor that an operation returned or wrote into.

        Args:
            look: the snapshot of that tensor.
            op: index of the operation.
            inputs: the tensors that the operation read.
            in_place: whether the operation wrote into existing memory.
            known_memory: whether the result may be in memory that another operation made.
        """
        storage = self._storages.get(look[0])
        if storage is None or not (
            known_memory or storage.made_by == op or any(storage.number == given.storage for given in inputs)
        ):
            storage = self._add_storage(look[0], op)
        elif in_place and storage.made_by != op:
            storage.seen.clear()
            storage.made_by = op
        else:
            seen = storage.seen.get(look[1:5])
            # A view identical to its input, or a tensor that this operation has already written.
            if seen is not None and (self.producers.get(seen.id) == op or any(seen is given for given in inputs)):
                return seen
        return self._add(look, storage, op)

    def made(self, shape: tuple[int, ...], dtype: torch.dtype, op: int, value: Tensor | None) -> TensorRef:
        """Return the reference of a tensor that torch never made, in memory of its own; keep its numbers, if any."""
        number = self._num_tensors
        self._num_tensors = number + 1
        storage = self._num_storages
        self._num_storages += 1
        self.producers[number] = op
        if value is not None and self._takes(value.nbytes):
            self.values[number] = value
        return TensorRef(number, shape, tuple(strides_of(shape)), 0, name_of(dtype), dtype.itemsize, storage)

    def swapped(self, tensor: TensorRef, op: int) -> TensorRef:
        """Return the reference of a view of a tensor that torch never made: its rows and heads are swapped."""
        number = self._num_tensors
        self._num_tensors = number + 1
        self.producers[number] = op
        if tensor.id in self.values:
            self.values[number] = self.values[tensor.id].transpose(-3, -2)
        sizes, steps = list(tensor.shape), list(tensor.stride)
        for row in (sizes, steps):
            row[-3], row[-2] = row[-2], row[-3]
        return replace(tensor, id=number, shape=tuple(sizes), stride=tuple(steps))

    def constants(self) -> dict[int, Tensor]:
        """Return tensors by id that came from outside the run, still exist and were not overwritten since."""
        constants = {}
        for look, weak, version in self._outside:
            tensor = weak()
            if tensor is None or nn.parameter.is_lazy(tensor) or _is_freed(tensor):
                continue
            if tensor._version == version and tensor.numel() <= _LARGEST:
                number = self.read(look).id
                if number not in self.producers:
                    constants[number] = tensor.detach()
        return constants

    def _add_storage(self, memory: Any, made_by: int | None) -> Storage:
        storage = self._storages[memory] = Storage(self._num_storages, made_by)
        self._num_storages += 1
        return storage

    def _add(self, look: Look, storage: Storage, made_by: int | None) -> TensorRef:
        _, offset, size, stride, dtype, *more = look
        number = self._num_tensors
        self._num_tensors = number + 1
        tensor = TensorRef(number, tuple(size), stride, offset, name_of(dtype), dtype.itemsize, storage.number)
        storage.seen[look[1:5]] = tensor
        if made_by is not None:
            self.producers[number] = made_by
        if more:
            if more[0] is not None:
                self.scalars[number] = more[0]
            if len(more) > 1:
                self.values[number] = more[1]
                storage.kept.append(number)
        return tensor


Stages = tuple[dict[str, Tensor], ...]
"""For each attention, stage name to tensor."""


def unshared(stages: Stages) -> Stages:
    """Return the same tensors, copied if anything else uses their memory.

    During the run a kept tensor is copied before its memory is overwritten. After the run nothing watches the memory,
    and it may belong to a returned output, an input, a parameter or a cache.
    """
    tensors: dict[int, Tensor] = {}
    for by_name in stages:
        for tensor in by_name.values():
            tensors[id(tensor)] = tensor
    memory = {number: look_at(tensor)[0] for number, tensor in tensors.items()}
    # Stages may share memory among themselves.
    uses_by_stages = Counter(map(id, memory.values()))
    unshared_tensors: dict[int, Tensor] = {}
    for number, tensor in tensors.items():
        is_used_elsewhere = _references(tensor) > uses_by_stages[id(memory[number])]
        unshared_tensors[number] = tensor.clone() if is_used_elsewhere else tensor
    unshared_stages = []
    for by_name in stages:
        unshared_stages.append({stage: unshared_tensors[id(tensor)] for stage, tensor in by_name.items()})
    return tuple(unshared_stages)


def _is_freed(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor was given back while the tensor still exists: to read it would crash.

    FSDP does so with gathered parameters: `tensor.untyped_storage().resize_(0)`.
    """
    try:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
    except _NO_STORAGE:
        return False


def _references(tensor: Tensor) -> float:
    """Return how many tensors use this tensor's memory, including itself; infinity if torch cannot say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        return float("inf")
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # no storage to ask: it is copied
        return float("inf")
    references = int(count(storage._cdata))
    return references - 1  # without `storage` itself


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause the garbage collector while many objects are created that cannot be freed, since scanning them is slow.

    No user code runs in this block, so the garbage of a forward is collected as usual.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
