"""A copy of a module, to be run in another dtype or to be changed, while the module itself stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from ..errors import InputError
from ..targets.memory import is_out_of_memory
from ..text import first_line

M = TypeVar("M", bound=nn.Module)


def copy_module(module: M, instead: Mapping[int, Any] | None = None) -> M:
    """A deep copy; `instead` has what stands in it for objects of the module, by their ids.

    Many modules hold on to the weights of their last run, with the graph that they came of. Such a tensor cannot be
    copied: its content is.

    Raises `InputError` where an object of the module refuses to be copied.
    """
    memo = dict(instead or {})
    for part in module.modules():
        for tensor in _tensors_in(vars(part)):
            if not tensor.is_leaf:
                memo.setdefault(id(tensor), tensor.detach().clone())
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # whatever the copying of somebody's objects may raise
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{type(module).__name__} cannot be copied, and it is measured and changed in a copy: {first_line(error)}. "
            "Let what it holds be copied by copy.deepcopy."
        ) from error


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
