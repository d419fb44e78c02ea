"""Build a module, unless it is too large for this machine: then its size is found on meta, before it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import DoesNotFitError, is_out_of_memory
from ..files.memory import free_memory
from ..text import byte_size

T = TypeVar("T")
_MOST_PARAMETERS = 100_000
"""In tensors. A mixture of 256 experts in 61 layers, with separate matrices, has half as many."""
_UNASKED = 2**30
"""Bytes of parameters from which on the size of a module is found before it is built."""


class _LargeError(BaseException):
    """Ends a constructor whose parameters are large; no handler of the user's code takes it for an error."""


def built(make: Callable[[], T], called: str, way: str) -> T:
    """Return what a constructor makes. `called` is the call for messages, and `way` a way out.

    Raises `DoesNotFitError` if it makes too many parameters, or they take more memory than is free. An error of the
    constructor is raised as it is.
    """
    try:
        with _of_bounded_number(called), _ended_when_large():
            return make()
    except _LargeError:
        require_room(make, called, way)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        require_room(make, called, way)
        raise
    with _of_bounded_number(called):
        return make()


def require_room(make: Callable[[], object], called: str, way: str) -> None:
    """Raise `DoesNotFitError` if the parameters of what a constructor makes take more memory than is free."""
    free = free_memory()
    size = _size_on_meta(make)
    if free is None or size is None or size <= free:
        return
    raise DoesNotFitError(
        f"{called} has parameters of {byte_size(size)}, and {byte_size(free)} of memory are free. {way}"
    )


def _size_on_meta(make: Callable[[], object]) -> int | None:
    """Return the bytes of the parameters of what a constructor makes; None if it cannot be built on meta."""
    sizes: dict[int, int] = {}

    def registered(_: nn.Module, __: str, parameter: nn.Parameter) -> None:
        if parameter is not None:
            sizes[id(parameter)] = parameter.nbytes

    hook = register_module_parameter_registration_hook(registered)
    try:
        with torch.device("meta"):
            made = make()  # a reference to it, so that no id is given twice
        return sum(sizes.values()) if made is not None else None
    except Exception:  # some constructors compute with their parameters
        return None
    finally:
        hook.remove()


@contextmanager
def _ended_when_large() -> Iterator[None]:
    """End the block with `_LargeError` once modules in it have registered many bytes of parameters."""
    total = 0

    def registered(_: nn.Module, __: str, parameter: nn.Parameter) -> None:
        nonlocal total
        if parameter is not None and not parameter.is_meta:
            total += parameter.nbytes
        if total > _UNASKED:
            raise _LargeError

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _of_bounded_number(called: str) -> Iterator[None]:
    """Raise `DoesNotFitError` in a constructor that makes too many parameters: even on meta they take memory."""
    numbers = count(1)

    def registered(*_: object) -> None:
        if next(numbers) > _MOST_PARAMETERS:
            raise DoesNotFitError(
                f"{called} has more than {_MOST_PARAMETERS:,} parameter tensors, which is the limit. "
                "Give it fewer layers."
            )

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()
