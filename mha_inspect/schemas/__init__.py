"""The JSON Schema (2020-12) of each command's JSON output: the contract that scripts may rely on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_ENDING = ".schema.json"


def commands() -> tuple[str, ...]:
    """Return the commands that have a schema."""
    return tuple(sorted(file.name[: -len(_ENDING)] for file in _FOLDER.glob(f"*{_ENDING}")))


def load_schema(command: str) -> dict[str, Any]:
    """Return the schema of a command's JSON output. Raises `KeyError` for a command that has none."""
    if command not in commands():
        raise KeyError(command)
    schema: dict[str, Any] = json.loads((_FOLDER / f"{command}{_ENDING}").read_text(encoding="utf-8"))
    return schema
