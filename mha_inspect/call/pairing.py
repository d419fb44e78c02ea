"""Two targets beside each other: the same tensors into both forwards, whatever each of them calls its arguments.

Or one module out of a target, called as the whole calls it: the attention of a model that takes token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..build.arguments import signature_of
from ..build.target import Target
from ..build.vocabulary import Kind, kind_of
from ..errors import InputError, SpecError
from ..naming.subject import Subject
from ..record.arguments import described, parts_of, tensors_in, with_copies, with_parts
from ..text import did_you_mean, first_few, shown
from .call import Call

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
    """The tensors of a call by the names of the forward, with what each is: arguments, then what those hold."""
    parameters = signature_of(module.forward)
    named = {**dict(zip(_places(parameters), call.args, strict=False)), **call.kwargs}
    tensors = [pair for name, value in named.items() for pair in tensors_in(value, name)]
    found = {}
    for path, tensor in sorted(tensors, key=lambda one: "." in one[0]):
        key = path.rpartition(".")[2]
        by_name = Parameter(key if key.isidentifier() else "x", Parameter.KEYWORD_ONLY)
        found[path] = kind_of(parameters.get(path, by_name)), tensor
    return found


def _places(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return what stands for the names of arguments that have none in a call."""
    return [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_ONLY] or ["x"]


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
    places = zip(_places(signature_of(module.forward)), call.args, strict=False)
    args = tuple(_exchanged(name, value, changed) for name, value in places)
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
    query, key, value = (tensor_for("", kind, given) for kind in ("query", "key", "value"))
    if query is None or key is None or value is None or query.dim() not in (2, 3):
        takes = ", ".join(f"{name} {list(tensor.shape)}" for name, (_, tensor) in given.items()) or "no tensor"
        raise InputError(
            f"{type(module).__name__}.forward takes {takes}, and a layer takes a query, batch query embed: diff gives "
            "both the same input. Compare its attention: --left-module or --right-module PATH, as trace lists them."
        )
    return query, key, value


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


class _CaughtError(BaseException):
    """The module has been called: the rest of the run tells nothing more."""


def find_part(target: Target, path: str) -> nn.Module:
    """The module at a path.

    Raises `SpecError` with the nearest path when there is none.
    """
    paths: dict[str, nn.Module] = {name: module for name, module in target.module.named_modules() if name}
    if path not in paths:
        listed = first_few(list(paths), 4) or "none"  # of a long list these say how paths are written
        raise SpecError(f"{target.name} has no module {shown(path)}. Its modules: {listed}.{did_you_mean(path, paths)}")
    return paths[path]


def part_of(target: Target, call: Call, path: str) -> tuple[Target, Call]:
    """The module at `path` as a target of its own, with the arguments that its first call in the whole gets.

    The whole is left as it was.

    Raises:
        SpecError: there is no such module.
        InputError: the whole does not call it.
    """
    module = find_part(target, path)
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise _CaughtError

    whole = Subject(target.module, call.args, call.kwargs)
    handle = module.register_forward_pre_hook(catch, prepend=True, with_kwargs=True)
    try:
        with torch.no_grad(), whole.replaying(whole.state()):
            target.module(*call.args, **call.kwargs)
    except _CaughtError:
        pass
    finally:
        handle.remove()
    if not caught:
        raise InputError(
            f"{target.name} does not call its module {shown(path)} in this forward, so nothing tells what it takes. "
            "Name one that it calls."
        )
    part = Target(module, f"{target.made_from} {path}", target.passed, target.notes, target.arguments)
    return part, _call(module, *caught[0], f"what {target.name} gives it")


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], origin: str) -> Call:
    """The arguments of a call by the names of the forward, with copies of their tensors."""
    parameters = signature_of(module.forward)
    in_order = [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    # What stands behind a place without a name can be given by its place alone.
    nameless = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters.values())
    named = {} if nameless else dict(zip(in_order, args, strict=False))
    given = {**named, **kwargs}
    needed = {name for name in given if name not in parameters or parameters[name].default is not None}
    kept = {name: value for name, value in given.items() if name in needed or _is_plain(value)}
    places, kept = with_copies((args if nameless else (), kept))
    tensors = {name: value for name, value in kept.items() if isinstance(value, Tensor)}
    unknown = Parameter("x", Parameter.POSITIONAL_ONLY)
    return Call(
        places,
        kept,
        described({name: value for name, value in kept.items() if value is not None}),
        drawn=tuple(n for n in tensors if kind_of(parameters.get(n, unknown)) not in ("mask", "setting")),
        origin=origin,
        batch_first=next((b for m in module.modules() if isinstance(b := getattr(m, "batch_first", None), bool)), True),
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is data that a run leaves as it is; a cache of keys, for one, is filled by every run."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, (Tensor, *_PLAIN))


def with_arguments_of(target: Target, call: Call) -> Target:
    """A target whose forward gets the arguments of this call that it has by the same name, as far as --set is silent.

    A port of a module has the names of what it is a port of: rotary positions, a mask.
    """
    parameters = signature_of(target.module.forward)
    same = {n: v for n, v in call.kwargs.items() if n in parameters and v is not None}
    return replace(target, forward_settings={**same, **target.forward_settings})
