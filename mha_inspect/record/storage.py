"""Which tensor is which while a forward runs: by the memory that it looks at, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .arguments import tensors_in

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


_LASTING = _has_lasting_storages()


_Tensor, _Parameter = torch.Tensor, nn.Parameter
_PLAIN = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout})


class Looker:
    """Writes values down while a forward runs.

    Python's own references to a storage lie in memory of Python's. torch's keeps what is left of a storage in place,
    between the large blocks that a forward frees, and so they cannot be joined and used again. And the less is made
    while a forward runs, the less often Python goes through all that there is for what can be freed.
    """

    def __init__(self, kept: Kept | None = None) -> None:
        self._kept = kept
        self._weak: Any = ref if _LASTING else _AddressRefs()
        self._known: dict[Look, Look] = {}

    def write_down(self, values: Iterable[Any], outside: list[Outside] | None = None, made: object = None) -> list[Any]:
        """Return a look for each tensor, the same one for as long as that is the same.

        A sequence is written down as a list, what is in `_PLAIN` as it is, anything else as text; of what an operation
        has just `made`, whatever holds its tensors, as a list of these. To `outside` go the other tensors that were
        never looked at before.
        """
        weak, once, kept = self._weak, self._known.setdefault, self._kept
        noted: list[Any] = []
        for value in values:
            kind = type(value)
            if kind is _Tensor or kind is _Parameter:
                try:
                    look: Look = (
                        weak(value.untyped_storage()),
                        value.storage_offset(),
                        value.shape,
                        value.stride(),
                        value.dtype,
                    )
                except (NotImplementedError, RuntimeError):  # sparse, or a wrapper: it has no storage
                    look = _look_closely(value, weak)
            elif kind in _PLAIN:
                noted.append(value)
                continue
            elif isinstance(value, _Tensor):
                look = _look_closely(value, weak)
            elif value is made:
                noted.append(self.write_down([tensor for _, tensor in tensors_in(value)]))
                continue
            elif isinstance(value, (list, tuple)):
                noted.append(self.write_down(value, outside))
                continue
            else:
                noted.append(value if isinstance(value, (int, float, complex, str)) else str(value))
                continue
            if not look[2]:
                look = *look, _number(value)
            found = once(look, look)
            if kept is not None:
                found = kept.hold(value, found)
            elif found is look and outside is not None and value is not made:
                with suppress(RuntimeError, TypeError):  # one of inference mode does not count how often it is written
                    outside.append((look, ref(value), value._version))
            noted.append(found)
        return noted


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
    """What is held of tensors: the content of each as it was when it was looked at."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._held: dict[int, dict[Any, list[Any]]] = {}
        """By memory, and by how it was looked at since it was written last."""

    def hold(self, tensor: torch.Tensor, look: Look) -> Look:
        """Return a look with what is held of its tensor."""
        if nn.parameter.is_lazy(tensor):
            return look
        views = self._held.setdefault(id(look[0]), {})
        held = views.get(look[1:5])
        if held is None:
            held = views[look[1:5]] = self._hold(tensor)
        return (*look[:5], look[5] if len(look) > 5 else None, held)

    def copy(self, look: Look) -> None:
        """Copy what is held of a tensor's memory, which is about to be written."""
        for held in self._held.pop(id(look[0]), {}).values():
            held[0] = held[0].clone()


Stages = tuple[dict[str, torch.Tensor], ...]
"""For each attention, stage name to tensor."""


def unshared(stages: Stages) -> Stages:
    """Return the same tensors, those copied whose memory is held by somebody else too.

    While a run is recorded, a kept tensor is copied before its memory is written. Afterwards nobody looks, and the
    memory may be anybody's: an output that was returned, an input, a parameter, a cache.
    """
    every = {id(tensor): tensor for held in stages for tensor in held.values()}
    memory = {number: look[0] for number, look in zip(every, Looker().write_down(every.values()), strict=True)}
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
