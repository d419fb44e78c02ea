"""Find, convert and copy the tensors in the arguments and results of a forward, and copy modules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
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
        by_place = {str(place): value for place, value in enumerate(args)}
        return {**by_place, **kwargs}


def tensors_in(value: Any, name: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses, with its path: `1.attentions.0`.

    `within` is the ids of the enclosing containers, so that a container which contains itself is visited once.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in within:
        return
    within = (*within, id(value))
    for key, child in parts_of(value):
        path = f"{name}.{key}" if name else str(key)
        yield from tensors_in(child, path, within)


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the parts of a tuple, list, mapping or dataclass by index, key or field; empty for any other value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        keys = getattr(value, "_fields", range(len(value)))
        return list(zip(keys, value, strict=True))
    if not is_dataclass(value) or isinstance(value, (type, nn.Module)):
        return []
    names = [field.name for field in fields(value)]
    stored = getattr(value, "__dict__", None)
    if stored is None:
        return [(name, getattr(value, name, None)) for name in names]
    # An object may raise if a field is asked for.
    return [(name, stored.get(name)) for name in names]


def with_parts(value: Any, parts: list[Any]) -> Any:
    """Return a tuple, list, dict or dataclass with its parts replaced in order; any other value unchanged."""
    if type(value) in (tuple, list):
        return type(value)(parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if not isinstance(value, dict) and not is_dataclass(value):
        return value
    copied = copy.copy(value)
    for (key, _), part in zip(parts_of(value), parts, strict=True):
        if isinstance(copied, dict):
            copied[key] = part
        else:
            object.__setattr__(copied, key, part)  # also if it is frozen
    return copied


def first_tensor(result: Any) -> Tensor:
    """Return the first tensor in a module's result, made dense: `output` of `(output, weights)`.

    Raises `InputError` if there is no tensor.
    """
    for _, tensor in tensors_in(result):
        return dense(tensor)
    kind = "None" if result is None else a_kind(result)
    raise InputError(f"the forward returned {kind}, which contains no tensor. Return the output tensor.")


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor as a dense one: a nested tensor is padded, a sparse or quantized tensor is converted."""
    if tensor.is_nested:
        return cast(Tensor, torch.nested.to_padded_tensor(tensor, 0.0))
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def described(values: Mapping[str, Any]) -> str:
    """Return arguments by name as text, each tensor as its dtype and shape: `x float32 [2, 10, 512]`."""
    texts = [f"{name} {_described(value)}" for name, value in values.items()]
    return ", ".join(texts)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {list(value.shape)}"
    if type(value) in (list, tuple):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, dict):
        return f"{{{described(value)}}}"
    parts = dict(parts_of(value))
    if parts:
        return f"{type(value).__name__}({described(parts)})"
    return str(value)


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nested value with `change` applied to each leaf; a leaf that occurs twice is changed once."""
    seen: dict[int, Any] = {}

    def walk(part: Any, within: tuple[int, ...] = ()) -> Any:
        parts = parts_of(part) if id(part) not in within else []  # a container may contain itself
        if parts:
            within = (*within, id(part))
            return with_parts(part, [walk(child, within) for _, child in parts])
        if id(part) not in seen:
            seen[id(part)] = change(part)
        return seen[id(part)]

    return walk(value)


def cast_module(module: nn.Module, dtype: torch.dtype | None, device: torch.device | str | None = None) -> nn.Module:
    """Convert the parameters and buffers of a module in place, as `cast_tensors` does, and return it."""
    cast_to = partial(_cast, dtype=dtype, device=device)
    converted: nn.Module = module._apply(cast_to)
    return converted


def cast_tensors(value: Any, dtype: torch.dtype | None, device: torch.device | str | None = None) -> Any:
    """Return a nested value with its tensors detached, on `device` and, if floating-point, in `dtype`.

    None keeps the device or the dtype. A complex tensor stays complex; `nn.Module.to` would drop its imaginary part.
    """

    def convert(part: Any) -> Any:
        return _cast(part.detach(), dtype, device) if isinstance(part, Tensor) else part

    return changed(value, convert)


def _cast(tensor: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
    if tensor.is_complex():
        dtype = dtype.to_complex() if dtype in (torch.float32, torch.float64) else None
    elif not tensor.is_floating_point():
        dtype = None
    return tensor.to(device=device, dtype=dtype)


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
            if part.is_meta or _overlaps_itself(part):
                return part
            return part.detach().clone()
        except Exception:  # user classes may raise anything when copied
            return part

    return cast(T, changed(value, copied))


def _overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as in `torch.ones(1).expand(4)`."""
    if tensor.layout != torch.strided or tensor.numel() < 2:
        return False
    return 0 in tensor.stride()


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
            "The run is measured on a copy. Make each attribute copyable."
        ) from error
