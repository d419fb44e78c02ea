"""Reports as JSON, key by key, and read back. The schemas are in `mha_inspect/schemas`."""

from __future__ import annotations

import json
import math
import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import InputError
from ..text import printable_json
from .common import SCHEMA_VERSION

R = TypeVar("R")
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(report: Any, command: str) -> str:
    """Return the report as JSON, the same bytes for equal reports; ends with a line feed.

    A field that is None by default was not asked for, and is left out while it is None. Others stay, as null.
    """
    content = {"schema_version": SCHEMA_VERSION, "command": command, **to_data(report)}
    return printable_json(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def to_data(value: Any) -> Any:
    """Return the value in JSON's types. NaN and infinities become the strings `NaN`, `Infinity`, `-Infinity`.

    Raises `TypeError` for what JSON has no type for: a report holds plain data only.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return (
            value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        )
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((field, getattr(value, field.name)) for field in fields(value))
        return {f.name: to_data(item) for f, item in pairs if not (item is None and f.default is None)}
    raise TypeError(f"{type(value).__name__} has no place in a report")


def read_report(path: Path, command: str, kind: type[R]) -> R:
    """Return the report in a JSON file.

    Raises `InputError` when there is no such file, or when it holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise InputError(f"{path} is not JSON. Save a report with --export FILE.json.") from None
    if not isinstance(data, dict) or data.get("command") != command:
        raise InputError(f"{path} is not the JSON of mha-inspect {command}. Save one with --export FILE.json.")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema_version {data.get('schema_version')}, and this version reads {SCHEMA_VERSION}. "
            "Make it again with this version."
        )
    try:
        report: R = _build(kind, data)
        return report
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is not whole: {error}. Make it again.") from None


def _build(hint: Any, value: Any) -> Any:
    """Return a value of the annotated type out of plain JSON."""
    if is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        known = {f.name: _build(hints[f.name], value[f.name]) for f in fields(hint) if f.name in value}
        return hint(**known)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        inner = next(part for part in parts if part is not type(None))
        return None if value is None else _build(inner, value)
    if origin is tuple:
        each = parts[0] if len(parts) == 2 and parts[1] is Ellipsis else None
        return tuple(_build(each or parts[place], item) for place, item in enumerate(value))
    if origin is dict:
        return {key: _build(parts[1], item) for key, item in value.items()}
    if hint is float:
        return _NUMBERS[value] if isinstance(value, str) else float(value)
    if origin is Literal and value not in parts:
        raise ValueError(f"{value!r} is none of {', '.join(map(repr, parts))}")
    return value
