"""Which tensor is which while a run is recorded: by the memory that it looks at, and how."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from mmap import mmap
from threading import Lock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from .ops import TensorRef
from .sight import Sight

_PLAIN = frozenset({type(None), bool, int, float, complex, str})
_DTYPE_NAMES: dict[torch.dtype, str] = {}
_LARGEST = 1 << 24
"""Elements up to which what came from outside is held on to."""


class _Storage:
    """What is known of one piece of memory: which tensors look at it."""

    __slots__ = ("made_by", "number", "owner", "seen")

    def __init__(self, number: int, made_by: int | None, owner: Any) -> None:
        self.number = number
        self.owner = owner
        """The weak reference that tells it from others, held so that no other comes to have its id."""
        self.made_by = made_by
        """The operation that wrote it last; None where it came from outside."""
        self.seen: dict[tuple[Any, ...], TensorRef] = {}
        """Offset, shape, stride and dtype, to the tensor that was seen since the memory was written last."""


class Shelf:
    """Copies of the few numbers of each kernel that are looked at when the run is over, one beside the other.

    What is allocated between the large blocks of a forward, and stays, keeps those from being joined and used again.
    """

    _PAGE = 1 << 20

    def __init__(self) -> None:
        self._page: mmap | None = None
        self._used = 0

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Copy a tensor, and return what hands the copy out; one of another device stays there."""
        if tensor.device.type != "cpu":
            copied = tensor.clone()
            return lambda: copied
        size = tensor.numel() * tensor.element_size()
        if self._page is None or self._used + size > len(self._page):
            self._page, self._used = mmap(-1, max(size, self._PAGE)), 0
        page, start, shape, dtype = self._page, self._used, tensor.shape, tensor.dtype
        self._used += -(-size // 16) * 16

        def get() -> Tensor:
            return torch.frombuffer(page, dtype=dtype, count=shape.numel(), offset=start).view(shape)

        get().copy_(tensor)
        return get


class Tensors:
    """Every tensor of one recording, told by its memory. A tensor is held only where it is to be kept.

    Python's own reference to a storage is one object for as long as the storage lives.
    """

    def __init__(self, keep: bool = False) -> None:
        self.producers: dict[int, int] = {}
        self.scalars: dict[int, float] = {}
        self.values: dict[int, Tensor] = {}
        self.sights: dict[int, Sight] = {}
        self._keep = keep
        self.described = False
        """Whether tensors on meta stand for some that were not computed, of which there is nothing to keep."""
        self._outside: list[tuple[int, ref[Tensor], int]] = []
        """Tensors that nobody named and no operation made: id, a reference to it, how often it had been written."""
        self._storages: dict[int, _Storage] = {}
        self._num_tensors = self._num_storages = 0
        self._names: dict[Any, str] = {}

    def plain(self, value: Any, inputs: list[TensorRef]) -> Any:
        """Return an argument as plain data, each tensor in it as its `TensorRef`, which is added to `inputs`."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is Tensor or kind is nn.Parameter or isinstance(value, Tensor):
            tensor = self.read(value)
            inputs.append(tensor)
            return tensor
        if isinstance(value, (list, tuple)):
            return tuple([self.plain(item, inputs) for item in value])
        if isinstance(value, (int, float, complex, str)):
            return value
        try:
            name = self._names.get(value)
        except TypeError:  # an argument of a higher-order operation
            return str(value)
        if name is None:
            name = self._names[value] = str(value)
        return name

    def read(self, tensor: Tensor, *, named: bool = False) -> TensorRef:
        """Return what a tensor is that an operation reads, or that is `named` outside."""
        memory, key = _look(tensor)
        storage = self._storages.get(id(memory))
        if storage is None:
            storage = self._add_storage(memory, None)
        known = storage.seen.get(key)
        if known is not None:
            return known
        # Written since through another view, or never seen: its content is what the last writer of this memory left.
        made = self._add(tensor, key, storage, storage.made_by)
        if storage.made_by is None and not named:
            with suppress(RuntimeError, TypeError):  # one of inference mode does not count how often it is written
                self._outside.append((made.id, ref(tensor), tensor._version))
        return made

    def write(
        self, tensor: Tensor, number: int, inputs: Sequence[TensorRef], in_place: bool, known_memory: bool
    ) -> TensorRef:
        """Return what a tensor is that an operation of this number has just returned, or written into.

        Args:
            tensor: what it returned.
            number: counts operations.
            inputs: the tensors that it read.
            in_place: whether it wrote into memory that was there.
            known_memory: whether what it returned may lie in memory that others made.
        """
        memory, key = _look(tensor)
        storage = self._storages.get(id(memory))
        is_known = storage is not None and (known_memory or storage.made_by == number)
        if storage is None or not (is_known or storage.number in [given.storage for given in inputs]):
            storage = self._add_storage(memory, number)
        elif in_place and storage.made_by != number:
            storage.seen.clear()
            storage.made_by = number
        else:
            seen = storage.seen.get(key)
            # A view that changes nothing, or what it wrote as well.
            if seen is not None and (self.producers.get(seen.id) == number or any(seen is given for given in inputs)):
                return seen
        return self._add(tensor, key, storage, number)

    def stand_in(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what makes a tensor on meta that counts as this one, which was read, as it is now.

        It holds nothing of torch's, which would stand between the large blocks of a forward.
        """
        storage = self._storages[id(_look(tensor)[0])]
        number, made_by, seen = storage.number, storage.made_by, dict(storage.seen)
        size, dtype = tensor.untyped_storage().nbytes() // tensor.element_size(), tensor.dtype
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()

        def make() -> Tensor:
            empty = torch.empty(size, dtype=dtype, device="meta")
            memory = ref(empty.untyped_storage())
            copied = self._storages[id(memory)] = _Storage(number, made_by, memory)
            copied.seen = seen
            return empty.as_strided(shape, stride, offset)

        return make

    def copy_kept(self, tensor: Tensor) -> None:
        """Copy what is kept of a tensor's memory, which is about to be written."""
        storage = self._storages.get(id(_look(tensor)[0]))
        for seen in storage.seen.values() if storage is not None else ():
            if seen.id in self.values:
                self.values[seen.id] = self.values[seen.id].clone()

    def constants(self) -> dict[int, Tensor]:
        """Return what came from outside, was not written since and is still there, by id."""
        there = ((number, weak(), version) for number, weak, version in self._outside)
        return {
            number: tensor.detach()
            for number, tensor, version in there
            if tensor is not None and tensor._version == version and tensor.numel() <= _LARGEST
        }

    def _add_storage(self, memory: Any, made_by: int | None) -> _Storage:
        storage = self._storages[id(memory)] = _Storage(self._num_storages, made_by, memory)
        self._num_storages += 1
        return storage

    def _add(self, tensor: Tensor, key: tuple[Any, ...], storage: _Storage, made_by: int | None) -> TensorRef:
        offset, size, stride, dtype = key
        number = self._num_tensors
        self._num_tensors = number + 1
        name = _DTYPE_NAMES.get(dtype) or _DTYPE_NAMES.setdefault(dtype, str(dtype).removeprefix("torch."))
        made = TensorRef(number, tuple(size), stride, offset, name, dtype.itemsize, storage.number)
        storage.seen[key] = made
        if made_by is not None:
            self.producers[number] = made_by
        if not size:
            scalar = _number(tensor)
            if scalar is not None:
                self.scalars[number] = scalar
        if self._keep and not (self.described and tensor.is_meta) and not nn.parameter.is_lazy(tensor):
            self.values[number] = tensor.detach()
        return made


def _look(tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return what tells a tensor from others as it is now: its memory, and its offset, shape, stride and dtype."""
    try:
        if type(tensor) is Tensor or not tensor.is_nested:
            return ref(tensor.untyped_storage()), (
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
    except (NotImplementedError, RuntimeError, ValueError):
        pass
    if tensor.is_nested:  # rows of different lengths have no shape: one buffer
        rows = tensor if tensor.layout == torch.strided else tensor.__dict__["_values"]
        return ref(rows.untyped_storage()), (0, (rows.numel(),), (1,), tensor.dtype)
    # Sparse and wrapped tensors have no storage of their own, and one that is lazy has no shape either.
    shape = () if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
    return ref(tensor), (0, shape, (), tensor.dtype)


def _number(tensor: Tensor) -> float | None:
    """Return the number in a real tensor of no dimension on the CPU; None for any other."""
    if tensor.device.type == "cpu" and not tensor.dtype.is_complex:
        with suppress(RuntimeError, ValueError):  # one without memory: a zero of forward-mode gradients, fake, lazy
            return tensor.item()
    return None


Stages = tuple[dict[str, Tensor], ...]
"""For each attention, stage name to tensor."""


def unshared(stages: Stages) -> Stages:
    """Return the same tensors, those copied whose memory is held by somebody else too.

    While a run is recorded, a kept tensor is copied before its memory is written. Afterwards nobody looks, and the
    memory may be anybody's: an output that was returned, an input, a parameter, a cache.
    """
    tensors = {id(tensor): tensor for by_name in stages for tensor in by_name.values()}
    memory = {number: _look(tensor)[0] for number, tensor in tensors.items()}
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
