"""JSON: the report itself, key by key. The schemas are in `mha_inspect/schemas`."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from math import isfinite, isnan
from typing import Any

from ..reports.common import SCHEMA_VERSION
from ..text import printable_json


def to_json(report: Any, command: str) -> str:
    """The report as JSON, the same bytes for equal reports; ends with a line feed.

    A field that is None by default was not asked for, and is left out while it is None. Others stay, as null.
    """
    content = {"schema_version": SCHEMA_VERSION, "command": command, **to_data(report)}
    return printable_json(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def to_data(value: Any) -> Any:
    """The value in JSON's types. NaN and infinities become the strings `NaN`, `Infinity`, `-Infinity`.

    Raises `TypeError` for what JSON has no type for: a report holds plain data only.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (tuple, list)):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_data(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        pairs = ((field, getattr(value, field.name)) for field in fields(value))
        return {f.name: to_data(item) for f, item in pairs if not (item is None and f.default is None)}
    raise TypeError(f"{type(value).__name__} has no place in a report")
