"""Build a target, and stop before it makes more than there is room for.

Where the system promises more memory than there is, such a process is killed without a word when it fills it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ..errors import DoesNotFitError
from ..text import byte_size
from .memory import free_memory

_FACTORIES = frozenset({"empty", "zeros", "ones", "full", "rand", "randn", "randint", "eye", "normal"})
_NEAR = 8
"""What takes this part of the free memory is looked at more closely."""


class _NearError(BaseException):
    """A good part of the free memory has been asked for."""


class _Guard(TorchFunctionMode):
    """Counts the bytes of the tensors that are made, and stops before they are a good part of what is free."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.left = free // _NEAR

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _FACTORIES:
            self.left -= _bytes_of(args, kwargs)
            if self.left < 0:
                raise _NearError
        return func(*args, **kwargs)


def _bytes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of what a function makes that is given sizes; 0 where they are not among its arguments."""
    sizes = kwargs.get("size")
    if sizes is None:
        sizes = next((arg for arg in args if isinstance(arg, (tuple, list))), args)
    if str(kwargs.get("device", "cpu")).startswith("meta") or not all(type(size) is int for size in sizes):
        return 0
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return prod(sizes) * int(dtype.itemsize)


def with_room(build: Callable[[], Any], called: str) -> Any:
    """What `build` returns.

    It is run until it has asked for a good part of the free memory. Then it is run on meta, which tells what its
    parameters take, and once more from the start; it has to seed what it draws from.

    Raises `DoesNotFitError` where the parameters alone take more than is free.
    """
    free = free_memory("cpu")
    if free is None:
        return build()
    try:
        with _Guard(free):
            return build()
    except _NearError:
        pass
    need = _bytes_on_meta(build)
    if need is not None and need > free:
        raise DoesNotFitError(
            f"{called} needs about {byte_size(need)} and {byte_size(free)} are free on cpu. Give it smaller sizes. "
            "--device meta shows every shape without memory."
        )
    return build()


def _bytes_on_meta(build: Callable[[], Any]) -> int | None:
    """Bytes of the parameters and buffers; None where it cannot be built without memory."""
    try:
        with torch.device("meta"):
            module = build()
    except Exception:  # whatever somebody's constructor may raise where there are shapes and no numbers
        return None
    if not isinstance(module, nn.Module):
        return None
    made = [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_lazy(tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in made)
