"""Which tensor is which while a forward runs: by the memory that it looks at, and how."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from .ops import TensorRef


class Storage:
    """What is known of one piece of memory: which tensors look at it, and how often it was written."""

    __slots__ = ("made_by", "number", "owner", "seen", "version")

    def __init__(self, number: int, made_by: int | None, owner: Any) -> None:
        self.number = number
        self.owner = owner
        """Addresses are used again: a weak reference, as `owner_of` gives it, tells one owner from the next."""
        self.made_by = made_by
        """The operation that wrote it last; None where it came from outside."""
        self.version = 0
        self.seen: dict[tuple[Any, ...], tuple[TensorRef, int]] = {}
        """Offset, shape, stride and dtype, to the tensor and the version at which it was seen."""


def identity(tensor: torch.Tensor) -> tuple[int, tuple[Any, ...]]:
    """The address of a tensor's storage, and what tells it from other views of the same storage."""
    if tensor.is_nested:  # rows of different lengths have no shape: one buffer
        rows: torch.Tensor = tensor if tensor.layout == torch.strided else tensor.__dict__["_values"]
        return rows.untyped_storage()._cdata, (0, (rows.numel(),), (1,), tensor.dtype)
    try:
        address = tensor.untyped_storage()._cdata
        return address, (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    except (NotImplementedError, RuntimeError):  # sparse and wrapped tensors have no storage of their own
        shape = () if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)  # one that is lazy has no shape yet
        return id(tensor), (0, shape, (), tensor.dtype)


def owner_of(tensor: torch.Tensor) -> StorageWeakRef | ref[torch.Tensor]:
    """A weak reference to what `identity` takes the address of.

    One to a storage keeps its address from being given to another; one to a tensor can only tell that it was.
    """
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # no storage to refer to, as in `identity`
        return ref(tensor)
