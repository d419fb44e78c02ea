"""The report of `layers`."""

from __future__ import annotations

from dataclasses import dataclass

from .common import Report


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
