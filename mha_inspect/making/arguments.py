"""The arguments of a target's constructor, from --set and from flags of a matching name.

Only required arguments and those that the user set are passed; the others keep their defaults.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from ..errors import SpecError
from ..text import did_you_mean, first_few, shown
from .config import config_for
from .settings import convert
from .vocabulary import ALIASES, Flags, argument_of_forward, flag_of, kind_of, named_for, origin_of

if TYPE_CHECKING:
    from torch import nn

_SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "kdim", "vdim", "seq_len")
_TENSORS = ("query", "key", "value", "hidden", "mask")


@dataclass
class Arguments:
    """The arguments of a constructor, and the flags that gave them."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Name to the flag that gave it, except where --set names it."""
    left: dict[str, str] = field(default_factory=dict)
    """Settings of --set that the constructor does not take."""
    names: list[str] = field(default_factory=list)
    """Every name that --set could give, those in a config after a point."""
    used: set[str] = field(default_factory=set)
    """The flags that gave an argument."""
    notes: list[str] = field(default_factory=list)
    """What was chosen for an argument that does not say what it is, as sentences."""


def signature_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a class or a function, with annotations resolved as far as possible."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
    hints: dict[str, Any] = {}
    with suppress(Exception):  # an annotation may name something undefined
        # A class has the hints of its __init__; mypy objects (misc) that a subclass may change it.
        maker = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]  # of that class alone
        hints = typing.get_type_hints(maker)
    resolved: dict[str, Parameter] = {}
    for name, parameter in parameters.items():
        resolved[name] = parameter.replace(annotation=hints.get(name, parameter.annotation))
    return resolved


def _nameable(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters that have one value each: all except `*args` and `**kwargs`."""
    nameable = dict(parameters)
    for name, parameter in parameters.items():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            del nameable[name]
    return nameable


def _is_required(parameter: Parameter) -> bool:
    """Return whether a parameter has no default."""
    return parameter.default is Parameter.empty


def bind(
    function: Callable[..., Any],
    settings: Mapping[str, str],
    flags: Flags,
    namespace: Mapping[str, Any],
    name: str,
) -> Arguments:
    """Return the arguments for a call of `function`.

    Raises `SpecError` if a value is invalid, or a required one is missing.
    """
    signature = signature_of(function)
    parameters = _nameable(signature)
    bound = Arguments(names=list(parameters))
    for key, text in settings.items():
        if key in parameters:
            bound.values[key] = _converted(parameters[key], text, namespace, flags.setting)
        else:
            bound.left[key] = text
    _pass_flags(parameters, bound, flags)
    for key, parameter in parameters.items():
        if key not in bound.values:
            _pass_config(function, parameter, bound, flags, namespace)
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.values()):
        _pass_other_names(bound, flags, namespace)
    missing = [key for key, parameter in parameters.items() if _is_required(parameter) and key not in bound.values]
    if not missing:
        return bound
    if all(kind_of(parameters[key]) in _TENSORS for key in missing):
        raise SpecError(
            f"{name} takes tensors ({', '.join(missing)}), but a target must be a class or a function "
            "that returns a module. Call it in the forward of a torch.nn.Module."
        )
    raise SpecError(_missing(name, missing, bound, flags.setting))


def _converted(parameter: Parameter, text: str, namespace: Mapping[str, Any], flag: str) -> Any:
    """Return the value of a setting for an argument of a constructor. A size is a whole number without saying so."""
    kind = parameter.annotation
    says_nothing = parameter.annotation is Parameter.empty and _is_required(parameter)
    if says_nothing and flag_of(parameter.name) in _SIZES:
        kind = int
    return convert(parameter.name, text, kind, parameter.default, namespace, flag)


def _pass_other_names(bound: Arguments, flags: Flags, namespace: Mapping[str, Any]) -> None:
    """Pass the settings that are left to a function with `**kwargs`, which may take any name."""
    for key in list(bound.left):
        if key.isidentifier():
            text = bound.left.pop(key)
            bound.values[key] = convert(key, text, Any, Parameter.empty, namespace, flags.setting)


def _missing(name: str, missing: list[str], bound: Arguments, flag: str) -> str:
    """Return the message for required arguments that were not given."""
    unknown = ""
    for key in bound.left:
        if key not in bound.names:
            unknown = f" {flag} {key} is not one of its arguments ({', '.join(bound.names)})."
            break
    them = "it" if len(missing) == 1 else "them"
    values = [f"{flag} {argument}=VALUE" for argument in missing]
    return (
        f"{name} needs {', '.join(missing)}, but mha-inspect has no option for {them}.{unknown} "
        f"Give {' '.join(values)}, or name a function that returns the module."
    )


def _pass_flags(parameters: Mapping[str, Parameter], bound: Arguments, flags: Flags) -> None:
    """Pass flags for required arguments, and the user's flags to the argument of the most specific name."""
    for flag in ALIASES:
        matching = named_for(flag, parameters)
        passed = [name for name in matching if name in bound.values]
        names = [name for name in matching if name not in passed and _is_required(parameters[name])]
        value, origin = flags.value(flag), origin_of(flag)
        if flag in flags.given and flag != "seq_len" and matching:
            bound.used.add(flag)
            if not names and matching[0] not in passed:
                names = [matching[0]]
        elif passed:
            # A value of --set for one name counts for the others: d_in and d_out are one width.
            value, origin = bound.values[passed[0]], f"{flags.setting} {passed[0]}"
        if value is None:
            continue
        for name in names:
            bound.values[name] = value
            bound.origins[name] = origin


def _pass_config(
    function: Callable[..., Any], parameter: Parameter, bound: Arguments, flags: Flags, namespace: Mapping[str, Any]
) -> None:
    """Pass a config: a dataclass that the signature names, or what the file has for an argument that says nothing."""
    name, kind = parameter.name, parameter.annotation
    if kind is Parameter.empty and _is_required(parameter):
        config = config_for(function, name, namespace)
        if config is None:
            return
        bound.notes.append(f"{name} is made of {config.name}, which has all that is read of it.")
        if not isinstance(config.value, type):
            bound.values[name] = _with_options(config.value, name, bound, flags)
            return
        kind = config.value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        _pass_dataclass(kind, parameter, bound, flags, namespace)


def _pass_dataclass(
    kind: type[Any], parameter: Parameter, bound: Arguments, flags: Flags, namespace: Mapping[str, Any]
) -> None:
    """Pass a dataclass that is made of --set and flags; an optional one only if --set names a field of it."""
    name = parameter.name
    prefix = f"{name}."
    dotted: dict[str, str] = {}
    plain: dict[str, str] = {}
    for key, text in bound.left.items():
        if key.startswith(prefix):
            dotted[key.removeprefix(prefix)] = text
        elif "." not in key:
            plain[key] = text
    if not _is_required(parameter) and not dotted:
        return
    settings = {**plain, **dotted}
    inner = bind(kind, settings, flags, namespace, kind.__name__)
    names = [f"{prefix}{field_name}" for field_name in inner.names]
    for key in dotted:
        if key in inner.left:
            raise SpecError(unknown_setting(f"{prefix}{key}", names, name, flags.setting))
    bound.values[name] = kind(**inner.values)
    bound.names += names
    for key, origin in inner.origins.items():
        bound.origins[f"{prefix}{key}"] = origin
    bound.used |= inner.used
    for key in list(bound.left):
        field_name = key.removeprefix(prefix)
        if field_name in settings and field_name not in inner.left:
            del bound.left[key]


def _with_options(config: Any, name: str, bound: Arguments, flags: Flags) -> Any:
    """Return a copy of a dictionary or an object that is a config, with the user's flags and settings in it.

    `--set config.n_head=4` gives a value; a flag gives that of its most specific name.
    """
    values: dict[str, Any] = dict(config) if isinstance(config, Mapping) else dict(vars(config))
    bound.names += [f"{name}.{key}" for key in values]
    for key in values:
        text = bound.left.pop(f"{name}.{key}", None)
        if text is not None:
            values[key] = convert(key, text, type(values[key]), values[key], {}, flags.setting)
    for flag in flags.given & set(ALIASES):
        matching = named_for(flag, values)
        if matching:
            values[matching[0]] = flags.value(flag)
            bound.used.add(flag)
            bound.origins[f"{name}.{matching[0]}"] = origin_of(flag)
    if isinstance(config, Mapping):
        return values
    copied = copy.copy(config)
    vars(copied).update(values)
    return copied


def settings_of_forward(
    module: nn.Module, left: Mapping[str, str], names: list[str], owner: str, namespace: Mapping[str, Any], flag: str
) -> dict[str, Any]:
    """Return the values of settings that the constructor does not take and the forward does.

    Raises `SpecError` for a name that neither takes.
    """
    parameters = _nameable(signature_of(module.forward))
    values: dict[str, Any] = {}
    for key, text in left.items():
        name = argument_of_forward(key, parameters)
        if name is None:
            owner = f"{owner} or of its forward" if names else f"{owner}'s forward"
            raise SpecError(unknown_setting(key, list(dict.fromkeys([*names, *parameters])), owner, flag))
        parameter = parameters[name]
        values[name] = convert(name, text, parameter.annotation, parameter.default, namespace, flag)
    return values


def unknown_setting(key: str, names: list[str], owner: str, flag: str) -> str:
    """Return the message for an unknown setting."""
    listed = first_few(names, 12) or "none"
    return f"{flag} {shown(key)} is not an argument of {owner}. Arguments: {listed}.{did_you_mean(key, names)}"
