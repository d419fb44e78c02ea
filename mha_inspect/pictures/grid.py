"""Numbers in panels, one a head, the cells that they are reduced to where there are too many, and their colours.

Colours are viridis for what grows from nothing, blue to red around zero for what has a sign. A colour map is a table of
steps of equal width, so that a colour tells the number that it was drawn for within a step.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..text import printable

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PictureAxis:
    """What goes down a picture, or across it."""

    name: str
    labels: tuple[str, ...] = ()
    """What stands at each place, such as a token; empty where places are numbered. Cleaned as it enters."""

    def __post_init__(self) -> None:
        vars(self).update(name=printable(self.name), labels=tuple(map(printable, self.labels)))


@dataclass(frozen=True)
class Range:
    """The finite numbers of an array, from least to most, and how many elements are none."""

    least: float
    most: float
    nan: int = 0
    infinite: int = 0
    masked: int = 0


@dataclass(frozen=True, eq=False)
class Picture:
    """Heat maps on one scale. Its texts are cleaned as they enter."""

    title: str
    panels: tuple[str, ...]
    """What each one is: `head 3`."""
    values: Floats
    """Laid out as `panel row column`. -inf is masked, NaN and +inf are what they are."""
    rows: PictureAxis
    columns: PictureAxis
    signed: bool = False
    """Whether zero is the middle of the colours, and not where they begin."""
    notes: tuple[str, ...] = ()
    below: bool = False
    """Whether panels stand below each other, to be compared column by column, and never side by side."""

    def __post_init__(self) -> None:
        panels, notes = tuple(map(printable, self.panels)), tuple(map(printable, self.notes))
        vars(self).update(title=printable(self.title), panels=panels, notes=notes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return how many panels, rows and columns there are."""
        return self.values.shape[0], self.values.shape[1], self.values.shape[2]

    @cached_property
    def range(self) -> Range:
        """Return what the elements are, all panels together; from 0 to 0 where none is finite."""
        return range_of(self.values)

    @cached_property
    def scale(self) -> tuple[float, float]:
        """Return the numbers that the first and the last colour stand for."""
        if self.signed:
            size = max(abs(self.range.least), abs(self.range.most))
            return -size, size
        return self.range.least, self.range.most


def range_of(values: Floats) -> Range:
    """Return the range of an array."""
    least, most = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if np.isfinite(least) and np.isfinite(most):
        return Range(least, most)
    unmasked = values[values != -np.inf]
    finite = unmasked[np.isfinite(unmasked)]
    return Range(
        float(finite.min()) if finite.size else 0.0,
        float(finite.max()) if finite.size else 0.0,
        nan=int(np.isnan(unmasked).sum()),
        infinite=int((unmasked == np.inf).sum()),
        masked=values.size - unmasked.size,
    )


def reduced(values: Floats, rows: int, columns: int) -> tuple[Floats, tuple[int, int]]:
    """Return at most so many cells, each the largest of a block of elements, and the size of a block.

    A block is NaN where one of its elements is, and masked where all of them are. Blocks at the end may be smaller.
    """
    height, width = (
        max(-(-size // max(most, 1)), 1) for size, most in zip(values.shape[1:], (rows, columns), strict=True)
    )
    for axis, block in ((2, width), (1, height)):
        if block > 1:
            values = np.maximum.reduceat(values, np.arange(0, values.shape[axis], block), axis=axis)
    return values, (height, width)


def steps(values: Floats, scale: tuple[float, float], count: int) -> npt.NDArray[np.int64]:
    """Return which of `count` steps of equal width each number is in, from 0.

    What is no number is negative: -1 is masked, -2 is NaN, -3 is +inf.
    """
    low, high = scale
    with np.errstate(invalid="ignore", over="ignore"):
        # In float64: the difference of two float32 may be more than one can hold.
        part = (values.astype(np.float64) - low) / ((high - low) or 1.0) * count
        places = np.clip(np.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0), 0, count - 1).astype(np.int64)
    places[values == -np.inf] = -1
    places[np.isnan(values)] = -2
    places[values == np.inf] = -3
    return places


Depth = Literal["true", "256", "none"]
"""What a terminal can show: any colour, one of 256, or none, where characters stand for steps."""

RAMP = ".:-=+*#%@"
"""Steps from the least to the most ink, where there is no colour. Masked elements are blank."""

# Entries of xterm's palette that lie near to each map, in its order: lightness rises, around zero from both ends.
_VIRIDIS_256 = (53, 54, 24, 30, 36, 78, 113, 148, 184, 220)
_COOLWARM_256 = (62, 69, 111, 153, 189, 254, 224, 216, 209, 167, 124)


@cache
def hex_table(signed: bool) -> tuple[str, ...]:
    """Return the 256 colours of a map as `440154`."""
    tables = json.loads(files(__package__).joinpath("colours.json").read_text(encoding="utf-8"))
    return tuple(" ".join(tables["coolwarm" if signed else "viridis"]["colours"]).split())


def codes(signed: bool, depth: Literal["true", "256"]) -> tuple[str, ...]:
    """Return each step of a map as a terminal is told of it, behind `38;` for the ink and `48;` for the ground."""
    if depth == "256":
        return tuple(f"5;{entry}" for entry in (_COOLWARM_256 if signed else _VIRIDIS_256))
    return tuple("2;" + ";".join(str(part) for part in bytes.fromhex(colour)) for colour in hex_table(signed))


SPECIAL: dict[Depth, dict[int, str]] = {
    "true": {-2: "2;255;0;255", -3: "2;255;255;255"},
    "256": {-2: "5;201", -3: "5;231"},
}
"""The steps of NaN and +inf: magenta and white, which are in neither map."""


def depth_shown() -> Depth:
    """Return how many colours a terminal shows that shows any, as far as it says."""
    terminal = os.environ.get("TERM", "")
    many = os.environ.get("COLORTERM", "").casefold() in ("truecolor", "24bit") or terminal.endswith("-direct")
    many = many or os.environ.get("FORCE_COLOR") == "3" or "WT_SESSION" in os.environ
    return "true" if many else "256"
