"""Reports as JSON, key by key, and read back. The schemas are in `mha_inspect/schemas`."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..text import MESSAGE, printable_json, shown
from .common import SCHEMA_VERSION, Rows

R = TypeVar("R")
_BLOCK = 1 << 14
"""Numbers of a tensor that are written together."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(report: Any, command: str) -> Iterator[str]:
    """Yield the report as JSON, a piece at a time, the same bytes for equal reports; ends with a line feed.

    A field that is None by default was not asked for, and is left out while it is None. Others stay, as null.
    """
    content = {"schema_version": SCHEMA_VERSION, "command": command, **to_data(report)}
    yield from _written(content, "\n")
    yield "\n"


def _written(value: Any, margin: str) -> Iterator[str]:
    """Yield a value of `to_data` as `json.dumps(value, indent=2)` writes it after this margin, a line feed first."""
    inner = margin + "  "
    if isinstance(value, dict) and value:
        mark = "{"
        for key, item in value.items():
            yield f"{mark}{inner}{_text(key)}: "
            yield from _written(item, inner)
            mark = ","
        yield margin + "}"
    elif isinstance(value, list) and len(value):
        mark, items = "[", iter(value)
        for item in items:
            yield mark + inner
            if isinstance(value, Rows) and not isinstance(item, Rows):
                yield _numbers([item, *islice(items, _BLOCK)], "," + inner)
            else:
                yield from _written(item, inner)
            mark = ","
        yield margin + "]"
    else:
        yield _text(value)


def _text(value: Any) -> str:
    text = _ENCODER.encode(value)
    return printable_json(text) if isinstance(value, str) else text


def _numbers(numbers: list[Any], between: str) -> str:
    encoder = json.JSONEncoder(separators=(between, ":"), allow_nan=False)
    try:
        text = encoder.encode(numbers)
    except ValueError:  # some are not finite
        text = encoder.encode(to_data(numbers))
    return text[1:-1]


def to_data(value: Any) -> Any:
    """Return the value in JSON's types. NaN and infinities become the strings `NaN`, `Infinity`, `-Infinity`.

    Rows stay as they are, to be gone through where they are written.

    Raises `TypeError` for what JSON has no type for: a report holds plain data only.
    """
    if value is None or isinstance(value, (str, bool, int, Rows)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((field, getattr(value, field.name)) for field in fields(value))
        return {f.name: to_data(item) for f, item in pairs if not (item is None and f.default is None)}
    raise TypeError(f"{type(value).__name__} has no place in a report")


def read_report(text: bytes | str, command: str, kind: type[R]) -> R:
    """Return the report in the text of a JSON file.

    Raises `ValueError` when it holds something else, or anything of another type than reports have: it says what the
    file is, and begins after its name.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON. Save a report with --export FILE.json.") from None
    if not isinstance(data, dict) or data.get("command") != command:
        raise ValueError(f"is not the JSON of mha-inspect {command}. Save one with --export FILE.json.")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"has schema_version {shown(data.get('schema_version'))}, and this version reads {SCHEMA_VERSION}. "
            "Make it again with this version."
        )
    try:
        report: R = _build(kind, data)
        return report
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"is not whole: {shown(error, MESSAGE)}. Make it again.") from None


def _require(value: object, *kinds: type) -> None:
    """Raise `TypeError` where a value is of none of these types; True is no number."""
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"a {wanted} is meant where {value!r:.60} stands")


def _build(hint: Any, value: Any) -> Any:
    """Return a value of the annotated type out of plain JSON. Raises `TypeError` or `ValueError` for one of another."""
    if is_dataclass(hint) and isinstance(hint, type):
        _require(value, dict)
        hints = get_type_hints(hint)
        known = {f.name: _build(hints[f.name], value[f.name]) for f in fields(hint) if f.name in value}
        return hint(**known)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = next(part for part in parts if part is not type(None))
        return None if value is None else _build(inner, value)
    if origin is tuple:
        each = parts[0] if len(parts) == 2 and parts[1] is Ellipsis else None
        _require(value, list)
        if each is None and len(value) != len(parts):
            raise ValueError(f"a list of {len(parts)} is meant, and one has {len(value)}")
        return tuple(_build(each or parts[place], item) for place, item in enumerate(value))
    if origin is dict:
        _require(value, dict)
        return {key: _build(parts[1], item) for key, item in value.items()}
    if hint is float:
        if not isinstance(value, str):
            _require(value, float, int)
        return _NUMBERS[value] if isinstance(value, str) else float(value)
    if hint in (int, str, bool):
        _require(value, hint)
        if hint is int and abs(value) >= 2**63:
            raise ValueError("a number is larger than any of ours")
    if origin is list and value is not None:
        _require(value, list)
    if origin is Literal and value not in parts:
        raise ValueError(f"{value!r} is none of {', '.join(map(repr, parts))}")
    return value
