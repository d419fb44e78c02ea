"""Pictures as text: two rows in a line where there is colour, characters of more and more ink where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from ..render.layout import pieces
from ..text import cells, fitting, plural, printable
from .grid import INFINITE, NO_NUMBER, RAMP, Depth, Floats, Picture, Side, codes, reduced, steps

WIDTH = 80
"""Where nothing says how wide the page is."""
GAP = 2
"""Columns between two panels."""
SIDE = 22
"""Columns that a panel has at least, before panels stand below each other."""
LARGE = 16
"""Up to so many rows and columns each cell is two columns wide and two half lines high, where there is room."""
WIDEST_LABEL, LONGEST_LABEL = 12, 6
"""Characters of a label that are shown, beside a row and under a column."""
BAR = 24
"""Columns that the bar of the legend has at most."""

_RESET = "\x1b[0m"
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_MASKED, _NAN, _NONE = -1, -2, -9
_TICK = 4
"""Lines between two numbers of rows."""


def draw(picture: Picture, *, width: int | None = None, depth: Depth = "none") -> str:
    """Return the picture as lines that are no wider than `width`; ends with a line feed.

    Masked cells have no colour: a dot stands where both cells of a character are masked, and without colour they are
    blank.
    """
    page = _Page(picture, WIDTH if width is None else max(width, 20), depth)
    return "\n".join(line.rstrip(" ") for line in page.lines()) + "\n"


@dataclass(frozen=True)
class _Page:
    picture: Picture
    width: int
    depth: Depth

    @cached_property
    def _codes(self) -> tuple[str, ...]:
        return () if self.depth == "none" else codes(self.picture.signed, self.depth)

    @cached_property
    def _count(self) -> int:
        """How many steps the map has."""
        return len(self._codes or RAMP)

    @cached_property
    def _gutter(self) -> int:
        rows, columns = self.picture.rows, self.picture.columns
        ticks = max((min(cells(label), WIDEST_LABEL) for label in rows.labels), default=0)
        ticks = max(ticks, len(str(self.picture.shape[1] - 1)))
        return max(ticks, cells(rows.name) + 2, cells(columns.name) + 2) + 1

    @cached_property
    def _zoom(self) -> int:
        """Columns that a cell takes: two where the whole is small, or has names that want to be read."""
        count, rows, columns = self.picture.shape
        named = bool(self.picture.rows.labels or self.picture.columns.labels)
        beside = 1 if named or self.depth == "none" or self.picture.below else count
        room = (self.width - self._gutter + GAP) // beside - GAP
        limit = 2 * LARGE if named else LARGE
        return 2 if max(rows, columns) <= limit and 2 * columns <= room else 1

    @cached_property
    def _beside(self) -> int:
        """How many panels stand side by side."""
        count, _, columns = self.picture.shape
        if self.picture.below:
            return 1
        side = columns * self._zoom if self._zoom > 1 else min(columns, SIDE)
        side = max(side, self._widest_name)
        return max(min(count, (self.width - self._gutter + GAP) // (side + GAP)), 1)

    @cached_property
    def _reduced(self) -> tuple[Floats, tuple[int, int]]:
        count, rows, _ = self.picture.shape
        across = (self.width - self._gutter - GAP * (self._beside - 1)) // self._beside // self._zoom
        # One panel alone may be as wide as the page, and about as high as a screen.
        across = max(min(across, 3 * SIDE if count == 1 else 2 * SIDE), 1)
        # A character is twice as high as it is wide.
        down = across if self.depth != "none" or rows <= across else max(across // 2, 1)
        return reduced(self.picture.values, down, across)

    @property
    def _lines_high(self) -> int:
        """How many lines a panel takes."""
        rows: int = self._reduced[0].shape[1]
        return rows if self._tall else -(-rows // 2)

    @property
    def _tall(self) -> bool:
        """Whether a cell is a line high, and not half of one."""
        return self._zoom > 1 or self.depth == "none"

    def lines(self) -> list[str]:
        """Return the picture in bands of panels, with the legend below."""
        values, (height, width) = self._reduced
        found = steps(values, self.picture.scale, self._count)
        lines: list[str] = []
        for first in range(0, len(found), self._beside):
            lines += self._band(first, found[first : first + self._beside], height, width)
            lines.append("")
        return [*lines, *self._legend(height, width)]

    def _band(self, first: int, found: npt.NDArray[np.int64], height: int, width: int) -> list[str]:
        room = (self.width - self._gutter + GAP) // self._beside - GAP
        across = max(found.shape[2] * self._zoom, min(self._widest_name, room))

        def line(left: str, parts: Iterable[str]) -> str:
            beside = (part + " " * (across - cells(_ESCAPE.sub("", part))) for part in parts)
            return _right(left, self._gutter - 1) + " " + (" " * GAP).join(beside)

        names = self.picture.panels[first : first + len(found)]
        lines = [line(f"{self.picture.rows.name} ↓", (_cut(printable(name), across) for name in names))]
        panels = [self._panel(panel) for panel in found]
        for number in range(self._lines_high):
            row = number if self._tall else 2 * number
            lines.append(line(self._row_tick(number, row, height), (panel[number] for panel in panels)))
        below = _across(self.picture.columns, found.shape[2], width, self._zoom)
        titles = [f"{self.picture.columns.name} →", *[""] * len(below)]
        return [*lines, *(line(title, [ticks] * len(found)) for title, ticks in zip(titles, below, strict=False))]

    @cached_property
    def _widest_name(self) -> int:
        return max(cells(printable(name)) for name in self.picture.panels)

    def _row_tick(self, line: int, row: int, height: int) -> str:
        labels = self.picture.rows.labels
        if labels:
            return _cut(_label(labels, row, height), WIDEST_LABEL)
        return str(row * height) if line % _TICK == 0 or self._lines_high <= _TICK else ""

    def _panel(self, found: npt.NDArray[np.int64]) -> list[str]:
        rows = found.tolist()
        if self.depth == "none":
            return ["".join(_inkless(step) * self._zoom for step in row) for row in rows]
        if self._zoom > 1:
            wide = [[step for step in row for _ in range(2)] for row in rows]
            return [self._pairs(row, row) for row in wide]
        below = [*rows[1:], [_NONE] * found.shape[1]]
        return [self._pairs(rows[i], below[i]) for i in range(0, len(rows), 2)]

    def _pairs(self, upper: Sequence[int], lower: Sequence[int]) -> str:
        """Return one line of two rows, which are the same of one that is a line high."""
        parts, before = [], ""
        for above, below in zip(upper, lower, strict=True):
            style, character = self._character(above, below)
            if style != before:
                # What the style before has set and this one does not is taken back.
                parts.append(f"\x1b[0;{style}m" if style else _RESET)
                before = style
            parts.append(character)
        return "".join([*parts, _RESET] if before else parts)

    def _character(self, above: int, below: int) -> tuple[str, str]:
        empty = (_MASKED, _NONE)
        if above in empty and below in empty:
            return "", "·" if _MASKED in (above, below) else " "
        if above in empty:
            return f"38;{self._code(below)}", "▄"
        if below in empty:
            return f"38;{self._code(above)}", "▀"
        if above == below and above < _MASKED:  # told apart by more than a colour
            return f"38;5;16;48;{self._code(above)}", "×" if above == _NAN else "+"
        return f"38;{self._code(above)};48;{self._code(below)}", "▀"

    def _code(self, step: int) -> str:
        if step >= 0:
            return self._codes[step]
        assert self.depth != "none"
        return (NO_NUMBER if step == _NAN else INFINITE)[self.depth]

    # -- the legend ----------------------------------------------------------------------------------------------------

    def _legend(self, height: int, width: int) -> list[str]:
        picture, held = self.picture, self.picture.range
        low, high = picture.scale
        title, inked = printable(picture.title), self.depth != "none"
        if held.nan + held.infinite + held.masked == picture.values.size:
            parts = [f"{title}: no element is a finite number"]
        elif low == high:
            parts = [f"{title}: every number is {number(low)} {self._sample(low)}"]
        else:
            ends = f"{number(low)} ", f" {number(high)}"
            room = self.width - sum(map(cells, ends))
            beside = cells(title) + 2
            # A title that would leave the bar no room stands above it.
            parts = [] if room - beside >= BAR // 2 else [title]
            parts.append(("" if parts else f"{title}  ") + self._bar(room if parts else room - beside).join(ends))
            if picture.signed:
                parts.append(f"from {number(held.least)} to {number(held.most)}")
        if held.masked:
            parts.append(("·" if inked else "blank") + ": masked")
        for count, step, sign, colour, name in (
            (held.nan, _NAN, "?", "magenta", "NaN"),
            (held.infinite, -3, "!", "white", "inf"),
        ):
            if count:
                shown = f"{self._swatch(step)} {colour}" if inked else sign
                parts.append(f"{shown}: {name}, {plural(count, 'element')}")
        notes = []
        if (height, width) != (1, 1):
            _, rows, columns = picture.shape
            sides = f"({picture.rows.name} × {picture.columns.name})"
            size = f"{height} × {width} elements {sides}"
            notes.append(f"Each cell is the largest of {size}: {rows:,} × {columns:,} do not fit.")
        lines = [line for note in (*notes, *picture.notes) for line in pieces(printable(note), self.width)]
        return [*self._filled(parts), *lines]

    def _filled(self, parts: list[str]) -> list[str]:
        """Return the parts behind one another, on as many lines as that takes."""
        lines: list[str] = []
        for part in parts:
            if lines and cells(_ESCAPE.sub("", lines[-1] + "   " + part)) <= self.width:
                lines[-1] += "   " + part
            else:
                lines.append(part)
        return lines

    def _bar(self, room: int) -> str:
        """Return the steps of the map from first to last, fewer of them where there is less room."""
        if self.depth == "none":
            return RAMP
        size = max(min(BAR, room), 2)
        places = [place * self._count // size for place in range(size)]
        return self._pairs(places, places)

    def _sample(self, value: float) -> str:
        found = int(steps(np.full((1, 1, 1), value, np.float32), self.picture.scale, self._count)[0, 0, 0])
        return _inkless(found) if self.depth == "none" else self._swatch(found)

    def _swatch(self, step: int) -> str:
        return self._pairs([step, step], [step, step])


def number(value: float) -> str:
    """Return a number of the legend, four digits of it."""
    return f"{value:.4g}"


def _inkless(step: int) -> str:
    return RAMP[step] if step >= 0 else {-1: " ", -2: "?", -3: "!"}[step]


def _label(labels: tuple[str, ...], cell: int, size: int) -> str:
    """Return what stands at a cell: of several places the first, and that there are more."""
    place = cell * size
    if place >= len(labels):
        return ""
    return labels[place] + ("…" if size > 1 else "")


def _across(side: Side, count: int, size: int, zoom: int) -> list[str]:
    """Return the lines under a panel: numbers where they fit, or labels that run down."""
    if side.labels:
        names = [_cut(_label(side.labels, cell, size), LONGEST_LABEL * 2) for cell in range(count)]
        return _downwards(names, zoom)
    widest = len(str((count - 1) * size)) + 1
    apart = next((n for n in (1, 2, 4, 5, 8, 10, 16, 20, 32) if n * zoom >= widest), max(count, 1))
    line = ""
    for cell in range(0, count, apart):
        text = str(cell * size)
        if cell * zoom + len(text) <= count * zoom:
            line = line.ljust(cell * zoom) + text
    return [line]


def _downwards(names: list[str], zoom: int) -> list[str]:
    """Return labels written from top to bottom, a character a line; a dot stands for one that is too wide."""
    columns = [[c if cells(c) <= zoom else "·" for c in name if cells(c)][:LONGEST_LABEL] for name in names]
    rows = zip_longest(*columns, fillvalue=" ")
    return ["".join(c + " " * (zoom - cells(c)) for c in row) for row in rows]


def _cut(text: str, room: int) -> str:
    """Return as much of the text as fits, and a sign where there was more."""
    return text if cells(text) <= room else text[: fitting(text, room - 1)] + "…"


def _right(text: str, room: int) -> str:
    return " " * (room - cells(text)) + text
