"""Which tensor is which while a forward runs: by the memory that it looks at, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

Look = tuple[Any, ...]
"""A tensor as it is now: a weak reference to its memory, offset, shape, stride, dtype; where it has no dimension, its
number or None; where it is kept, a list with the tensor. The same memory has the same reference, which no other has."""


Outside = tuple[Look, Any, int]
"""A tensor that came from outside: how it was, a weak reference to it, and how often it had been written by then."""


class _AddressRefs:
    """Makes one reference a storage, where torch makes another Python object of it each time that it is asked."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def __call__(self, storage: torch.UntypedStorage) -> StorageWeakRef:
        known = self._known.get(storage._cdata)  # a storage that is referred to weakly keeps its address
        if known is None:
            known = self._known[storage._cdata] = StorageWeakRef(storage)
        return known


def _has_lasting_storages() -> bool:
    """Return whether a storage is the same Python object for as long as it lives: then so is a reference to it."""
    tensor = torch.empty(1, device="cpu")
    first = ref(tensor.untyped_storage())
    return first() is not None and first is ref(tensor.untyped_storage())


_PLAIN_TYPES = frozenset({torch.Tensor, nn.Parameter})
_LASTING = _has_lasting_storages()


def looker() -> Callable[..., Look]:
    """Return what looks at a tensor: the same look for as long as the tensor is the same.

    Where it is given a list as well, it adds the tensors to it that it has never looked at before.

    Python's own references to a storage lie in memory of Python's. torch's keeps what is left of a storage in place,
    between the large blocks that a forward frees, and so they cannot be joined and used again. And the less is made
    while a forward runs, the less often Python goes through all that there is for what can be freed.
    """
    weak: Any = ref if _LASTING else _AddressRefs()
    known: dict[Look, Look] = {}
    once = known.setdefault

    def look_at(tensor: torch.Tensor, outside: list[Outside] | None = None) -> Look:
        if type(tensor) in _PLAIN_TYPES:
            try:
                shape = tensor.shape
                look: Look = (
                    weak(tensor.untyped_storage()),
                    tensor.storage_offset(),
                    shape,
                    tensor.stride(),
                    tensor.dtype,
                )
            except (NotImplementedError, RuntimeError):  # sparse, or a wrapper: it has no storage
                look = _look_closely(tensor, weak)
        else:
            look = _look_closely(tensor, weak)
        if not look[2]:
            look = *look, _number(tensor)
        found = once(look, look)
        if found is look and outside is not None:
            with suppress(RuntimeError, TypeError):  # one of inference mode does not count how often it is written
                outside.append((look, ref(tensor), tensor._version))
        return found

    return look_at


def _look_closely(tensor: torch.Tensor, weak: Any) -> Look:
    """Return the same of a tensor of any class and layout."""
    if tensor.is_nested:  # rows of different lengths have no shape: one buffer
        rows = tensor if tensor.layout == torch.strided else tensor.__dict__["_values"]
        return weak(rows.untyped_storage()), 0, (rows.numel(),), (1,), tensor.dtype
    try:
        memory = weak(tensor.untyped_storage())
        return memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
    except (NotImplementedError, RuntimeError, ValueError):
        # Sparse and wrapped tensors have no storage of their own, and one that is lazy has no shape either.
        return ref(tensor), 0, () if nn.parameter.is_lazy(tensor) else tuple(tensor.shape), (), tensor.dtype


def _number(tensor: torch.Tensor) -> float | None:
    """Return the number in a real tensor of no dimension on the CPU; None for any other."""
    if tensor.device.type == "cpu" and not tensor.dtype.is_complex:
        with suppress(RuntimeError, ValueError):  # one without memory: a zero of forward-mode gradients, fake, lazy
            return tensor.item()
    return None


Hold = Callable[[torch.Tensor], list[Any]]
"""Returns a place with what is kept of a tensor that was not seen before, which can be cloned: a clone is put into its
place before the memory is written. Bound to a recorder it would hold it, and all that is kept, in a circle."""


def hold_whole(tensor: torch.Tensor) -> list[Any]:
    """Return a place with all of a tensor."""
    return [tensor.detach()]


class Kept:
    """Looks at tensors and keeps what is held of each: its content as it was then."""

    def __init__(self, hold: Hold) -> None:
        self._hold, self._look_at = hold, looker()
        self._held: dict[int, dict[Any, list[Any]]] = {}
        """By memory, and by how it was looked at since it was written last."""

    def __call__(self, tensor: torch.Tensor, outside: list[Outside] | None = None) -> Look:
        """Return what identifies a tensor now, and what is held of it."""
        look = self._look_at(tensor)
        if nn.parameter.is_lazy(tensor):
            return look
        views = self._held.setdefault(id(look[0]), {})
        held = views.get(look[1:5])
        if held is None:
            held = views[look[1:5]] = self._hold(tensor)
        return (*look[:5], look[5] if len(look) > 5 else None, held)

    def copy(self, tensor: torch.Tensor) -> None:
        """Copy what is held of a tensor's memory, which is about to be written."""
        for held in self._held.pop(id(self._look_at(tensor)[0]), {}).values():
            held[0] = held[0].clone()


Stages = tuple[dict[str, torch.Tensor], ...]
"""For each attention, stage name to tensor."""


def unshared(stages: Stages) -> Stages:
    """Return the same tensors, those copied whose memory is held by somebody else too.

    While a run is recorded, a kept tensor is copied before its memory is written. Afterwards nobody looks, and the
    memory may be anybody's: an output that was returned, an input, a parameter, a cache.
    """
    look_at = looker()
    every = {id(tensor): tensor for held in stages for tensor in held.values()}
    memory = {number: look_at(tensor)[0] for number, tensor in every.items()}
    own = Counter(map(id, memory.values()))
    kept = {
        number: tensor.clone() if _holders(tensor) > own[id(memory[number])] else tensor
        for number, tensor in every.items()
    }
    return tuple({stage: kept[id(tensor)] for stage, tensor in held.items()} for held in stages)


def _holders(tensor: torch.Tensor) -> float:
    """Return how many tensors look at this one's memory, itself included; infinitely many where torch does not say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # no storage to ask: it is copied
        return float("inf")
    return float("inf") if count is None else int(count(storage._cdata)) - 1  # `storage` is one more
