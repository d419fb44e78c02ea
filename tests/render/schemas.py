"""The JSON Schema made from the dataclasses of the reports, by pydantic, with the docstrings below the fields."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from mha_inspect import reports
from mha_inspect.failures.causes import CAUSES
from mha_inspect.naming.pattern import STAGES
from mha_inspect.reports.common import SCHEMA_VERSION, Report

NARROWER: dict[tuple[str, str], dict[str, Any]] = {
    ("Stage", "name"): {"enum": list(STAGES)},
    ("StageRow", "name"): {"enum": list(STAGES)},
    ("ReachedStage", "name"): {"enum": [*STAGES, ""]},
    ("AttentionReport", "kind"): {"items": {"enum": ["self", "cross", "causal", "grouped"]}},
    ("Cause", "name"): {"enum": list(CAUSES)},
    ("HeadCount", "first_differing_stage"): {"enum": [*STAGES, None]},
    ("DiffReport", "first_differing_stage"): {"enum": [*STAGES, None]},
    ("Parameter", "share"): {"type": "number", "minimum": 0, "maximum": 1},
}
"""Class and field, to what its type does not say."""


JUDGED = ("trace", "check", "fix", "diff", "diff-checkpoints", "compare-heads")
"""Commands whose pages begin with a verdict."""
COUNT = {"type": "integer", "minimum": 0}
SHARED: dict[str, dict[str, Any]] = {
    "Number": {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
    "Count": COUNT,
    "Shape": {"type": "array", "items": COUNT},
}
"""What stands by its name wherever it is said. JSON has no NaN, and no size, count or place is negative."""


class _Schemas(GenerateJsonSchema):
    def float_schema(self, schema: Any) -> dict[str, Any]:
        return dict(SHARED["Number"])

    def int_schema(self, schema: Any) -> dict[str, Any]:
        return dict(COUNT)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def schema_of_reports() -> dict[str, Any]:
    """Return the schema of all reports, with the parts that they share."""
    modules = [import_module(f"{reports.__name__}.{found.name}") for found in iter_modules(reports.__path__)]
    members = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    classes = {cls.__name__: cls for cls in members if is_dataclass(cls)}
    for cls in classes.values():
        cls.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True, extra="forbid")
    try:
        asked = [(name, "serialization", TypeAdapter(cls)) for name, cls in classes.items()]
        _, made = TypeAdapter.json_schemas(asked, schema_generator=_Schemas)
    finally:
        for cls in classes.values():
            del cls.__pydantic_config__
    parts = made["$defs"]
    for name, cls in classes.items():
        _as_written(cls, parts[name])
    commands = sorted(name for name, cls in classes.items() if issubclass(cls, Report))
    return {
        "$schema": _Schemas.schema_dialect,
        "title": "Output of mha-inspect --json",
        "anyOf": [{"$ref": f"#/$defs/{name}"} for name in commands],
        "$defs": SHARED | _referring({name: parts[name] for name in sorted(classes)}),
    }


def _as_written(cls: type, part: dict[str, Any]) -> None:
    """Say what `to_data` does with a default of None and with a report, and what is narrower than the type."""
    part.pop("title", None)
    part["description"] = vars(cls)["__doc__"].text  # the fields have descriptions of their own
    part["required"] = []
    for field in fields(cls):
        if field.name.startswith("_"):
            part["properties"].pop(field.name, None)
            continue
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
    if issubclass(cls, Report):
        heading: dict[str, Any] = {"schema_version": {"const": SCHEMA_VERSION}, "command": {"const": cls.command}}
        if cls.command in JUDGED:
            heading["verdict"] = {"type": "string", "description": "The first line of the page."}
        part["properties"] = heading | part["properties"]
        part["required"] = [*heading, *part["required"]]


def _referring(value: Any) -> Any:
    """Return a schema in which what is shared stands by its name."""
    if isinstance(value, dict):
        for name, shared in SHARED.items():
            rest = {key: item for key, item in value.items() if key not in shared}
            if value == rest | shared and rest.keys() <= {"description"}:
                return rest | {"$ref": f"#/$defs/{name}"}
        return {key: _referring(item) for key, item in value.items()}
    return [_referring(item) for item in value] if isinstance(value, list) else value


def written(value: Any, margin: str = "", room: int = 120) -> str:
    """Return JSON in which whatever fits on a line stands on one."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) <= room - len(margin) or not isinstance(value, (dict, list)):
        return line
    inner = margin + "  "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + written(item, inner) for item in value) + f"\n{margin}]"
    items = (f"{inner}{json.dumps(key)}: {written(item, inner, room - len(key) - 4)}" for key, item in value.items())
    return "{\n" + ",\n".join(items) + f"\n{margin}}}"
