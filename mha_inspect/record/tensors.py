"""Which tensor is which in a recording: by the memory that it looks at, and how, at the time when an operation met it.

While a run is recorded a tensor is looked at and no more; what it is in the dataflow is worked out when that is asked.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from .ops import TensorRef

Look = tuple[Any, ...]
"""A tensor as it is now: a weak reference to its memory, offset, shape, stride and dtype; of one without dimensions its
number or None; and where it is kept, its number or None and the tensor itself. Python's own reference to a storage is
one object for as long as the storage lives."""
_DTYPE_NAMES: dict[torch.dtype, str] = {}
DENSE = frozenset({Tensor, nn.Parameter})
_NO_STORAGE = NotImplementedError, RuntimeError, ValueError
PLAIN = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout})
_NUMBERS = frozenset({type(None), bool, int, float, complex, str})
_LARGEST = 1 << 24
"""Elements up to which what came from outside is held on to."""


def look_at(tensor: Tensor) -> Look:
    """Return a tensor as it is now, without what depends on whether it is kept."""
    try:
        if type(tensor) in DENSE or not tensor.is_nested:
            memory = ref(tensor.untyped_storage())
            return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    except _NO_STORAGE:
        pass
    if tensor.is_nested:  # rows of different lengths have no shape: one buffer
        rows = tensor if tensor.layout == torch.strided else tensor.__dict__["_values"]
        return ref(rows.untyped_storage()), 0, (rows.numel(),), (1,), tensor.dtype
    # Sparse and wrapped tensors have no storage of their own, and one that is lazy has no shape either.
    return ref(tensor), 0, () if nn.parameter.is_lazy(tensor) else tuple(tensor.shape), (), tensor.dtype


def _number(tensor: Tensor) -> float | None:
    """Return the number in a real tensor of no dimension on the CPU; None for any other."""
    if tensor.device.type == "cpu" and not tensor.dtype.is_complex:
        with suppress(RuntimeError, ValueError):  # one without memory: a zero of forward-mode gradients, fake, lazy
            return tensor.item()
    return None


class _Storage:
    """What is known of one piece of memory: which tensors look at it."""

    __slots__ = ("made_by", "number", "seen")

    def __init__(self, number: int, made_by: int | None) -> None:
        self.number = number
        self.made_by = made_by
        """The operation that wrote it last; None where it came from outside."""
        self.seen: dict[Look, TensorRef] = {}
        """Offset, shape, stride and dtype, to the tensor that was seen since the memory was written last."""


class Tensors:
    """Every tensor of one recording. One is held only where it is to be kept."""

    def __init__(self, keep: bool) -> None:
        self.producers: dict[int, int] = {}
        self.scalars: dict[int, float] = {}
        self.values: dict[int, Tensor] = {}
        self.keep = keep
        self._looks: dict[Look, Look] = {}
        """Each look that there was, so that one that is the same again takes no memory."""
        self._outside: list[tuple[Look, ref[Tensor], int]] = []
        """Tensors that were first seen as arguments, with how often they had been written."""
        self._storages: dict[ref[Any], _Storage] = {}
        self._num_tensors = self._num_storages = 0
        self._names: dict[Any, str] = {}

    # -- while the run goes on ----------------------------------------------------------------------------------------

    def look(self, tensor: Tensor, from_outside: bool = True) -> Look:
        """Note a tensor as it is now; one that is seen `from_outside` for the first time may be a constant."""
        try:
            if type(tensor) in DENSE:
                memory = ref(tensor.untyped_storage())
                look: Look = memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
            else:
                look = look_at(tensor)
        except _NO_STORAGE:
            look = look_at(tensor)
        if not look[2]:
            look = *look, _number(tensor)
        known = self._looks.setdefault(look, look)
        if known is look and from_outside:
            with suppress(RuntimeError, TypeError):  # one of inference mode does not count how often it is written
                self._outside.append((look, ref(tensor), tensor._version))
        if self.keep and not nn.parameter.is_lazy(tensor):
            return *known[:5], known[5] if len(known) > 5 else None, tensor.detach()
        return known

    def note(self, value: Any) -> Any:
        """Note an argument: a tensor as its look, a sequence as a list, what is not plain as text."""
        if type(value) in PLAIN:
            return value
        if isinstance(value, Tensor):
            return self.look(value)
        if isinstance(value, (list, tuple)):
            return [self.note(item) for item in value]
        return value if isinstance(value, (int, float, complex, str)) else str(value)

    def copy_kept(self, tensor: Tensor) -> None:
        """Copy what is kept of a tensor's memory, which is about to be written."""
        self.read(self.look(tensor))
        for seen in self._storages[look_at(tensor)[0]].seen.values():
            if seen.id in self.values:
                self.values[seen.id] = self.values[seen.id].clone()

    # -- afterwards, in the same order --------------------------------------------------------------------------------

    def plain(self, value: Any, inputs: list[TensorRef]) -> Any:
        """Return a noted argument as plain data, each tensor in it as its `TensorRef`, which is added to `inputs`."""
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
        """Return what a tensor is that an operation reads, or that is named outside."""
        storage = self._storages.get(look[0]) or self._add_storage(look[0], None)
        # Written since through another view, or never seen: its content is what the last writer of this memory left.
        return storage.seen.get(look[1:5]) or self._add(look, storage, storage.made_by)

    def write(self, look: Look, op: int, inputs: Sequence[TensorRef], in_place: bool, known_memory: bool) -> TensorRef:
        """Return what a tensor is that an operation has returned, or written into.

        Args:
            look: what it returned.
            op: index of the operation.
            inputs: the tensors that it read.
            in_place: whether it wrote into memory that was there.
            known_memory: whether what it returned may lie in memory that others made.
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
            # A view that changes nothing, or what it wrote as well.
            if seen is not None and (self.producers.get(seen.id) == op or any(seen is given for given in inputs)):
                return seen
        return self._add(look, storage, op)

    def stand_in(self, look: Look) -> Tensor:
        """Return a tensor that counts as the one that was looked at: itself where it is kept, else one on meta."""
        if len(look) > 6:
            return look[6]  # type: ignore[no-any-return]  # the tensor that is kept, of a tuple of any things
        self.read(look)
        memory, offset, shape, stride, dtype = look[:5]
        size = offset + 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        empty = torch.empty(size if 0 not in shape else offset, dtype=dtype, device="meta")
        self._storages[ref(empty.untyped_storage())] = self._storages[memory]
        return empty.as_strided(shape, stride, offset)

    def constants(self) -> dict[int, Tensor]:
        """Return what came from outside, was not written since and is still there, by id."""
        there = {}
        for look, weak, version in self._outside:
            tensor = weak()
            if tensor is not None and tensor._version == version and tensor.numel() <= _LARGEST:
                number = self.read(look).id
                if number not in self.producers:
                    there[number] = tensor.detach()
        return there

    def _add_storage(self, memory: Any, made_by: int | None) -> _Storage:
        storage = self._storages[memory] = _Storage(self._num_storages, made_by)
        self._num_storages += 1
        return storage

    def _add(self, look: Look, storage: _Storage, made_by: int | None) -> TensorRef:
        _, offset, size, stride, dtype, *more = look
        number = self._num_tensors
        self._num_tensors = number + 1
        name = _DTYPE_NAMES.get(dtype) or _DTYPE_NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))
        tensor = TensorRef(number, tuple(size), stride, offset, name, dtype.itemsize, storage.number)
        storage.seen[look[1:5]] = tensor
        if made_by is not None:
            self.producers[number] = made_by
        if more:
            if more[0] is not None:
                self.scalars[number] = more[0]
            if len(more) > 1:
                self.values[number] = more[1]
        return tensor


Stages = tuple[dict[str, Tensor], ...]
"""For each attention, stage name to tensor."""


def unshared(stages: Stages) -> Stages:
    """Return the same tensors, those copied whose memory is held by somebody else too.

    While a run is recorded, a kept tensor is copied before its memory is written. Afterwards nobody looks, and the
    memory may be anybody's: an output that was returned, an input, a parameter, a cache.
    """
    tensors = {id(tensor): tensor for by_name in stages for tensor in by_name.values()}
    memory = {number: look_at(tensor)[0] for number, tensor in tensors.items()}
    ours = Counter(map(id, memory.values()))
    kept = {
        number: tensor.clone() if _holders(tensor) > ours[id(memory[number])] else tensor
        for number, tensor in tensors.items()
    }
    return tuple({stage: kept[id(tensor)] for stage, tensor in by_name.items()} for by_name in stages)


def _holders(tensor: Tensor) -> float:
    """Return how many tensors look at this one's memory, itself included; infinitely many where torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # no storage to ask: it is copied
        return float("inf")
    return float("inf") if count is None else int(count(storage._cdata)) - 1  # `storage` is one more


_collecting = Lock()
_paused: list[bool] = []
"""For each thread that is in `uncollected` now, whether Python collected when the first of them entered."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Make much of which nothing can be freed, without Python going through all that there is to find that out.

    No code of the user's runs in here: what a forward leaves behind is collected as ever.
    """
    with _collecting:
        _paused.append(_paused[0] if _paused else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _collecting:
            if _paused.pop() and not _paused:
                gc.enable()
