"""Build a module, unless it is too large for this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
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
        with _bounded(called, _UNASKED):
            return make()
    except _LargeError:
        pass
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    _require_room(make, called, way)
    with _bounded(called):
        return make()


def _require_room(make: Callable[[], object], called: str, way: str) -> None:
    """Raise `DoesNotFitError` if the parameters of what a constructor makes take more memory than is free."""
    free = free_memory()
    if free is None:
        return
    try:
        with _bounded(called), torch.device("meta"):
            made = make()
    except DoesNotFitError:
        raise
    except Exception:  # some constructors compute with their parameters
        return
    module = made[0] if isinstance(made, tuple) and made else made
    size = sum(parameter.nbytes for parameter in module.parameters()) if isinstance(module, nn.Module) else 0
    if size > free:
        raise DoesNotFitError(
            f"{called} has parameters of {byte_size(size)}, and {byte_size(free)} of memory are free. {way}"
        )


@contextmanager
def _bounded(called: str, most_bytes: float = inf) -> Iterator[None]:
    """End a constructor with `_LargeError` at so many bytes, and with `DoesNotFitError` at too many parameters."""
    count, size = 0, 0

    def registered(_: nn.Module, __: str, parameter: nn.Parameter | None) -> None:
        nonlocal count, size
        count += 1
        if parameter is not None and not parameter.is_meta:
            size += parameter.nbytes
        if size > most_bytes:
            raise _LargeError
        # Even on meta they take memory.
        if count > _MOST_PARAMETERS:
            raise DoesNotFitError(
                f"{called} has more than {_MOST_PARAMETERS:,} parameter tensors, which is the limit. "
                "Give it fewer layers."
            )

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()
