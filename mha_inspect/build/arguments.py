"""The arguments of a target's constructor: what --set gives, and our own flags under the names that it takes them by.

Only what is needed, or was asked for, is passed; the rest stays as the target's author left it.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import DoesNotFitError, SpecError
from ..text import did_you_mean, first_few, shown
from .values import convert
from .vocabulary import ALIASES, Flags, dashed, flag_of, named_for

_CONFIG_NAMES = ("config", "cfg", "conf", "args", "params", "hparams", "opt", "options", "configuration")
_CONFIG_ENDINGS = ("config", "cfg", "args", "params", "hparams", "arguments")
_SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "kdim", "vdim", "seq_len")
_TENSORS = {"q", "k", "v", "x", "query", "key", "value", "queries", "keys", "values", "inputs", "hidden_states"}

_MOST_PARAMETERS = 100_000
"""Tensors: a mixture of 256 experts in 61 layers, each matrix for itself, has half of it."""


@dataclass
class Arguments:
    """What a constructor is called with, and where each value came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Name to `--set`, or to the flag that gave it."""
    left: dict[str, str] = field(default_factory=dict)
    """What --set gave that the constructor has no name for."""
    names: list[str] = field(default_factory=list)
    """Every name that --set could give."""
    used: set[str] = field(default_factory=set)
    """The flags that were passed."""

    def take(self, key: str, value: Any, origin: str) -> None:
        """Note the value of an argument, and where it came from."""
        self.values[key], self.origins[key] = value, origin

    def call(self, function: Callable[..., Any]) -> Any:
        """Call the constructor."""
        named = dict(self.values)
        nameless = [n for n, p in signature_of(function).items() if p.kind is Parameter.POSITIONAL_ONLY and n in named]
        return function(*[named.pop(name) for name in nameless], **named)


class MissingSettingError(AttributeError, KeyError):
    """A config was asked for something that nobody has given."""

    def __init__(self, config: str, name: str) -> None:
        super().__init__(f"{config}.{name} was not given")
        self.config, self.asked = config, name


class FlagConfig(dict[str, Any]):
    """A config for a class that takes one without saying of what type: it answers by --set, and by our flags.

    `config.n_embd`, `config["n_embd"]` and `config.get("n_embd")` all give --embed-dim. What it gave, it notes in
    `bound`.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], flags: Flags, bound: Arguments) -> None:
        super().__init__(settings)
        self.__dict__.update(_name=name, _flags=flags, _bound=bound)
        bound.origins |= dict.fromkeys([f"{name}.{key}" for key in settings], "--set")

    def __missing__(self, name: str) -> Any:
        flag = None if name.startswith("__") else flag_of(name)
        value = None if flag is None else self._flags.value(flag)
        if flag is None or value is None:
            raise MissingSettingError(self._name, name)
        self._bound.origins[f"{self._name}.{name}"] = dashed(flag)
        self._bound.used.add(flag)
        self[name] = value
        return value

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """Return a setting as a dictionary does, with our flags behind it."""
        with suppress(MissingSettingError):
            return self[name]
        return default


def signature_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a class or a function, annotations resolved as far as they can be."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
    hints: dict[str, Any] = {}
    with suppress(Exception):  # an annotation may name anything
        # Those of a class that is called are those of its __init__.
        called = getattr(function, "__init__", function) if isinstance(function, type) else function
        hints = typing.get_type_hints(called)
    return {name: p.replace(annotation=hints.get(name, p.annotation)) for name, p in parameters.items()}


def bind(
    function: Callable[..., Any],
    settings: Mapping[str, str],
    flags: Flags,
    namespace: Mapping[str, Any],
    name: str,
    *,
    guess: bool = True,
) -> Arguments:
    """Return the arguments for a call of `function`.

    With `guess` a config of no known type is of the only class for it that the target's file defines.

    Raises `SpecError` when a value does not fit, or one that is needed was not given.
    """
    parameters = signature_of(function)
    plain = {n: p for n, p in parameters.items() if p.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)}
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    bound = Arguments(names=list(plain))
    for key, text in settings.items():
        if key in plain:
            bound.take(key, convert(key, text, _annotation(plain[key]), plain[key].default, namespace), "--set")
        else:
            bound.left[key] = text
    _pass_flags(plain, bound, flags)
    for key, parameter in plain.items():
        if key not in bound.values:
            _pass_config(parameter, _config_class(parameter, namespace, guess=guess), bound, flags, namespace)
    if open_ended:
        for key in [key for key in bound.left if key.isidentifier()]:
            bound.take(key, convert(key, bound.left.pop(key), Any, Parameter.empty, namespace), "--set")
    missing = [n for n, p in plain.items() if p.default is Parameter.empty and n not in bound.values]
    if missing:
        raise SpecError(_missing(name, missing, bound))
    return bound


def _annotation(parameter: Parameter) -> Any:
    """Return what an argument is: by its annotation, or by its name where that is one of a size."""
    unsaid = parameter.annotation is Parameter.empty and parameter.default is Parameter.empty
    return int if unsaid and flag_of(parameter.name) in _SIZES else parameter.annotation


def _missing(name: str, missing: list[str], bound: Arguments) -> str:
    if all(argument in _TENSORS or "mask" in argument for argument in missing):
        return (
            f"{name} takes tensors ({', '.join(missing)}): it is a function of them, and not a class or a function "
            "that returns a module. Call it in the forward of a torch.nn.Module."
        )
    left = [key for key in bound.left if key not in bound.names]
    unknown = f" --set {left[0]} is none of its arguments ({', '.join(bound.names)})." if left else ""
    return (
        f"{name} needs {', '.join(missing)}, and no flag of ours says what that is.{unknown} "
        f"Give {'it' if len(missing) == 1 else 'them'}: {' '.join(f'--set {argument}=VALUE' for argument in missing)}."
    )


def _pass_flags(plain: Mapping[str, Parameter], bound: Arguments, flags: Flags) -> None:
    """Pass flags for what is required, and flags that were given under the most telling name that there is."""
    for flag in ALIASES:
        matching = named_for(flag, plain)
        # What --set says of one name goes for the others: d_in and d_out are one width.
        said = [bound.values[n] for n in matching if n in bound.values]
        value = said[0] if said else flags.value(flag)
        needed = [n for n in matching if plain[n].default is Parameter.empty and n not in bound.values]
        if flag in flags.given and flag != "seq_len" and matching:
            bound.used.add(flag)
            needed = needed if needed or said else matching[:1]
        if value is not None:
            for key in needed:
                bound.take(key, value, dashed(flag))


def _pass_config(
    parameter: Parameter, kind: type | None, bound: Arguments, flags: Flags, namespace: Mapping[str, Any]
) -> None:
    """Pass a config object where one is required: of its class, or of --set and flags where its class is unknown."""
    name = parameter.name
    its = {key[len(name) + 1 :]: text for key, text in bound.left.items() if key.startswith(f"{name}.")}
    settings = {key: text for key, text in bound.left.items() if "." not in key} | its
    needed = parameter.default is Parameter.empty
    left: Mapping[str, str] = {}
    if kind is not None and (needed or its):
        inner = bind(kind, settings, flags, namespace, kind.__name__)
        left = inner.left
        strange = next((key for key in its if key in left), None)
        if strange is not None:
            raise SpecError(unknown_setting(f"{name}.{strange}", [f"{name}.{n}" for n in inner.names], name))
        bound.values[name] = inner.call(kind)
        bound.names += [f"{name}.{n}" for n in inner.names]
        bound.origins |= {f"{name}.{n}": origin for n, origin in inner.origins.items()}
        bound.used |= inner.used
    elif kind is None and needed and (name.casefold() in _CONFIG_NAMES or _is_config_name(name)):
        given = {key: convert(key, text, Any, Parameter.empty, namespace) for key, text in settings.items()}
        bound.values[name] = FlagConfig(name, given, flags, bound)
    else:
        return
    passed = {*settings} - {*left}
    bound.left = {key: text for key, text in bound.left.items() if key.removeprefix(f"{name}.") not in passed}


def _config_class(parameter: Parameter, namespace: Mapping[str, Any], *, guess: bool) -> type | None:
    """Return the class of a config: annotated, or the only one that the target's file defines for it; None for none."""
    kind = parameter.annotation
    if isinstance(kind, type) and kind is not Parameter.empty and kind.__module__ != "builtins":
        return kind if dataclasses.is_dataclass(kind) or _is_config_name(kind.__name__) else None
    if kind is not Parameter.empty or parameter.name.casefold() not in _CONFIG_NAMES or not guess:
        return None
    here = [value for value in namespace.values() if isinstance(value, type) and _is_config_name(value.__name__)]
    here = [value for value in here if value.__module__ == namespace.get("__name__")]
    return here[0] if len(here) == 1 else None


def _is_config_name(name: str) -> bool:
    return name.casefold().endswith(_CONFIG_ENDINGS)


def unknown_setting(key: str, names: list[str], owner: str) -> str:
    """Return the message for a --set that nothing takes."""
    listed = first_few(names, 12) or "none"
    return f"--set {shown(key)} is no argument of {owner}. Its arguments: {listed}.{did_you_mean(key, names)}"


@contextmanager
def of_bounded_number(called: str) -> Iterator[None]:
    """Stop a constructor that makes more parameters than any model has, which take memory also where they have none.

    Raises `DoesNotFitError` inside of it.
    """
    left = _MOST_PARAMETERS

    def count(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise DoesNotFitError(
                f"{called} has more than {_MOST_PARAMETERS:,} parameter tensors, which is more than can be looked at. "
                "Give it fewer layers."
            )

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
