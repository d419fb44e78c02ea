"""Which tensor is which while a forward runs: by the memory that it looks at, and how."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

Look = tuple[Any, ...]
"""A tensor as it is now: a weak reference to its memory, offset, shape, stride, dtype; where it has no dimension, its
number or None; where it is kept, a list with the tensor. The same memory has the same reference, which no other has."""


def identity(tensor: torch.Tensor) -> tuple[int, tuple[Any, ...]]:
    """Return the address of a tensor's storage, and what tells it from other views of the same storage."""
    if tensor.is_nested:  # rows of different lengths have no shape: one buffer
        rows = _buffer(tensor)
        return rows.untyped_storage()._cdata, (0, (rows.numel(),), (1,), tensor.dtype)
    try:
        address = tensor.untyped_storage()._cdata
        return address, (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have no storage of their own
        return id(tensor), (0, _shape(tensor), (), tensor.dtype)


def _buffer(nested: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = nested if nested.layout == torch.strided else nested.__dict__["_values"]
    return rows


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)  # one that is lazy has no shape yet


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


def weak_refs() -> Any:
    """Return what makes the weak reference to a storage: the same one whenever it is asked about the same memory.

    Python's own lies in memory of Python's. torch's keeps what is left of a storage in place, between the large blocks
    that a forward frees, and so they cannot be joined and used again.
    """
    return ref if _LASTING else _AddressRefs()


def look_at(tensor: torch.Tensor, weak: Any) -> Look:
    """Return what identifies a tensor now."""
    if type(tensor) in _PLAIN_TYPES:
        try:
            shape = tensor.shape
            if shape:
                return weak(tensor.untyped_storage()), tensor.storage_offset(), shape, tensor.stride(), tensor.dtype
            look: Look = weak(tensor.untyped_storage()), tensor.storage_offset(), (), (), tensor.dtype
        except (NotImplementedError, RuntimeError):
            look = _look_closely(tensor, weak)
    else:
        look = _look_closely(tensor, weak)
    return look if look[2] else (*look, _number(tensor))


def _look_closely(tensor: torch.Tensor, weak: Any) -> Look:
    """Return the same of a tensor of any class and layout, as `identity` does."""
    if tensor.is_nested:
        rows = _buffer(tensor)
        return weak(rows.untyped_storage()), 0, (rows.numel(),), (1,), tensor.dtype
    try:
        memory = weak(tensor.untyped_storage())
        return memory, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
    except (NotImplementedError, RuntimeError, ValueError):  # the last of one that is lazy: it has none yet
        return ref(tensor), 0, _shape(tensor), (), tensor.dtype


def _number(tensor: torch.Tensor) -> float | None:
    """Return the number in a real tensor of no dimension on the CPU; None for any other."""
    if tensor.device.type == "cpu" and not tensor.dtype.is_complex:
        with suppress(RuntimeError, ValueError):  # one without memory: a zero of forward-mode gradients, fake, lazy
            return tensor.item()
    return None
