"""Define the base class of all reports, the parts that several share, and the report of `layers`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..explained import explain_fields

SCHEMA_VERSION = 3
"""Raised when a key of the JSON output is renamed, removed or changes its meaning."""

Verdict = Literal["same", "differs", "inconclusive"]
MeasuredAgainst = Literal["float64", "half a digit"]
"""The run that rounding is measured against: in float64, or, for a module that cannot run in float64, with every weight
and input changed by half a unit in the last place."""


_SHOWN = 10
"""Lines of a report that a REPL shows."""


class Report:
    """An answer that prints itself as its command does; a REPL shows its first lines, a notebook its page."""

    command: ClassVar[str]
    """The `command` of the JSON, and the name of its schema."""

    @property
    def ok(self) -> bool:
        """Whether the answer is good: no sure finding, no failure, no difference, and every number proved."""
        return True

    @property
    def verdict(self) -> str | None:
        """The first line of its page; None for a report that judges nothing, e.g. of parameters."""
        paragraph = _render(".verdict").verdict_of(self)
        return None if paragraph is None else str(paragraph.text)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return self._text("plain").rstrip("\n")

    def __repr__(self) -> str:
        """Return the first lines of the page, ten at most."""
        lines = str(self).split("\n")
        if len(lines) <= _SHOWN:
            return "\n".join(lines)
        return "\n".join([*lines[: _SHOWN - 1], f"… {len(lines)} lines: print it to see them all"])

    def _repr_html_(self) -> str:
        return str(_render().to_cell(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `--json` as a dict; its schema is in `mha_inspect/schemas`."""
        verdict = self.verdict
        said = {} if verdict is None else {"verdict": verdict}
        return {"schema_version": SCHEMA_VERSION, "command": self.command, **said, **to_data(self)}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a .json, .txt or .html file; an existing file is replaced completely or not at all.

        Raises `ExportError` if the file cannot be written.
        """
        _render(".export").save(Path(path), self._text)

    def _text(self, format: str) -> str:
        return str(_render().to_text(self, format))


def _render(module: str = ".formats") -> Any:
    """Return a module of the render package; it imports the reports, so it is imported late."""
    return import_module(f"..render{module}", __package__)


def to_data(value: Any) -> Any:
    """Return the value in JSON's types; NaN and infinities become the strings `NaN`, `Infinity` and `-Infinity`.

    A field whose default is None is omitted while it is None, because it was not requested. Other fields stay as null.
    Fields that begin with `_` are omitted. Fields of a class come before those of its base class.

    Raises `TypeError` for a type that JSON does not have.
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
        return _fields_of(value)
    raise TypeError(f"{type(value).__name__} has no place in a report")


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, in JSON's types."""
    annotations = type(value).__annotations__
    data = {}
    # Stable: the fields of the class itself first.
    for field in sorted(fields(value), key=lambda field: field.name not in annotations):
        if field.name.startswith("_"):
            continue
        item = getattr(value, field.name)
        is_omitted = item is None and field.default is None
        if not is_omitted:
            data[field.name] = to_data(item)
    return data


@dataclass(frozen=True)
class Difference:
    """The difference of two tensors, with the rounding error measured in the same run."""

    max_abs_difference: float | None
    """Largest absolute difference; None if the tensors cannot be subtracted."""
    relative_difference: float | None
    """‖left - right‖ / ‖left‖ over the elements that are finite in both tensors."""
    noise_floor: float | None
    """The larger rounding error of the two tensors, or the rounding error of the baseline."""
    times_noise: float | None
    """max_abs_difference / noise_floor."""
    verdict: Verdict | None
    """`differs` above 10 times the noise floor, `same` up to 2 times; None if the tensors cannot be compared."""


@dataclass(frozen=True)
class Environment:
    """The conditions in which the numbers were measured."""

    torch: str
    """Version of torch."""
    device: str
    """Device of parameters and inputs: `cpu`, `cuda:0`, `meta`."""
    dtype: str
    """Data type of parameters and inputs."""
    seed: int | None
    """Seed of parameters and inputs; None for the user's own module."""
    random: str = ""
    """Random numbers of a built-in layer that the seed gives: `weights and inputs`, or `weights`; else empty."""


@dataclass(frozen=True)
class LayerInfo:
    """The inspected layer."""

    name: str
    """Name in the catalog of layers, or the class of the user's module."""
    spec: dict[str, Any]
    """Sizes and settings; empty for the user's own module."""


@dataclass(frozen=True)
class Stats:
    """Statistics of a tensor over its finite elements."""

    mean: float
    """Mean of the elements."""
    std: float
    """Standard deviation of the elements."""
    min: float
    """Smallest element."""
    max: float
    """Largest element."""
    nan: int
    """Number of NaN elements."""
    inf: int
    """Number of +inf and -inf elements that do not come from a mask."""
    masked: int
    """Number of -inf elements that come from a mask; they are not a fault."""


@dataclass(frozen=True)
class Values:
    """The content of a tensor."""

    text: str
    """The content as torch prints it, abbreviated for large tensors."""
    data: list[Any] | None
    """Every element as nested lists; None if the output is not for a program."""


@dataclass(frozen=True)
class LayerArgument:
    """An argument of a layer."""

    name: str
    """Its name, for `--set NAME=VALUE`."""
    type: str
    """`whole number`, `number` or `true or false`."""
    default: str
    """Its default, as text."""
    meaning: str
    """The argument in one sentence."""


@dataclass(frozen=True)
class ListedLayer:
    """One implementation of attention."""

    name: str
    """Name on the command line."""
    summary: str
    """One line on how it is written."""
    formula: str
    """Formula for the number of parameters with biases."""
    split: str
    """How the heads are split, as an einops pattern or a phrase."""
    source: str
    """Where this style comes from."""
    arguments: tuple[LayerArgument, ...]
    """Arguments that --set gives."""


@dataclass(frozen=True, repr=False)
class LayersReport(Report):
    """The layers that can be built by name."""

    command = "layers"

    layers: tuple[ListedLayer, ...]
    """The layers, in the order in which they are listed."""
    letters: dict[str, str]
    """Letter in the formulas to its meaning."""


explain_fields(globals())
