"""JSON Schemas made from the dataclasses of the reports, by pydantic, with the docstrings below the fields."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from mha_inspect import reports, schemas
from mha_inspect.answers.failure.report import CAUSES
from mha_inspect.naming.stages import STAGES
from mha_inspect.reports.common import SCHEMA_VERSION
from mha_inspect.reports.report import Report

FOLDER = Path(schemas.__file__).parent

NARROWER: dict[tuple[str, str], dict[str, Any]] = {
    ("Stage", "name"): {"enum": list(STAGES)},
    ("StageRow", "name"): {"enum": list(STAGES)},
    ("ReachedStage", "name"): {"enum": [*STAGES, ""]},
    ("Attention", "kind"): {"items": {"enum": ["self", "cross", "causal", "grouped"]}},
    ("Cause", "name"): {"enum": list(CAUSES)},
    ("HeadCount", "first_differing_stage"): {"enum": [*STAGES, None]},
    ("DiffReport", "first_differing_stage"): {"enum": [*STAGES, None]},
    ("Parameter", "share"): {"type": "number", "minimum": 0, "maximum": 1},
}
"""Class and field, to what its type does not say."""


class _Schemas(GenerateJsonSchema):
    """What JSON has not (NaN, infinities) is written as strings, and no size, count or place is negative."""

    def float_schema(self, schema: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}

    def int_schema(self, schema: Any) -> dict[str, Any]:
        return {"type": "integer", "minimum": 0}

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _classes() -> dict[str, type]:
    """The dataclasses of the reports by name."""
    modules = [import_module(f"{reports.__name__}.{found.name}") for found in iter_modules(reports.__path__)]
    held = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type) and is_dataclass(cls)]
    return {cls.__name__: cls for cls in held}


def schema_of(report: type, command: str) -> dict[str, Any]:
    """The schema of a command's JSON output."""
    classes = _classes()
    for cls in classes.values():
        cls.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True, extra="forbid")
    try:
        made = TypeAdapter(report).json_schema(schema_generator=_Schemas, mode="serialization")
    finally:
        for cls in classes.values():
            del cls.__pydantic_config__
    parts = {name: part for name, part in made.pop("$defs", {}).items() if name in classes}
    for name, part in (*parts.items(), (report.__name__, made)):
        _as_written(classes[name], part)
    heading = {"schema_version": {"const": SCHEMA_VERSION}, "command": {"const": command}}
    made["properties"] = heading | made["properties"]
    made["required"] = [*heading, *made["required"]]
    made["title"] = f"Output of mha-inspect {command} --format json"
    return {"$schema": _Schemas.schema_dialect, **made, **({"$defs": parts} if parts else {})}


def _as_written(cls: type, part: dict[str, Any]) -> None:
    """What `reports.json` does with a default of None, and what is narrower than the type."""
    part.pop("title", None)
    part["required"] = []
    for field in fields(cls):
        known = part["properties"][field.name]
        known.pop("default", None)
        if field.default is None:  # left out, not null
            (only,) = [choice for choice in known.pop("anyOf") if choice != {"type": "null"}]
            known |= only
        else:
            assert field.default_factory is MISSING
            part["required"].append(field.name)
        narrower = NARROWER.get((cls.__name__, field.name))
        if narrower is not None:
            known.pop("anyOf", None)
            known |= narrower


def schemas_of_reports() -> dict[Path, dict[str, Any]]:
    """Every schema's file, to what it is to hold."""
    classes = _classes()
    made = {cls.command: schema_of(cls, cls.command) for cls in classes.values() if issubclass(cls, Report)}
    return {FOLDER / f"{command}.schema.json": schema for command, schema in made.items()}
