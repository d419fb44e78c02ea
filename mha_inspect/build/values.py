"""Text that was typed for an argument: the value that its annotation or default asks for, or the shape of a tensor."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from inspect import Parameter
from math import prod
from typing import Any, Literal, Union, get_args, get_origin

from ..errors import SpecError
from ..text import shown

_TRUE, _FALSE, _NONE = ("true", "yes", "on", "1"), ("false", "no", "off", "0"), ("none", "null")
_DIGITS = 20
"""More than any size or seed has."""
_MISSING: Any = Parameter.empty


def parse_settings(typed: list[str] | tuple[str, ...], flag: str = "--set") -> dict[str, str]:
    """`NAME=VALUE` texts as a mapping; the last one of a name counts.

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
    """The value that was typed for the argument `name`.

    Args:
        name: of the argument, for messages.
        text: as typed.
        annotation: a type, or `Parameter.empty`.
        default: what it is where nobody says, or `Parameter.empty`; its type stands in for an annotation.
        namespace: where names of classes and objects are looked up: the target's own module.

    Raises `SpecError` when the text is no such value.
    """
    if annotation is _MISSING or annotation is Any or isinstance(annotation, str):
        if default is _MISSING or default is None:
            value = _free(text, namespace)
            if name.endswith("dtype") and isinstance(value, str):
                with suppress(TypeError):
                    return _dtype(text)
            return value
        annotation = _like(default)
    try:
        return typed_as(text, annotation, namespace)
    except (ValueError, TypeError, SyntaxError):
        words, example = described_type(annotation)
        raise SpecError(
            f"--set {shown(name)}={shown(text)} does not fit: {name} is {words}. Write it as in --set {name}={example}."
        ) from None


def typed_as(text: str, annotation: Any, namespace: Mapping[str, Any]) -> Any:
    """Return the value of an annotation's type that a text says.

    Raises `ValueError`, `TypeError` or `SyntaxError` where it says none.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        # A text fits str whatever it says: the others are asked first.
        for kind in sorted(parts, key=lambda kind: (kind is not type(None), kind is str)):
            with suppress(ValueError, TypeError, SyntaxError):
                return typed_as(text, kind, namespace)
        raise ValueError
    if origin is Literal:
        return parts[[*map(str, parts)].index(text)]
    if annotation is None or annotation is type(None):
        return _word(text, dict.fromkeys(_NONE))
    if annotation is bool:
        return _word(text, {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)})
    if annotation is int:
        if len(text) > _DIGITS:
            raise ValueError
        return int(text.replace("_", ""))
    if annotation in (float, str):
        return annotation(text)
    kind = origin or annotation
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return _word(text, {**{str(m.value): m for m in kind}, **{m.name: m for m in kind}}, exact=True)
        if issubclass(kind, (list, tuple)) or kind.__name__ in ("Sequence", "Iterable", "Collection"):
            return _sequence(text, kind, parts, namespace)
        if kind.__module__ == "torch" and kind.__name__ == "dtype":
            return _dtype(text)
        if issubclass(kind, Mapping):
            return _checked(_lookup_or_literal(text, namespace), Mapping)
    return _lookup_or_literal(text, namespace)


def _word(text: str, words: Mapping[str, Any], *, exact: bool = False) -> Any:
    typed = text if exact else text.casefold()
    if typed not in words:
        raise ValueError
    return words[typed]


def _sequence(text: str, kind: type, parts: tuple[Any, ...], namespace: Mapping[str, Any]) -> Any:
    inner = text.strip()
    if inner[:1] in ("(", "[") and inner[-1:] in (")", "]"):
        inner = inner[1:-1]
    pieces = [piece.strip() for piece in inner.split(",") if piece.strip()]
    kinds = [part for part in parts if part is not Ellipsis]
    if len(kinds) > 1 and len(kinds) != len(pieces):
        raise ValueError
    values = [
        typed_as(piece, kinds[min(place, len(kinds) - 1)], namespace) if kinds else _free(piece, namespace)
        for place, piece in enumerate(pieces)
    ]
    return values if issubclass(kind, list) else tuple(values)


def _dtype(text: str) -> Any:
    torch = sys.modules["torch"]
    value = getattr(torch, text.removeprefix("torch."), None)
    return _checked(value, torch.dtype)


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _free(text: str, namespace: Mapping[str, Any]) -> Any:
    """A value of which nothing is known: a number, a word for true, false or none, a name, and else the text."""
    words = {**dict.fromkeys(_NONE), "true": True, "false": False}
    if text.casefold() in words:
        return words[text.casefold()]
    try:
        return _lookup_or_literal(text, namespace)
    except (ValueError, SyntaxError, TypeError):
        return text


def _lookup_or_literal(text: str, namespace: Mapping[str, Any]) -> Any:
    """What the text names in the target's module or in torch, or the literal that it is. Nothing is evaluated."""
    first, *rest = text.split(".")
    with suppress(KeyError, AttributeError):
        value = reduce(getattr, rest, {"torch": sys.modules["torch"], **namespace}[first])
        if not isinstance(value, types.ModuleType):
            return value
    return ast.literal_eval(text)


def _like(default: Any) -> Any:
    """The annotation that a default stands for."""
    if isinstance(default, (list, tuple)) and default:
        return list[type(default[0])] if isinstance(default, list) else tuple[type(default[0]), ...]  # type: ignore[misc]
    return type(default)


_IN_WORDS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "8"),
    float: ("a number", "0.1"),
    bool: ("true or false", "true"),
    str: ("text", "text"),
    type(None): ("none", "none"),
}


def described_type(annotation: Any) -> tuple[str, str]:
    """Return what a value of an annotation's type is, in words, and one as it would be typed."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        words, examples = zip(*map(described_type, parts), strict=True)
        return " or ".join(dict.fromkeys(words)), examples[0]
    names = [str(part) for part in parts] if origin is Literal else []
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        names = [member.name for member in annotation]
    if names:
        return f"one of {', '.join(names)}", names[0]
    if parts and origin in (list, tuple):
        return f"a list of {len(parts)} values" if len(
            parts
        ) > 1 and Ellipsis not in parts else "a list of values", "2,3"
    name = getattr(annotation, "__name__", annotation)
    unknown = f"a {name}", "2,3" if annotation in (list, tuple) else "NAME, a name in its own file"
    return _IN_WORDS.get(annotation, unknown)


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

    @property
    def is_of_vectors(self) -> bool:
        """Whether its last size is that of features; where nothing says so, two sizes are those of token ids."""
        return len(self.shape) > 2 if self.dtype is None else self.dtype.startswith(("float", "bfloat"))


def parse_shapes(typed: list[str] | tuple[str, ...]) -> dict[str, InputShape]:
    """`NAME=SIZExSIZE:DTYPE` texts as a mapping; the name is empty where the text has none.

    Raises `SpecError` for a text of another form, a size of zero, or a dtype that is unknown.
    """
    shapes: dict[str, InputShape] = {}
    for text in typed:
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise SpecError(
                f"--input-shape {shown(text)} is not NAME=SIZExSIZE:DTYPE. "
                "Write it as in --input-shape x=2x10x512:float32."
            )
        sizes = tuple(int(size) if len(size) < 20 else _LARGEST + 1 for size in found["sizes"].split("x"))
        if min(sizes) < 1 or prod(sizes) > _LARGEST:
            raise SpecError(f"--input-shape {shown(text)} is no shape: every size is 1 or more, and all fit in memory.")
        dtype = (found["dtype"] or "").removeprefix("torch.") or None
        if dtype is not None and dtype not in INPUT_DTYPES:
            raise SpecError(
                f"--input-shape {shown(text)}: {shown(dtype)} is not a dtype of inputs: {', '.join(INPUT_DTYPES)}."
            )
        if (found["name"] or "") in shapes:
            raise SpecError(f"--input-shape gives {shown(found['name'] or 'one argument')} twice. Give each once.")
        shapes[found["name"] or ""] = InputShape(sizes, dtype)
    return shapes
