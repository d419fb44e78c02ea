"""One module's arguments for another: the same tensors into two forwards, or what a whole gives a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..build.arguments import signature_of
from ..build.target import Target
from ..build.vocabulary import Kind
from ..errors import InputError, SpecError
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
"""For an argument of a kind, those of the other forward that it may be, the nearest first."""
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, Tensor)


class _CaughtError(BaseException):
    """The module has been called with these: the rest of the run tells nothing more."""


# -- the arguments of a call by name -----------------------------------------------------------------------------------


def named_arguments(module: nn.Module, call: Call) -> dict[str, Any]:
    """Return the arguments of a call by the names of the forward, `x` for one that has none."""
    parameters = signature_of(module.forward)
    nameless = [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_ONLY] or ["x"]
    return {**dict(zip(nameless, call.args, strict=False)), **call.kwargs}


def tensors_of(module: nn.Module, call: Call) -> dict[str, tuple[Kind, Tensor]]:
    """Return the tensors of a call by path, with what each is by its name: arguments, then what those hold."""
    forward = Forward.of(module)
    tensors = sorted(tensors_in(named_arguments(module, call)), key=lambda pair: "." in pair[0])
    return {path: (forward.kind(path.rpartition(".")[2]), tensor) for path, tensor in tensors}


def call_with(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: str) -> Call:
    """Return a call with these arguments, by the names of the forward as far as it can be given them by name."""
    parameters = signature_of(module.forward)
    names = [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    # What stands behind a place without a name can be given by its place alone.
    by_place = len(args) > len(names) or any(p.kind is Parameter.POSITIONAL_ONLY for p in parameters.values())
    named = {**({} if by_place else dict(zip(names, args, strict=False))), **kwargs}
    first = next((b for m in module.modules() if isinstance(b := getattr(m, "batch_first", None), bool)), True)
    call = Call(args if by_place else (), named, "", origin=origin, batch_first=first)
    values = {name: value for name, value in named_arguments(module, call).items() if value is not None}
    drawn = tuple(path for path, (kind, _) in tensors_of(module, call).items() if kind not in ("mask", "setting"))
    return replace(call, described=described(values), drawn=drawn)


# -- the same tensors into two forwards --------------------------------------------------------------------------------


def _tensor_for(name: str, kind: Kind, given: dict[str, tuple[Kind, Tensor]], *, whole: bool = False) -> Tensor | None:
    """Return the tensor of another call that an argument of this name and kind gets; None where there is none for it.

    `whole`: whether it is to hold whole numbers.
    """
    fitting = {n: pair for n, pair in given.items() if pair[1].is_floating_point() != whole}
    if name in fitting:
        return fitting[name][1]
    alike = (tensor for like in _STANDS_FOR.get(kind, ()) for other, tensor in fitting.values() if other == like)
    return next(alike, None)


def with_the_same(call: Call, module: nn.Module, other: Call, other_module: nn.Module, *, rounded: bool = True) -> Call:
    """Return the call with the tensors of another one in the place of those that were drawn for it, in their dtype.

    They are laid out as this forward takes them; one that serves as several stays one. Where they are not `rounded` to
    their dtype, they are as the other one has them.

    Raises `InputError` where one takes what the other has no tensor for, or one of another shape.
    """
    given, tensors = tensors_of(other_module, other), tensors_of(module, call)
    instead: dict[str, Tensor] = {}
    moved: dict[int, Tensor] = {}
    for name in call.drawn:
        if "." in name:  # what an argument holds stays as it is
            continue
        kind, tensor = tensors[name]
        match = _tensor_for(name, kind, given, whole=not tensor.is_floating_point())
        if match is not None and id(match) not in moved:
            is_turned = call.batch_first != other.batch_first and match.dim() == 2 + match.is_floating_point()
            laid_out = match.transpose(0, 1).contiguous() if is_turned else match
            dtype = tensor.dtype if rounded and tensor.is_floating_point() else None
            moved[id(match)] = laid_out.to(device=tensor.device, dtype=dtype)
        fits = match is not None and moved[id(match)].dim() == tensor.dim()
        # What a model gives has lengths of its own.
        sizes = slice(None) if kind == "image" else slice(-1, None) if tensor.is_floating_point() else slice(0)
        if match is None or not fits or moved[id(match)].shape[sizes] != tensor.shape[sizes]:
            has = ", ".join(f"{n} {list(t.shape)}" for n, (_, t) in given.items()) or "no tensor"
            raise InputError(
                f"{type(module).__name__}.forward takes {name} {list(tensor.shape)} and {type(other_module).__name__}"
                f".forward takes {has}: diff gives both the same input. "
                "Give both the same sizes: --left-set, --right-set, or --input-shape."
            )
        instead[name] = moved[id(match)]
    arguments = named_arguments(module, call) | instead
    kwargs = {name: arguments.pop(name) for name in call.kwargs}
    origin = call.origin if not instead or other.origin == call.origin else f"what {type(other_module).__name__} gets"
    return replace(call, args=(*arguments.values(), *call.args[len(arguments) :]), kwargs=kwargs, origin=origin)


def layer_inputs(module: nn.Module, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value for a layer, from the arguments of a forward.

    Raises `InputError` where the forward takes no sequence of vectors.
    """
    given = tensors_of(module, call)
    query, key, value = (_tensor_for("", kind, given) for kind in ("query", "key", "value"))
    if query is None or key is None or value is None or query.dim() not in (2, 3):
        takes = ", ".join(f"{name} {list(tensor.shape)}" for name, (_, tensor) in given.items()) or "no tensor"
        raise InputError(
            f"{type(module).__name__}.forward takes {takes}, and a layer takes a query, batch query embed: diff gives "
            "both the same input. Compare its attention: --left-module or --right-module PATH, as trace lists them."
        )
    return query, key, value


# -- a part of a whole -------------------------------------------------------------------------------------------------


def part_of(target: Target, call: Call, path: str) -> tuple[Target, Call]:
    """Return the module at `path` as a target of its own, with the arguments that its first call in the whole gets.

    The whole is left as it was.

    Raises `SpecError` where there is no such module, `InputError` where the whole does not call it.
    """
    paths = {name: module for name, module in target.module.named_modules() if name}
    if path not in paths:
        listed = first_few(list(paths), 4) or "none"  # of a long list these say how paths are written
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
            f"{target.name} does not call its module {shown(path)} in this forward, so nothing tells what it takes. "
            "Name one that it calls."
        )
    except _CaughtError as caught:
        args, kwargs = with_copies(caught.args)
    finally:
        handle.remove()
    part = Target(module, f"{target.made_from} {path}", target.passed, target.notes, target.arguments)
    parameters = signature_of(module.forward)
    may_go = {name for name, parameter in parameters.items() if parameter.default is None}
    by_name = call_with(module, args, kwargs, f"what {target.name} gives it")
    kwargs = {name: value for name, value in by_name.kwargs.items() if name not in may_go or _is_plain(value)}
    call = call_with(module, by_name.args, kwargs, by_name.origin)
    return part, replace(call, drawn=tuple(path for path in call.drawn if "." not in path))


def _is_plain(value: Any) -> bool:
    """Return whether a value is data that a run leaves as it is; a cache of keys, for one, is filled by every run."""
    parts = [part for _, part in parts_of(value)] if isinstance(value, (list, tuple, dict)) else []
    return all(map(_is_plain, parts)) if parts else isinstance(value, (*_PLAIN, list, tuple, dict))


def with_arguments_of(target: Target, call: Call) -> Target:
    """Return a target whose forward gets the arguments of this call that it has by the same name, or what --set says.

    A port of a module has the names of what it is a port of: rotary positions, a mask.
    """
    parameters = signature_of(target.module.forward)
    same = {n: v for n, v in call.kwargs.items() if n in parameters and v is not None}
    return replace(target, forward_settings={**same, **target.forward_settings})
