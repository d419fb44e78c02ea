"""What all reports can do, the parts that several share, and the shortest of them, that of `layers`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Literal

SCHEMA_VERSION = 1
"""Raised when a key of the JSON output is renamed, removed or changes its meaning."""

Verdict = Literal["same", "differs", "inconclusive"]
MeasuredAgainst = Literal["float64", "half a digit"]
"""What rounding is measured against: the same in float64, or, of what does not run in it, with every weight and input
off by half a last digit."""


class Report:
    """An answer that prints itself as the command does that makes it: in a REPL, a notebook or into a file."""

    command: ClassVar[str]
    """The `command` of the JSON, and the name of its schema."""

    @property
    def ok(self) -> bool:
        """Whether the answer is good: no finding, no failure, no difference, and every number proved."""
        return True

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        text: str = _render().to_text(self, "plain")
        return text.rstrip("\n")

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
    that begin with `_` are no part of an answer, and those of the class itself come before those of what it is a kind
    of.

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
        ordered = sorted(fields(value), key=lambda field: field.name not in type(value).__annotations__)
        pairs = [(field, getattr(value, field.name)) for field in ordered if not field.name.startswith("_")]
        return {f.name: to_data(item) for f, item in pairs if not (item is None and f.default is None)}
    raise TypeError(f"{type(value).__name__} has no place in a report")


@dataclass(frozen=True)
class Difference:
    """How far apart two tensors are, beside a rounding error that was measured in the same run."""

    max_abs_difference: float | None
    """None where there is nothing to subtract."""
    relative_difference: float | None
    """‖left - right‖ / ‖left‖ over the elements that are finite on both sides."""
    noise_floor: float | None
    """Largest rounding error of the two, or that of the baseline."""
    times_noise: float | None
    """max_abs_difference / noise_floor."""
    verdict: Verdict | None
    """Above 10 times the noise floor `differs`, at or below twice `same`; None where there is nothing to compare."""


@dataclass(frozen=True)
class Environment:
    """What the numbers were made with."""

    torch: str
    """Its version."""
    device: str
    dtype: str
    """Data type of parameters and inputs."""
    seed: int | None
    """Of parameters and inputs; None for a module that was brought along."""


@dataclass(frozen=True)
class LayerInfo:
    """The layer that was looked at."""

    name: str
    """Name in the catalog of layers, or the class of the user's module."""
    spec: dict[str, Any]
    """Sizes and settings; empty for a module that was brought along."""


@dataclass(frozen=True)
class Stats:
    """Statistics of one tensor, over its finite elements."""

    mean: float
    std: float
    min: float
    max: float
    nan: int
    """Elements that are NaN."""
    inf: int
    """Elements that are +inf or -inf and were not put there by a mask."""
    masked: int
    """Elements that are -inf because a mask put it there: no alarm."""


@dataclass(frozen=True)
class Values:
    """The content of one tensor."""

    text: str
    """Shortened as torch shortens it."""
    data: list[Any] | None
    """Every element as nested lists, when a machine is to read it; else None."""


@dataclass(frozen=True)
class ListedLayer:
    """One way to write attention."""

    name: str
    """Name on the command line."""
    summary: str
    """One line: how it is written."""
    formula: str
    """Closed formula of the parameter count with biases."""
    split: str
    """How the heads are split, as an einops pattern or a phrase."""
    source: str
    """Where this style comes from."""
    takes: tuple[str, ...]
    """Settings that not every layer has a use for, and this one has."""


@dataclass(frozen=True, repr=False)
class LayersReport(Report):
    """The layers that can be built by name."""

    command = "layers"

    layers: tuple[ListedLayer, ...]
    letters: dict[str, str]
    """What the letters of the formulas stand for."""
