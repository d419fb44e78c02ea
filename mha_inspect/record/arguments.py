"""The tensors in what goes into a forward and comes out of it, by their names and places."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn


def argument_names(module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments under the names that `forward` gives them, in its order."""
    function = module.forward if isinstance(module, nn.Module) else module
    try:
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(place): value for place, value in enumerate(args)}, **kwargs}


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, with its place: `1.attentions.0`."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    children: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", range(len(value)))
        children = [(str(key), child) for key, child in zip(names, value, strict=True)]
    elif is_dataclass(value) and not isinstance(value, type):
        children = [(f.name, getattr(value, f.name)) for f in fields(value)]
    for key, child in children:
        yield from tensors_in(child, f"{name}.{key}" if name else key)


def described(values: Mapping[str, Any]) -> str:
    """Return arguments by name as text, a tensor as its dtype and shape: `x float32 [2, 10, 512]`."""
    return ", ".join(f"{name} {_described(value)}" for name, value in values.items())


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, dict):
        return f"{{{described(value)}}}"
    return str(value)
