"""Reports as JSON, key by key. The schema is in `mha_inspect/schemas`."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any

from ..text import printable_json
from .common import SCHEMA_VERSION


def to_json(report: Any) -> str:
    """Return the report as JSON, the same bytes for equal reports; ends with a line feed."""
    return printable_json(json.dumps(content(report), indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def content(report: Any) -> dict[str, Any]:
    """Return what the JSON of a report holds."""
    return {"schema_version": SCHEMA_VERSION, "command": report.command, **to_data(report)}


def to_data(value: Any) -> Any:
    """Return the value in JSON's types. NaN and infinities become the strings `NaN`, `Infinity`, `-Infinity`.

    A field that is None by default was not asked for, and is left out while it is None. Others stay, as null. Fields
    that begin with `_` are no part of an answer.

    Raises `TypeError` for what JSON has no type for: a report holds plain data only.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((field, getattr(value, field.name)) for field in fields(value) if not field.name.startswith("_"))
        return {f.name: to_data(item) for f, item in pairs if not (item is None and f.default is None)}
    raise TypeError(f"{type(value).__name__} has no place in a report")
