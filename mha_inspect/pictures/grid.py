"""Represent a picture as panels of numbers, one for each head; reduce them to fewer cells, and colour them.

The colours are viridis for numbers from 0, and blue to red around 0 for numbers of both signs. A colour map is a table
of equal steps, so a colour shows its number to within a step.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from math import ceil
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..text import printable

Floats = npt.NDArray[np.float32]

MASKED, NAN, INFINITE = -1, -2, -3
"""Steps of a colour map for elements that are no finite numbers."""


@dataclass(frozen=True)
class PictureAxis:
    """The rows or the columns of a picture."""

    name: str
    labels: tuple[str, ...] = ()
    """A label for each position, e.g. a token; empty if positions are numbered. Made printable."""

    def __post_init__(self) -> None:
        vars(self).update(name=printable(self.name), labels=tuple(map(printable, self.labels)))


@dataclass(frozen=True)
class Range:
    """The range of the finite numbers of an array, and the counts of the other elements."""

    least: float
    most: float
    nan: int = 0
    infinite: int = 0
    masked: int = 0


@dataclass(frozen=True, eq=False)
class Picture:
    """Heat maps on one scale. All texts are made printable."""

    title: str
    panels: tuple[str, ...]
    """The name of each panel: `head 3`."""
    values: Floats
    """Numbers as `panel row column`; -inf is masked, NaN and +inf are themselves."""
    rows: PictureAxis
    columns: PictureAxis
    signed: bool = False
    """Whether 0 is the middle of the colours instead of their start."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        vars(self).update(
            title=printable(self.title),
            panels=tuple(map(printable, self.panels)),
            notes=tuple(map(printable, self.notes)),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of panels, rows and columns."""
        panels, rows, columns = self.values.shape
        return panels, rows, columns

    @cached_property
    def range(self) -> Range:
        """Range of all panels together; 0 to 0 without a finite number."""
        return range_of(self.values)

    @cached_property
    def scale(self) -> tuple[float, float]:
        """The numbers of the first and the last colour."""
        least, most = self.range.least, self.range.most
        if not self.signed:
            return least, most
        size = max(abs(least), abs(most))
        return -size, size


def range_of(values: Floats) -> Range:
    """Return the range of an array; 0 to 0 without a finite number."""
    if values.size == 0:
        return Range(0.0, 0.0)
    least = float(values.min())
    most = float(values.max())
    if np.isfinite(least) and np.isfinite(most):
        return Range(least, most)
    unmasked = values[values != -np.inf]
    finite = unmasked[np.isfinite(unmasked)]
    return Range(
        least=float(finite.min()) if finite.size else 0.0,
        most=float(finite.max()) if finite.size else 0.0,
        nan=int(np.isnan(unmasked).sum()),
        infinite=int((unmasked == np.inf).sum()),
        masked=values.size - unmasked.size,
    )


def reduced(values: Floats, rows: int, columns: int) -> tuple[Floats, tuple[int, int]]:
    """Return at most this many cells, each the maximum of a block of elements, and the size of a block.

    A block is NaN if one of its elements is NaN, and masked if all are masked. The last blocks may be smaller.
    """
    _, all_rows, all_columns = values.shape
    height = _block(all_rows, rows)
    width = _block(all_columns, columns)
    narrow = _maxima(values, 2, width)
    return _maxima(narrow, 1, height), (height, width)


def _maxima(values: Floats, axis: int, block: int) -> Floats:
    """Return the maximum of every so many elements along an axis: 3 and 4 for 1 3 4 in blocks of 2."""
    if block == 1:
        return values
    starts = np.arange(0, values.shape[axis], block)
    maxima: Floats = np.maximum.reduceat(values, starts, axis=axis)
    return maxima


def _block(size: int, most: int) -> int:
    """Return how many elements share a cell, so that a side has at most that many cells: 3 for 100 in 40 cells."""
    return max(ceil(size / max(most, 1)), 1)


def steps(values: Floats, scale: tuple[float, float], count: int) -> npt.NDArray[np.int64]:
    """Return the index of each number among `count` equal steps.

    Other elements are negative: `MASKED` for -inf, `NAN`, and `INFINITE` for +inf.
    """
    low, high = scale
    last = count - 1
    width = high - low
    if width == 0:
        width = 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        # The difference of two float32 numbers may overflow float32.
        parts = (values.astype(np.float64) - low) / width * count
        finite = np.nan_to_num(parts, nan=0.0, posinf=0.0, neginf=0.0)
        places = np.clip(finite, 0, last).astype(np.int64)
    places[values == -np.inf] = MASKED
    places[np.isnan(values)] = NAN
    places[values == np.inf] = INFINITE
    return places


Depth = Literal["true", "256", "none"]
"""The colours of a terminal: any colour, one of 256, or none; then characters replace colours."""

RAMP = ".:-=+*#%@"
"""Characters for the steps without colour, from the least to the most ink. Masked elements are blank."""

# Entries of xterm's palette near each colour map, in its order. Lightness rises, from both ends towards 0 if signed.
_VIRIDIS_256 = (53, 54, 24, 30, 36, 78, 113, 148, 184, 220)
_COOLWARM_256 = (62, 69, 111, 153, 189, 254, 224, 216, 209, 167, 124)


@cache
def hex_table(signed: bool) -> tuple[str, ...]:
    """Return the 256 colours of a map, each as `440154`."""
    file = files(__package__).joinpath("colours.json")
    tables = json.loads(file.read_text(encoding="utf-8"))
    name = "coolwarm" if signed else "viridis"
    lines = tables[name]["colours"]
    return tuple(" ".join(lines).split())


def codes(signed: bool, depth: Literal["true", "256"]) -> tuple[str, ...]:
    """Return the terminal code of each step of a map, after `38;` for the foreground and `48;` for the background."""
    if depth == "256":
        entries = _COOLWARM_256 if signed else _VIRIDIS_256
        return tuple(f"5;{entry}" for entry in entries)
    steps = []
    for colour in hex_table(signed):
        red, green, blue = bytes.fromhex(colour)
        steps.append(f"2;{red};{green};{blue}")
    return tuple(steps)


SPECIAL: dict[Depth, dict[int, str]] = {
    "true": {NAN: "2;255;0;255", INFINITE: "2;255;255;255"},
    "256": {NAN: "5;201", INFINITE: "5;231"},
}
"""The codes of NaN and +inf: magenta and white, which neither map has."""


def depth_shown() -> Depth:
    """Return the number of colours of a colour terminal, according to its environment variables."""
    colours = os.environ.get("COLORTERM", "").casefold()
    if colours in ("truecolor", "24bit"):
        return "true"
    terminal = os.environ.get("TERM", "")
    if terminal.endswith("-direct"):
        return "true"
    if os.environ.get("FORCE_COLOR") == "3":
        return "true"
    # Windows Terminal says it with no other variable.
    if "WT_SESSION" in os.environ:
        return "true"
    return "256"
