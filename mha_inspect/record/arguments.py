"""What goes into a forward and comes out of it: the tensors in it by name, and copies of it and of the module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import InputError, is_out_of_memory
from ..text import a_kind, first_line

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")


def argument_names(module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments under the names that `forward` gives them, in its order."""
    function = module.forward if isinstance(module, nn.Module) else module
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(place): value for place, value in enumerate(args)}, **kwargs}


def tensors_in(value: Any, name: str = "", within: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in nested tuples, lists, mappings and dataclasses, with its place: `1.attentions.0`.

    `within` has the ids of what the value lies in: what holds itself is gone through once.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    if id(value) in within:
        return
    for key, child in parts_of(value):
        yield from tensors_in(child, f"{name}.{key}" if name else str(key), (*within, id(value)))


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """Return what a tuple, list, mapping or dataclass holds, by key, place or name; empty for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    if is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        return [(f.name, getattr(value, f.name, None)) for f in fields(value)]
    return []


def with_parts(value: Any, parts: list[Any]) -> Any:
    """Return a tuple, list, dict or dataclass with other parts, in their order; anything else as it is."""
    if type(value) in (tuple, list):
        return type(value)(parts)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if not isinstance(value, dict) and not is_dataclass(value):
        return value
    other = copy.copy(value)
    for (key, _), part in zip(parts_of(value), parts, strict=True):
        if isinstance(other, dict):
            other[key] = part
        else:
            object.__setattr__(other, key, part)  # also of a frozen one
    return other


def first_tensor(result: Any) -> Tensor:
    """Return the tensor that a module's result is, or begins with: `output` of `(output, weights)`, as `dense` has it.

    Raises `InputError` when there is none.
    """
    for _, tensor in tensors_in(result):
        return dense(tensor)
    raise InputError(
        f"the forward returned {'None' if result is None else a_kind(result)}, with no tensor in it to "
        "compare. Let it return its output."
    )


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor with a number at every place: one that is nested, sparse or quantized is written out."""
    if tensor.is_nested:
        return cast(Tensor, torch.nested.to_padded_tensor(tensor, 0.0))
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def described(values: Mapping[str, Any]) -> str:
    """Return arguments by name as text, a tensor as its dtype and shape: `x float32 [2, 10, 512]`."""
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
    """Return what holds things with something made of each of them; one that is given twice stays one."""
    seen: dict[int, Any] = {}

    def walk(part: Any, within: tuple[int, ...] = ()) -> Any:
        own = parts_of(part) if id(part) not in within else []  # what holds itself is gone through once
        if own:
            return with_parts(part, [walk(child, (*within, id(part))) for _, child in own])
        if id(part) not in seen:
            seen[id(part)] = change(part)
        return seen[id(part)]

    return walk(value)


def cast_tensors(value: Any, dtype: torch.dtype | None, device: torch.device | None = None) -> Any:
    """Return what holds tensors with those detached, and those of floating-point numbers in `dtype`, if one is given.

    With `device` they are there.
    """

    def own(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.detach().to(device=device, dtype=dtype if part.is_floating_point() else None)

    return changed(value, own)


def with_copies(value: T) -> T:
    """Return what holds tensors with copies of those, which may be written to; one that is given twice stays one."""
    return cast(T, changed(value, lambda part: part.detach().clone() if isinstance(part, Tensor) else part))


def copy_module(module: M, instead: Mapping[int, Any] | None = None) -> M:
    """Return a deep copy; `instead` has what stands in it for objects of the module, by their ids.

    Many modules hold on to the weights of their last run, with the graph that they came of. Such a tensor cannot be
    copied: its content is.

    Raises `InputError` where an object of the module refuses to be copied.
    """
    memo = dict(instead or {})
    for part in module.modules():
        for _, tensor in tensors_in(vars(part)):
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
