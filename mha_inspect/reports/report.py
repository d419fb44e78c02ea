"""What all reports can do: print themselves in a REPL, a debugger, a notebook, or into a file."""

from __future__ import annotations

from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from .json import content


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
        """Return what `--format json` prints, as Python has it."""
        return content(self)

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
