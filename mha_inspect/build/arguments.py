"""The arguments of a target's constructor: what --set gives, and our own flags under the names that it takes them by.

Only what is needed, or was asked for, is passed; the rest stays as the target's author left it.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from inspect import Parameter
from itertools import count
from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import DoesNotFitError, SpecError
from ..text import did_you_mean, first_few, shown
from .vocabulary import ALIASES, Flags, dashed, flag_of, kind_of, named_for

if TYPE_CHECKING:
    from torch import nn

INPUT_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "bool")
_WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null"), None),
    **{"inf": float("inf"), "-inf": float("-inf")},
}
_DIGITS = 20
"""More than any size or seed has."""
_EXAMPLES = {int: ("a whole number", "8"), float: ("a number", "0.1"), bool: ("true or false", "true")}
_LARGEST = 2**40
_SHAPE = re.compile(r"(?:(?P<name>[^=:\s]+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>[\w.]+))?")
_CONFIGS = ("config", "cfg", "conf", "args", "params", "opt", "options", "configuration", "arguments")
"""How names of configs end, and those of their classes."""
_SIZES = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "kdim", "vdim", "seq_len")
_TENSORS = ("query", "key", "value", "hidden", "mask")
_MOST_PARAMETERS = 100_000
"""Tensors: a mixture of 256 experts in 61 layers, each matrix for itself, has half of it."""


# -- what is typed ----------------------------------------------------------------------------------------------------


def parse_settings(typed: list[str] | tuple[str, ...], flag: str = "--set") -> dict[str, str]:
    """Return `NAME=VALUE` texts as a mapping; the last one of a name counts.

    Raises `SpecError` for a text without a name or an equals sign.
    """
    settings = {}
    for text in typed:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise SpecError(f"{flag} {shown(text)} is not NAME=VALUE. Write it as in {flag} embed_dim=512.")
        settings[name.strip()] = value.strip()
    return settings


def convert(
    name: str, text: str, annotation: Any, default: Any, namespace: Mapping[str, Any], flag: str = "--set"
) -> Any:
    """Return the value that a flag gives an argument: a literal, yes, no or none, a name, or else the text.

    Names are those of `namespace`, the target's own module, and of torch. Nothing is evaluated.

    Raises `SpecError` where a number or a switch is meant by the annotation, or by the default, and the text is none.
    """
    kind = type(default) if annotation in (Parameter.empty, Any) else annotation
    if kind is str:
        return text
    if text.casefold() in _WORDS:
        value = _WORDS[text.casefold()]
    else:
        value = _named_or_literal(f"torch.{text}" if name.endswith("dtype") and "." not in text else text, namespace)
    if isinstance(default, list) and isinstance(value, tuple):
        return list(value)
    if not isinstance(kind, type) or kind not in _EXAMPLES:
        return value
    if len(text) > _DIGITS or not isinstance(value, (int, kind)) or (isinstance(value, bool) and kind is not bool):
        words, example = _EXAMPLES[kind]
        raise SpecError(
            f"{flag} {shown(name)}={shown(text)} does not fit: {name} is {words}. "
            f"Write it as in {flag} {name}={example}."
        )
    return kind(value)


def _named_or_literal(text: str, namespace: Mapping[str, Any]) -> Any:
    """Return what the text names in the target's module or in torch, the literal that it is, or the text."""
    first, *rest = text.split(".")
    torch = sys.modules["torch"]
    if isinstance(getattr(torch, text, None), torch.dtype):
        return getattr(torch, text)
    with suppress(KeyError, AttributeError):
        value = reduce(getattr, rest, {"torch": torch, **namespace}[first])
        if not isinstance(value, types.ModuleType):
            return value
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return text


@dataclass(frozen=True)
class InputShape:
    """What somebody said of one argument of the forward, as in `--input-shape x=2x10x512:float32`."""

    shape: tuple[int, ...]
    dtype: str | None
    """None: as the module's own parameters, or whole numbers where they are token ids."""


def parse_shapes(typed: list[str] | tuple[str, ...]) -> dict[str, InputShape]:
    """Return `NAME=SIZExSIZE:DTYPE` texts as a mapping; the name is empty where the text has none.

    Raises `SpecError` for a text of another form, a size of zero, or a dtype that is unknown.
    """
    shapes: dict[str, InputShape] = {}
    for text in typed:
        match, said = _SHAPE.fullmatch(text.strip()), f"--input-shape {shown(text)}"
        if match is None:
            raise SpecError(f"{said} is not NAME=SIZExSIZE:DTYPE. Write it as in --input-shape x=2x10x512:float32.")
        sizes = tuple(int(size) if len(size) < _DIGITS else _LARGEST + 1 for size in match["sizes"].split("x"))
        if min(sizes) < 1 or prod(sizes) > _LARGEST:
            raise SpecError(f"{said} is no shape: every size is 1 or more, and all fit in memory.")
        dtype = (match["dtype"] or "").removeprefix("torch.") or None
        if dtype is not None and dtype not in INPUT_DTYPES:
            raise SpecError(f"{said}: {shown(dtype)} is not a dtype of inputs: {', '.join(INPUT_DTYPES)}.")
        if (match["name"] or "") in shapes:
            raise SpecError(f"--input-shape gives {shown(match['name'] or 'one argument')} twice. Give each once.")
        shapes[match["name"] or ""] = InputShape(sizes, dtype)
    return shapes


# -- what a constructor gets ------------------------------------------------------------------------------------------


@dataclass
class Arguments:
    """What a constructor is called with, and which flags gave it."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Name to the flag that gave it, for those that --set did not."""
    left: dict[str, str] = field(default_factory=dict)
    """What --set gave that the constructor has no name for."""
    names: list[str] = field(default_factory=list)
    """Every name that --set could give; after a point those of a config."""
    used: set[str] = field(default_factory=set)
    """The flags that were passed."""


class MissingSettingError(AttributeError, KeyError):
    """A config was asked for something that nobody has given: its path, as `config.n_layer`."""


class FlagConfig(dict[str, Any]):
    """A config for a class that takes one without saying of what type: it answers by --set, and by our flags.

    `config.n_embd` and `config["n_embd"]` both give --embed-dim. What it gave, it notes in `bound`.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], flags: Flags, bound: Arguments) -> None:
        super().__init__(settings)
        self._name, self._flags, self._bound = name, flags, bound

    def __missing__(self, name: str) -> Any:
        flag = None if name.startswith("__") else flag_of(name)
        value = None if flag is None else self._flags.value(flag)
        if flag is None or value is None:
            raise MissingSettingError(f"{self._name}.{name}")
        self._bound.origins[f"{self._name}.{name}"] = dashed(flag)
        self._bound.used.add(flag)
        self[name] = value
        return value

    def __getattr__(self, name: str) -> Any:
        return self[name]


def signature_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """Return the parameters of a class or a function, annotations resolved as far as they can be."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return {}
    hints: dict[str, Any] = {}
    with suppress(Exception):  # an annotation may name anything
        # Those of a class that is called are those of its __init__, of which mypy says that a subclass may change it.
        hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
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
    plain = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    open_ended = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    bound, flag = Arguments(names=list(plain)), flags.setting
    for key, text in settings.items():
        if key not in plain:
            bound.left[key] = text
            continue
        annotation, default = plain[key].annotation, plain[key].default
        is_size = annotation is default is Parameter.empty and flag_of(key) in _SIZES
        bound.values[key] = convert(key, text, int if is_size else annotation, default, namespace, flag)
    _pass_flags(plain, bound, flags)
    for key, parameter in plain.items():
        if key not in bound.values:
            _pass_config(parameter, _config_class(parameter, namespace, guess=guess), bound, flags, namespace)
    for key in [key for key in bound.left if open_ended and key.isidentifier()]:
        bound.values[key] = convert(key, bound.left.pop(key), Any, Parameter.empty, namespace, flag)
    missing = [n for n, p in plain.items() if p.default is Parameter.empty and n not in bound.values]
    if missing and all(kind_of(plain[n]) in _TENSORS for n in missing):
        raise SpecError(
            f"{name} takes tensors ({', '.join(missing)}): it is a function of them, and not a class or a function "
            "that returns a module. Call it in the forward of a torch.nn.Module."
        )
    if missing:
        left = [key for key in bound.left if key not in bound.names]
        unknown = f" {flag} {left[0]} is none of its arguments ({', '.join(bound.names)})." if left else ""
        raise SpecError(
            f"{name} needs {', '.join(missing)}, and no flag of ours says what that is.{unknown} Give "
            f"{'it' if len(missing) == 1 else 'them'}: {' '.join(f'{flag} {argument}=VALUE' for argument in missing)}."
        )
    return bound


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
        for key in needed if value is not None else ():
            bound.values[key], bound.origins[key] = value, dashed(flag)


def _pass_config(
    parameter: Parameter, kind: type | None, bound: Arguments, flags: Flags, namespace: Mapping[str, Any]
) -> None:
    """Pass a config object where one is required: of its class, or of --set and flags where its class is unknown."""
    name = parameter.name
    its = {key[len(name) + 1 :]: text for key, text in bound.left.items() if key.startswith(f"{name}.")}
    settings = {key: text for key, text in bound.left.items() if "." not in key} | its
    is_needed, left = parameter.default is Parameter.empty, dict[str, str]()
    if kind is not None and (is_needed or its):
        inner = bind(kind, settings, flags, namespace, kind.__name__)
        left = inner.left
        strange = next((key for key in its if key in left), None)
        if strange is not None:
            names = [f"{name}.{n}" for n in inner.names]
            raise SpecError(unknown_setting(f"{name}.{strange}", names, name, flags.setting))
        bound.values[name] = kind(**inner.values)
        bound.names += [f"{name}.{n}" for n in inner.names]
        bound.origins |= {f"{name}.{n}": origin for n, origin in inner.origins.items()}
        bound.used |= inner.used
    elif kind is None and is_needed and name.casefold().endswith(_CONFIGS):
        typed = settings.items()
        given = {key: convert(key, text, Any, Parameter.empty, namespace, flags.setting) for key, text in typed}
        bound.values[name] = FlagConfig(name, given, flags, bound)
    else:
        return
    passed = {*settings} - {*left}
    bound.left = {key: text for key, text in bound.left.items() if key.removeprefix(f"{name}.") not in passed}


def _config_class(parameter: Parameter, namespace: Mapping[str, Any], *, guess: bool) -> type | None:
    """Return the class of a config: annotated, or the only one that the target's file defines for it; None for none."""

    def named(kind: type) -> bool:
        return kind.__name__.casefold().endswith(_CONFIGS)

    kind = parameter.annotation
    if isinstance(kind, type) and kind is not Parameter.empty and kind.__module__ != "builtins":
        return kind if dataclasses.is_dataclass(kind) or named(kind) else None
    if kind is not Parameter.empty or not parameter.name.casefold().endswith(_CONFIGS) or not guess:
        return None
    classes = [value for value in namespace.values() if isinstance(value, type) and named(value)]
    classes = [value for value in classes if value.__module__ == namespace.get("__name__")]
    return classes[0] if len(classes) == 1 else None


def settings_of_forward(
    module: nn.Module, left: Mapping[str, str], names: list[str], owner: str, namespace: Mapping[str, Any], flag: str
) -> dict[str, Any]:
    """Return what a flag gives for arguments of the forward, where the constructor has none of that name.

    Raises `SpecError` for a name that neither has.
    """
    every = signature_of(module.forward)
    taken = {n: p for n, p in every.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    strange = next((key for key in left if key not in taken), None)
    if strange is not None:
        owner = f"{owner} or of its forward" if names else f"{owner}'s forward"
        raise SpecError(unknown_setting(strange, [*dict.fromkeys((*names, *taken))], owner, flag))
    return {
        key: convert(key, text, taken[key].annotation, taken[key].default, namespace, flag)
        for key, text in left.items()
    }


def unknown_setting(key: str, names: list[str], owner: str, flag: str) -> str:
    """Return the message for a setting that nothing takes."""
    listed = first_few(names, 12) or "none"
    return f"{flag} {shown(key)} is no argument of {owner}. Its arguments: {listed}.{did_you_mean(key, names)}"


@contextmanager
def of_bounded_number(called: str) -> Iterator[None]:
    """Raise `DoesNotFitError` in a constructor that makes more parameters than any model has: they take memory on meta.

    `called` is what the message names.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    numbers = count(1)

    def registered(*_: object) -> None:
        if next(numbers) > _MOST_PARAMETERS:
            raise DoesNotFitError(
                f"{called} has more than {_MOST_PARAMETERS:,} parameter tensors, which is more than can be looked at. "
                "Give it fewer layers."
            )

    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()
