"""Parts that several reports share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 1
"""Raised when a key of the JSON output is renamed, removed or changes its meaning."""

Verdict = Literal["same", "differs", "inconclusive"]
MeasuredAgainst = Literal["float64", "half a digit"]
"""What rounding is measured against: the same in float64, or, of what does not run in it, with every weight and input
off by half a last digit."""


@dataclass(frozen=True)
class Difference:
    """How far apart two tensors are, beside a rounding error that was measured in the same run."""

    max_abs_difference: float | None
    """None where the shapes differ, and there is nothing to subtract."""
    relative_difference: float | None
    """‖left - right‖ / ‖left‖ over the elements that are finite on both sides."""
    noise_floor: float | None
    times_noise: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Environment:
    """What the numbers were made with."""

    torch: str
    """Version of torch."""
    device: str
    """Device that ran it."""
    dtype: str
    """Data type of parameters and inputs."""
    seed: int | None
    """Seed of parameters and inputs; None for a module that was brought along."""


@dataclass(frozen=True)
class LayerInfo:
    """The layer that was looked at."""

    name: str
    """Name in the catalog of layers, or the class of the user's module."""
    spec: dict[str, Any]
    """Sizes and settings, as `spec.plain_fields` gives them; empty for a module that was brought along."""


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
