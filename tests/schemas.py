"""Load the JSON Schema (2020-12) of the commands' JSON output, a contract that scripts can rely on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mha_inspect

FILE = Path(mha_inspect.__file__).parent / "schemas" / "mha-inspect.schema.json"


def commands() -> tuple[str, ...]:
    """Return the commands that have a schema."""
    return tuple(sorted(_names(_parts())))


def load_schema(command: str) -> dict[str, Any]:
    """Return the schema of a command's JSON output. Raises `KeyError` for a command without a schema."""
    parts = _parts()
    needed = [_names(parts)[command]]
    for name in needed:
        needed += [other for other in re.findall(r'"#/\$defs/(\w+)"', json.dumps(parts[name])) if other not in needed]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Output of mha-inspect {command} --json",
        "$ref": f"#/$defs/{needed[0]}",
        "$defs": {name: parts[name] for name in needed},
    }


def _parts() -> dict[str, Any]:
    parts: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["$defs"]
    return parts


def _names(parts: dict[str, Any]) -> dict[str, str]:
    """Return each command with the name of its part of the schema."""
    const = {name: part.get("properties", {}).get("command", {}).get("const") for name, part in parts.items()}
    return {command: name for name, command in const.items() if command}
