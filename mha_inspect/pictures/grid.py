"""Numbers in panels, one a head, and the cells that they are reduced to where there are too many."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..text import printable

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Side:
    """What goes down a picture, or across it."""

    name: str
    labels: tuple[str, ...] = ()
    """What stands at each place, such as a token; empty where places are numbered. Cleaned as it enters."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(map(printable, self.labels)))


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
    """Heat maps on one scale."""

    title: str
    panels: tuple[str, ...]
    """What each one is: `head 3`."""
    values: Floats
    """Laid out as `panel row column`. -inf is masked, NaN and +inf are what they are."""
    rows: Side
    columns: Side
    signed: bool = False
    """Whether zero is the middle of the colours, and not where they begin."""
    notes: tuple[str, ...] = ()
    below: bool = False
    """Whether panels stand below each other, to be compared column by column, and never side by side."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """How many panels, rows and columns there are."""
        panels, rows, columns = self.values.shape
        return panels, rows, columns

    @cached_property
    def range(self) -> Range:
        """What the elements are, all panels together; from 0 to 0 where none is finite."""
        return range_of(self.values)

    @cached_property
    def scale(self) -> tuple[float, float]:
        """Which numbers the first and the last colour stand for."""
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
    height, width = block(values.shape[1], rows), block(values.shape[2], columns)
    if width > 1:
        values = np.maximum.reduceat(values, np.arange(0, values.shape[2], width), axis=2)
    if height > 1:
        values = np.maximum.reduceat(values, np.arange(0, values.shape[1], height), axis=1)
    return values, (height, width)


def block(size: int, cells: int) -> int:
    """Return how many elements go into a cell, so that there are no more cells than that."""
    return max(-(-size // max(cells, 1)), 1)


def steps(values: Floats, scale: tuple[float, float], count: int) -> npt.NDArray[np.int64]:
    """Return which of `count` steps of equal width each number is in, from 0.

    What is no number is negative: -1 is masked, -2 is NaN, -3 is +inf.
    """
    low, high = scale
    with np.errstate(invalid="ignore", over="ignore"):
        # In float64: the difference of two float32 may be more than one can hold.
        part = (values.astype(np.float64) - low) / ((high - low) or 1.0) * count
        found = np.clip(np.nan_to_num(part, nan=0.0, posinf=0.0, neginf=0.0), 0, count - 1).astype(np.int64)
    found[values == -np.inf] = -1
    found[np.isnan(values)] = -2
    found[values == np.inf] = -3
    return found
