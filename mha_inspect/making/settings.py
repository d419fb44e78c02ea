"""Texts of the command line, and the values that they become: `NAME=VALUE` of --set, `NAME=SIZES` of --input-shape."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from inspect import Parameter
from math import prod
from typing import Any

from ..errors import SpecError
from ..text import shown

INPUT_DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128", "int64", "int32", "bool")
WORDS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("none", "null"), None),
    **{"inf": float("inf"), "-inf": float("-inf")},
}
_DIGITS = 20
"""More digits than any size or seed has."""
_EXAMPLES = {int: ("a whole number", "8"), float: ("a number", "0.1"), bool: ("true or false", "true")}
_LARGEST = 2**40
_SHAPE = re.compile(r"(?:(?P<name>[^=:\s]+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>[\w.]+))?")


def parse_settings(typed: Sequence[str], flag: str = "--set") -> dict[str, str]:
    """Return `NAME=VALUE` texts as a mapping. The last one of a name counts.

    Raises `SpecError` for a text without a name or an equals sign.
    """
    settings = {}
    for text in typed:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise SpecError(f"{flag} {shown(text)} is not NAME=VALUE. Write e.g. {flag} embed_dim=512.")
        settings[name.strip()] = value.strip()
    return settings


def convert(
    name: str, text: str, annotation: Any, default: Any, namespace: Mapping[str, Any], flag: str = "--set"
) -> Any:
    """Return the value of a flag's text: a literal, yes, no or none, a named object, or else the text.

    Names are looked up in `namespace`, the target's module, and in torch. Nothing is evaluated.

    Raises `SpecError` if the annotation or the default is a number or a switch, and the text is not.
    """
    kind = type(default) if annotation in (Parameter.empty, Any) else annotation
    if kind is str:
        return text
    if text.casefold() in WORDS:
        value = WORDS[text.casefold()]
    elif name.endswith("dtype") and "." not in text:
        value = _named_or_literal(f"torch.{text}", namespace)
    else:
        value = _named_or_literal(text, namespace)
    if isinstance(default, list) and isinstance(value, tuple):
        return list(value)
    if not isinstance(kind, type) or kind not in _EXAMPLES:
        return value
    if len(text) > _DIGITS or not _is_of(kind, value):
        words, example = _EXAMPLES[kind]
        raise SpecError(
            f"{flag} {shown(name)}={shown(text)} is invalid: {name} must be {words}. "
            f"Write e.g. {flag} {name}={example}."
        )
    return kind(value)


def _is_of(kind: type, value: Any) -> bool:
    """Return whether a value is a number or a switch of this kind: 1 may be a float or a switch, True is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, kind))


def _named_or_literal(text: str, namespace: Mapping[str, Any]) -> Any:
    """Return the object of this name in the target's module or in torch, the literal, or else the text."""
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
    """The shape of one argument of the forward, e.g. of `--input-shape x=2x10x512:float32`."""

    shape: tuple[int, ...]
    dtype: str | None
    """None for the dtype of the module's parameters, or of whole numbers for token ids."""


def parse_shapes(typed: Sequence[str]) -> dict[str, InputShape]:
    """Return `NAME=SIZExSIZE:DTYPE` texts as a mapping. The name is empty if the text has none.

    Raises `SpecError` for a text of another form, a size of zero, or an unknown dtype.
    """
    shapes: dict[str, InputShape] = {}
    for text in typed:
        name, shape = _parsed_shape(text)
        if name in shapes:
            raise SpecError(f"--input-shape gives {shown(name or 'one argument')} twice. Give each once.")
        shapes[name] = shape
    return shapes


def _parsed_shape(text: str) -> tuple[str, InputShape]:
    """Return the name in a text, empty if it has none, and the shape: `x`, (2, 10, 512), `float32`."""
    match = _SHAPE.fullmatch(text.strip())
    said = f"--input-shape {shown(text)}"
    if match is None:
        raise SpecError(f"{said} is not NAME=SIZExSIZE:DTYPE. Write e.g. --input-shape x=2x10x512:float32.")
    # A size of too many digits is not parsed: it is too large anyway.
    sizes: list[int] = []
    for size in match["sizes"].split("x"):
        sizes.append(int(size) if len(size) < _DIGITS else _LARGEST + 1)
    if min(sizes) < 1 or prod(sizes) > _LARGEST:
        raise SpecError(f"{said} is not a shape: every size must be 1 or more, and the tensor must fit in memory.")
    dtype = (match["dtype"] or "").removeprefix("torch.") or None
    if dtype is not None and dtype not in INPUT_DTYPES:
        raise SpecError(f"{said}: {shown(dtype)} is not one of {', '.join(INPUT_DTYPES)}.")
    return match["name"] or "", InputShape(tuple(sizes), dtype)
