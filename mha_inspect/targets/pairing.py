"""The same tensors into two forwards, whatever each of them calls its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..record.arguments import parts_of, with_parts
from .call import Call
from .constructor import signature_of
from .vocabulary import Kind, kind_of

_STANDS_FOR: dict[Kind, tuple[Kind, ...]] = {
    "query": ("query", "hidden", "unknown"),
    "hidden": ("hidden", "query", "unknown"),
    "unknown": ("unknown", "hidden", "query"),
    "key": ("key", "other", "query", "hidden", "unknown"),
    "value": ("value", "key", "other", "query", "hidden", "unknown"),
    "other": ("other", "key", "value", "query", "hidden", "unknown"),
    "ids": ("ids", "hidden", "unknown"),
    "image": ("image", "hidden", "unknown"),
}
"""For an argument of a kind, those of the other forward that it may be, the nearest first."""


def arguments_of(module: nn.Module, call: Call) -> dict[str, tuple[Kind, Tensor]]:
    """The tensors of a call by the names of the forward, with what each is."""
    parameters = signature_of(module.forward)
    places = [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_ONLY]
    named = {**dict(zip(places or ["x"], call.args, strict=False)), **call.kwargs}
    unknown = Parameter("x", Parameter.POSITIONAL_ONLY)
    found = {
        name: (kind_of(parameters.get(name, unknown)), value)
        for name, value in named.items()
        if isinstance(value, Tensor)
    }
    for owner, held in named.items():
        for path, key, value in _held(owner, held):
            by_name = Parameter(key, Parameter.KEYWORD_ONLY) if key.isidentifier() else unknown
            found[path] = kind_of(by_name), value
    return found


def _held(owner: str, holder: Any) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors that an argument holds, with their paths and their own names."""
    for key, value in parts_of(holder):
        path = f"{owner}.{key}"
        if isinstance(value, Tensor):
            yield path, str(key), value
        yield from _held(path, value)


def _exchanged(path: str, value: Any, changed: Mapping[str, Tensor]) -> Any:
    """Return an argument with other tensors by their paths, itself or what it holds."""
    parts = parts_of(value)
    if not parts:
        return changed.get(path, value)
    return with_parts(value, [_exchanged(f"{path}.{key}", held, changed) for key, held in parts])


def tensor_for(name: str, kind: Kind, given: dict[str, tuple[Kind, Tensor]], *, whole: bool = False) -> Tensor | None:
    """The tensor of another call that an argument of this name and kind gets; None where there is none for it.

    `whole`: whether it is to hold whole numbers.
    """
    fitting = {n: pair for n, pair in given.items() if pair[1].is_floating_point() != whole}
    if name in fitting:
        return fitting[name][1]
    order = _STANDS_FOR.get(kind, ())
    return next((tensor for like in order for own, tensor in fitting.values() if own == like), None)


def with_the_same(call: Call, module: nn.Module, other: Call, other_module: nn.Module, *, rounded: bool = True) -> Call:
    """The call with the tensors of another one in the place of those that were drawn for it, in their dtype.

    Where they are not `rounded` to that, they are as the other one has them.

    Raises `InputError` where one takes what the other has no tensor for, or one of another shape.
    """
    given, own = arguments_of(other_module, other), arguments_of(module, call)
    names, others = type(module).__name__, type(other_module).__name__
    changed: dict[str, Tensor] = {}
    for name in call.drawn:
        kind, tensor = own[name]
        if kind == "mask":
            continue
        found = tensor_for(name, kind, given, whole=not tensor.is_floating_point())
        if found is None or not _fits(found, tensor, kind, any_length=other.origin != call.origin):
            takes = f"{name} {list(tensor.shape)}"
            has = ", ".join(f"{n} {list(t.shape)}" for n, (_, t) in given.items()) or "no tensor"
            raise InputError(
                f"{names}.forward takes {takes} and {others}.forward takes {has}: diff gives both the same input. "
                "Give both the same sizes: --left-set, --right-set, or --input-shape."
            )
        dtype = tensor.dtype if rounded and tensor.is_floating_point() else None
        changed[name] = found.to(device=tensor.device, dtype=dtype)
    places = [n for n, p in signature_of(module.forward).items() if p.kind is Parameter.POSITIONAL_ONLY] or ["x"]
    args = tuple(_exchanged(name, value, changed) for name, value in zip(places, call.args, strict=False))
    kwargs = {name: _exchanged(name, value, changed) for name, value in call.kwargs.items()}
    origin = call.origin if not changed or other.origin == call.origin else f"what {others} gets"
    return replace(call, args=args, kwargs=kwargs, origin=origin)


def _fits(found: Tensor, drawn: Tensor, kind: Kind, *, any_length: bool) -> bool:
    """Whether a tensor may stand in the place of one that was drawn: what a model gives has lengths of its own."""
    if not any_length or kind == "image" or not found.dim():
        return found.shape == drawn.shape
    return found.dim() == drawn.dim() and (found.shape[-1] == drawn.shape[-1] or not found.is_floating_point())


def layer_inputs(module: nn.Module, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value for a layer, from the arguments of a forward.

    Raises `InputError` where the forward takes no sequence of vectors.
    """
    given = arguments_of(module, call)
    query = tensor_for("", "query", given)
    if query is None or query.dim() not in (2, 3) or not isinstance(query, torch.Tensor):
        takes = ", ".join(f"{name} {list(tensor.shape)}" for name, (_, tensor) in given.items()) or "no tensor"
        raise InputError(
            f"{type(module).__name__}.forward takes {takes}, and a layer takes a query, batch query embed: diff gives "
            "both the same input. Compare its attention: --left-module or --right-module PATH, as trace lists them."
        )
    key = tensor_for("", "key", given)
    value = tensor_for("", "value", given)
    key = query if key is None else key
    return query, key, key if value is None else value
