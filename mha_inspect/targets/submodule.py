"""One module out of a target, called as the whole calls it: the attention of a model that takes token ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..naming.subject import Subject
from ..record.arguments import described, with_copies
from ..text import did_you_mean, first_few, shown
from .call import Call
from .constructor import signature_of
from .target import Target
from .vocabulary import kind_of

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
    kept = {
        name: value
        for name, value in given.items()
        if _is_plain(value) or name not in parameters or parameters[name].default is not None
    }
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
