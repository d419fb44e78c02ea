"""Text that was typed for an argument: its value, or the shape of a tensor."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from inspect import Parameter
from math import prod
from typing import Any, Union, get_args, get_origin

from ..errors import SpecError
from ..text import shown

_SWITCH = {**dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False)}
_NONE = ("none", "null")
_DIGITS = 20
"""More than any size or seed has."""
_EXAMPLES = {int: ("a whole number", "8"), float: ("a number", "0.1"), bool: ("true or false", "true")}


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


def convert(name: str, text: str, annotation: Any, default: Any, namespace: Mapping[str, Any]) -> Any:
    """Return the value that was typed for the argument `name`.

    A number, a switch or a text is what its annotation says, or else its default. Anything else is a literal, a word
    for true, false or none, a name in the target's own module or in torch, or else the text. Nothing is evaluated.

    Args:
        name: of the argument, for messages.
        text: as typed.
        annotation: a type, or `Parameter.empty`.
        default: what it is where nobody says, or `Parameter.empty`.
        namespace: where names are looked up.

    Raises `SpecError` when the text is no such value.
    """
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    may_be_none = type(None) in kinds
    kinds = tuple(kind for kind in kinds if kind is not type(None))
    if kinds in ((Parameter.empty,), (Any,)) and isinstance(default, (bool, int, float, str)):
        kinds = (type(default),)
    if may_be_none and text.casefold() in _NONE:
        return None
    if kinds == (str,):
        return text
    if len(kinds) == 1 and kinds[0] in _EXAMPLES:
        try:
            return _typed(text, kinds[0])
        except (ValueError, KeyError):
            words, example = _EXAMPLES[kinds[0]]
            words += " or none" if may_be_none else ""
            raise SpecError(
                f"--set {shown(name)}={shown(text)} does not fit: {name} is {words}. "
                f"Write it as in --set {name}={example}."
            ) from None
    if text.casefold() in (*_SWITCH, *_NONE):
        return _SWITCH.get(text.casefold())
    value = _named_or_literal(f"torch.{text}" if name.endswith("dtype") and "." not in text else text, namespace)
    return list(value) if isinstance(default, list) and isinstance(value, tuple) else value


def _typed(text: str, kind: type) -> bool | int | float:
    """Return a switch or a number. Raises `ValueError` or `KeyError` where the text is none."""
    if kind is bool:
        return {**_SWITCH, "1": True, "0": False}[text.casefold()]
    if len(text) > _DIGITS:
        raise ValueError
    return int(text) if kind is int else float(text)


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


# -- shapes: `--input-shape x=2x10x512:float32` ------------------------------------------------------------------------

INPUT_DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "bool")
_LARGEST = 2**40
_FORM = re.compile(r"(?:(?P<name>[^=:\s]+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>[\w.]+))?")


@dataclass(frozen=True)
class InputShape:
    """What somebody said of one argument."""

    shape: tuple[int, ...]
    dtype: str | None
    """None: as the module's own parameters, or whole numbers where they are token ids."""


def parse_shapes(typed: list[str] | tuple[str, ...]) -> dict[str, InputShape]:
    """Return `NAME=SIZExSIZE:DTYPE` texts as a mapping; the name is empty where the text has none.

    Raises `SpecError` for a text of another form, a size of zero, or a dtype that is unknown.
    """
    shapes: dict[str, InputShape] = {}
    for text in typed:
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise SpecError(
                f"--input-shape {shown(text)} is not NAME=SIZExSIZE:DTYPE. "
                "Write it as in --input-shape x=2x10x512:float32."
            )
        sizes = tuple(int(size) if len(size) < 20 else _LARGEST + 1 for size in match["sizes"].split("x"))
        if min(sizes) < 1 or prod(sizes) > _LARGEST:
            raise SpecError(f"--input-shape {shown(text)} is no shape: every size is 1 or more, and all fit in memory.")
        dtype = (match["dtype"] or "").removeprefix("torch.") or None
        if dtype is not None and dtype not in INPUT_DTYPES:
            raise SpecError(
                f"--input-shape {shown(text)}: {shown(dtype)} is not a dtype of inputs: {', '.join(INPUT_DTYPES)}."
            )
        if (match["name"] or "") in shapes:
            raise SpecError(f"--input-shape gives {shown(match['name'] or 'one argument')} twice. Give each once.")
        shapes[match["name"] or ""] = InputShape(sizes, dtype)
    return shapes
