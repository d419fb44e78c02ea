"""Find, convert and copy the tensors in the arguments and results of a forward, and copy modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import InputError, is_out_of_memory
from ..text import a_kind, first_line

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


def argument_names(module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by the parameter names of `forward`, in its order; by position if they do not fit it."""
    function = module.forward if isinstance(module, nn.Module) else module
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(place): value for place, value in enumerate(args)}, **kwargs}


def tensors_in(value: Any, name: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses, with its path: `1.attentions.0`.

    `within` is the ids of the enclosing containers, so that a container which contains itself is visited once.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in within:
        return
    for key, child in parts_of(value):
        yield from tensors_in(child, f"{name}.{key}" if name else str(key), (*within, id(value)))


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a tuple, list, mapping or dataclass by index, key or field; empty for any other value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        stored = getattr(value, "__dict__", None)  # an object may raise if a field is asked for
        return [(f.name, getattr(value, f.name, None) if stored is None else stored.get(f.name)) for f in fields(value)]
    return []


def with_parts(value: Any, parts: list[Any]) -> Any:
    """Return a tuple, list, dict or dataclass with its parts replaced in order; any other value unchanged."""
    if type(value) in (tuple, list):
        return type(value)(parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if not isinstance(value, dict) and not is_dataclass(value):
        return value
    copied = copy.copy(value)
    put = copied.__setitem__ if isinstance(copied, dict) else partial(object.__setattr__, copied)  # also if frozen
    for (key, _), part in zip(parts_of(value), parts, strict=True):
        put(key, part)
    return copied


def first_tensor(result: Any) -> Tensor:
    """Return the first tensor in a module's result, made dense: `output` of `(output, weights)`.

    Raises `InputError` if there is no tensor.
    """
    for _, tensor in tensors_in(result):
        return dense(tensor)
    raise InputError(
        f"the forward returned {'None' if result is None else a_kind(result)}, which contains no tensor. "
        "Return the output tensor."
    )


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor as a dense one: a nested tensor is padded, a sparse or quantized tensor is converted."""
    if tensor.is_nested:
        return cast(Tensor, torch.nested.to_padded_tensor(tensor, 0.0))
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def described(values: Mapping[str, Any]) -> str:
    """Return arguments by name as text, each tensor as its dtype and shape: `x float32 [2, 10, 512]`."""
    return ", ".join(f"{name} {_described(value)}" for name, value in values.items())


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if type(value) in (list, tuple):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, dict):
        return f"{{{described(value)}}}"
    if parts_of(value):
        return f"{type(value).__name__}({described(dict(parts_of(value)))})"
    return str(value)


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested value with `change` applied to each leaf; a leaf that occurs twice is changed once."""
    seen: dict[int, Any] = {}

    def walk(part: Any, within: tuple[int, ...] = ()) -> Any:
        parts = parts_of(part) if id(part) not in within else []  # a container may contain itself
        if parts:
            return with_parts(part, [walk(child, (*within, id(part))) for _, child in parts])
        if id(part) not in seen:
            seen[id(part)] = change(part)
        return seen[id(part)]

    return walk(value)


def cast_module(module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None = None) -> nn.Module:
    """Convert the parameters and buffers of a module in place, as `cast_tensors` does, and return it."""
    converted: nn.Module = module._apply(lambda tensor: _cast(tensor, dtype, device))
    return converted


def cast_tensors(value: Any, dtype: torch.dtype | None, device: torch.device | str | None = None) -> Any:
    """Return a nested value with its tensors detached, on `device` and, if floating-point, in `dtype`.

    None keeps the device or the dtype. A complex tensor stays complex; `nn.Module.to` would drop its imaginary part.
    """
    return changed(value, lambda part: _cast(part.detach(), dtype, device) if isinstance(part, Tensor) else part)


def _cast(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    if tensor.is_complex():
        dtype = dtype.to_complex() if dtype in (torch.float32, torch.float64) else None
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() or tensor.is_complex() else None)


def with_copies(value: T) -> T:
    """Return a nested value with copies of all that a run may write to, e.g. a tensor or a cache of a user's class.

    What occurs twice is copied once. A tensor that overlaps itself in memory is shared: torch does not write to it.
    So is an object that cannot be copied.
    """

    def copied(part: Any) -> Any:
        if isinstance(part, (nn.Module, *PLAIN)):
            return part
        try:
            if not isinstance(part, Tensor):
                return copy.deepcopy(part)
            overlaps = part.layout == torch.strided and 0 in part.stride() and part.numel() > 1
            return part if part.is_meta or overlaps else part.detach().clone()
        except Exception:  # user classes may raise anything when copied
            return part

    return cast(T, changed(value, copied))


def copy_module(module: M, instead: Mapping[int, Any] | None = None) -> M:
    """Return a deep copy of a module; `instead` maps ids of its objects to their replacements in the copy.

    Many modules keep the attention weights of their last run together with the autograd graph. torch cannot deep-copy
    such a tensor, so its content is copied.

    Raises `InputError` if an object of the module cannot be copied.
    """
    memo = dict(instead or {})
    for part in module.modules():
        for _, tensor in tensors_in(vars(part)):
            if not tensor.is_leaf:
                memo.setdefault(id(tensor), tensor.detach().clone())
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # copying a user's object may raise anything
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{type(module).__name__} cannot be copied by copy.deepcopy: {first_line(error)}. "
            "It is measured and changed in a copy. Make each attribute copyable."
        ) from error
