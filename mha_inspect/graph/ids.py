"""Look tensors and operations up by their numbers: a tensor has one id in the whole recording, an operation one index.

>>> from mha_inspect.record.ops import TensorRef
>>> x, y = (TensorRef(number, (2,), (1,), 0, "float32", 4, number) for number in (7, 3))
>>> ids_of([x, y]) == {3, 7}, any_in([x, y], {3})
(True, True)
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TypeVar

from ..record.ops import TensorRef

T = TypeVar("T")


def ids_of(tensors: Iterable[TensorRef]) -> set[int]:
    """Return the ids of tensors."""
    return {tensor.id for tensor in tensors}


def by_id(tensors: Iterable[TensorRef]) -> dict[int, TensorRef]:
    """Return tensors by their ids, each once, in order."""
    return {tensor.id: tensor for tensor in tensors}


def any_in(tensors: Iterable[TensorRef], ids: Container[int]) -> bool:
    """Return whether one of these tensors is among those with these ids."""
    return any(tensor.id in ids for tensor in tensors)


def in_order(by_index: Mapping[int, T]) -> list[T]:
    """Return operations, or what belongs to them, in the order of the run, given by the index of the operation."""
    return [by_index[index] for index in sorted(by_index)]
