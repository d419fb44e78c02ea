"""One module's arguments for another: the same tensors for two forwards, or a model's for one of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..making.arguments import signature_of
from ..making.target import Target
from ..making.vocabulary import Kind
from ..record.arguments import described, parts_of, tensors_in, with_copies
from ..text import did_you_mean, first_few, shown
from .call import Call, Forward

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
"""Kind of an argument to the kinds of the other forward that may replace it, the nearest first."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, Tensor)


class _CaughtError(BaseException):
    """Raised in the call of the module, with its arguments: the rest of the run is not needed."""


# -- the arguments of a call by name -----------------------------------------------------------------------------------


def named_arguments(module: nn.Module, call: Call) -> dict[str, Any]:
    """Return the arguments of a call by the names of the forward, `x` for one without a name."""
    parameters = signature_of(module.forward)
    nameless = [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_ONLY] or ["x"]
    return {**dict(zip(nameless, call.args, strict=False)), **call.kwargs}


def tensors_of(module: nn.Module, call: Call) -> dict[str, tuple[Kind, Tensor]]:
    """Return the tensors of a call by path, each with its kind by name: arguments, then tensors in arguments."""
    forward = Forward.of(module)
    tensors = sorted(tensors_in(named_arguments(module, call)), key=lambda pair: "." in pair[0])
    return {path: (forward.kind(path.rpartition(".")[2]), tensor) for path, tensor in tensors}


def call_with(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: str) -> Call:
    """Return a call with these arguments, by the names of the forward as far as possible."""
    parameters = signature_of(module.forward)
    names = [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    # An argument after one without a name can only be positional.
    by_place = len(args) > len(names) or any(p.kind is Parameter.POSITIONAL_ONLY for p in parameters.values())
    named = {**({} if by_place else dict(zip(names, args, strict=False))), **kwargs}
    first = next((b for m in module.modules() if isinstance(b := getattr(m, "batch_first", None), bool)), True)
    call = Call(args if by_place else (), named, "", origin=origin, batch_first=first, is_layout_known=False)
    values = {name: value for name, value in named_arguments(module, call).items() if value is not None}
    drawn = tuple(path for path, (kind, _) in tensors_of(module, call).items() if kind not in ("mask", "setting"))
    return replace(call, described=described(values), drawn=drawn)


# -- the same tensors into two forwards --------------------------------------------------------------------------------


def _tensor_for(name: str, kind: Kind, given: dict[str, tuple[Kind, Tensor]], *, whole: bool = False) -> Tensor | None:
    """Return the tensor of another call for an argument of this name and kind; None if there is none.

    `whole` says that it must contain whole numbers.
    """
    fitting = {n: pair for n, pair in given.items() if pair[1].is_floating_point() != whole}
    if name in fitting:
        return fitting[name][1]
    alike = (tensor for like in _STANDS_FOR.get(kind, ()) for other, tensor in fitting.values() if other == like)
    return next(alike, None)


def with_the_same(call: Call, module: nn.Module, other: Call, other_module: nn.Module, *, rounded: bool = True) -> Call:
    """Return the call with drawn tensors replaced by the tensors of another call, in the dtype of this one.

    They are laid out as this forward takes them; a tensor used several times stays one tensor. If they are not
    `rounded`, they keep the dtype of the other call.

    Raises `InputError` if the other call has no tensor for an argument, or one of another shape.
    """
    given, tensors = tensors_of(other_module, other), tensors_of(module, call)
    instead: dict[str, Tensor] = {}
    moved: dict[int, Tensor] = {}
    for name in call.drawn:
        if "." in name:  # tensors inside an argument are not replaced
            continue
        kind, tensor = tensors[name]
        match = _tensor_for(name, kind, given, whole=not tensor.is_floating_point())
        if match is not None and id(match) not in moved:
            is_transposed = call.batch_first != other.batch_first and match.dim() == 2 + match.is_floating_point()
            laid_out = match.transpose(0, 1).contiguous() if is_transposed else match
            dtype = tensor.dtype if rounded and tensor.is_floating_point() else None
            moved[id(match)] = laid_out.to(device=tensor.device, dtype=dtype)
        fits = match is not None and moved[id(match)].dim() == tensor.dim()
        # The lengths of a model's tensors may differ.
        sizes = slice(None) if kind == "image" else slice(-1, None) if tensor.is_floating_point() else slice(0)
        if match is None or not fits or moved[id(match)].shape[sizes] != tensor.shape[sizes]:
            has = ", ".join(f"{n} {list(t.shape)}" for n, (_, t) in given.items()) or "no tensor"
            raise InputError(
                f"{type(module).__name__}.forward takes {name} {list(tensor.shape)} and {type(other_module).__name__}"
                f".forward takes {has}, and both get the same input. "
                "Give both the same sizes: --left-set, --right-set, or --input-shape."
            )
        instead[name] = moved[id(match)]
    arguments = named_arguments(module, call) | instead
    kwargs = {name: arguments.pop(name) for name in call.kwargs}
    origin = call.origin if not instead or other.origin == call.origin else f"copied from {type(other_module).__name__}"
    return replace(call, args=(*arguments.values(), *call.args[len(arguments) :]), kwargs=kwargs, origin=origin)


def layer_inputs(module: nn.Module, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value for a layer, from the arguments of a forward.

    Raises `InputError` if the forward takes no sequence of vectors.
    """
    given = tensors_of(module, call)
    query, key, value = (_tensor_for("", kind, given) for kind in ("query", "key", "value"))
    if query is None or key is None or value is None or query.dim() not in (2, 3):
        takes = ", ".join(f"{name} {list(tensor.shape)}" for name, (_, tensor) in given.items()) or "no tensor"
        raise InputError(
            f"{type(module).__name__}.forward takes {takes}, but a layer takes a query, batch query embed. Both sides "
            "get the same input. Compare its attention: --left-module or --right-module PATH, as in trace."
        )
    return query, key, value


# -- a module of a target ----------------------------------------------------------------------------------------------


def part_of(target: Target, call: Call, path: str) -> tuple[Target, Call]:
    """Return the module at `path` as a target, with the arguments of its first call in a run of the whole target.

    The whole target is not changed.

    Raises `SpecError` if there is no such module, `InputError` if it is not called.
    """
    paths = {name: module for name, module in target.module.named_modules() if name}
    if path not in paths:
        listed = first_few(list(paths), 4) or "none"  # enough of a long list to show the form of paths
        raise SpecError(f"{target.name} has no module {shown(path)}. Its modules: {listed}.{did_you_mean(path, paths)}")
    module = paths[path]

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _CaughtError(args, kwargs)

    whole = call.of(target.module)
    handle = module.register_forward_pre_hook(catch, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad(), whole.replaying(whole.state()):
            whole.plain()
        raise InputError(
            f"{target.name} does not call its module {shown(path)} in this forward, so its inputs are unknown. "
            "Name a module that is called."
        )
    except _CaughtError as caught:
        args, kwargs = with_copies(caught.args)
    finally:
        handle.remove()
    part = Target(module, f"{target.made_from} {path}", target.passed, target.notes, target.arguments)
    parameters = signature_of(module.forward)
    optional = {name for name, parameter in parameters.items() if parameter.default is None}
    by_name = call_with(module, args, kwargs, f"given by {target.name}")
    kwargs = {name: value for name, value in by_name.kwargs.items() if name not in optional or _is_plain(value)}
    call = call_with(module, by_name.args, kwargs, by_name.origin)
    return part, replace(call, drawn=tuple(path for path in call.drawn if "." not in path))


def _is_plain(value: Any) -> bool:
    """Return whether a value is data that a run does not change, unlike e.g. a cache of keys."""
    parts = [part for _, part in parts_of(value)] if isinstance(value, (list, tuple, dict)) else []
    return all(map(_is_plain, parts)) if parts else isinstance(value, (*_PLAIN, list, tuple, dict))


def with_arguments_of(target: Target, call: Call) -> Target:
    """Return a target whose forward gets the arguments of this call with the same names, unless --set gave them.

    A port of a module often has the argument names of the original: rotary positions, a mask.
    """
    parameters = signature_of(target.module.forward)
    same = {n: v for n, v in call.kwargs.items() if n in parameters and v is not None}
    return replace(target, forward_settings={**same, **target.forward_settings})
