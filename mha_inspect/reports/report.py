"""What all reports can do: print themselves in a REPL, a notebook or into a file, and become plain data."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from .common import SCHEMA_VERSION


class Report:
    """An answer that prints itself as the command does that makes it."""

    command: ClassVar[str]
    """The command: the `command` of the JSON, the name of its schema and, with `_` for `-`, the file of its page."""

    def __repr__(self) -> str:
        return self._text("plain").rstrip("\n")

    def _repr_html_(self) -> str:
        cell: str = _render().to_cell(self)
        return cell

    def to_dict(self) -> dict[str, Any]:
        """Return what `--format json` prints, as Python has it: the schema is in `mha_inspect/schemas`."""
        return {"schema_version": SCHEMA_VERSION, "command": self.command, **to_data(self)}

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a .json, .txt or .html file; an existing file is replaced whole or not at all.

        Raises `ExportError` where that cannot be done.
        """
        _render(".export").save(Path(path), self._text)

    def _text(self, format: str) -> str:
        text: str = _render().to_text(self, format)
        return text


def _render(module: str = "") -> Any:
    """Return the package that makes pages, or a module of it: it stands above the reports, and is imported late."""
    return import_module(f"..render{module}", __package__)


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
