"""Draw pictures as text: two rows in a line with colours, or characters with more and more ink without colours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from textwrap import wrap

import numpy as np

from ..text import cells, fitting, plural
from .grid import INFINITE, MASKED, NAN, RAMP, SPECIAL, Depth, Picture, PictureAxis, codes, reduced, steps

WIDTH = 80
"""Columns of the page if its width is unknown."""
NARROWEST = 20
"""The fewest columns of a picture, however narrow the page is."""
GAP = 2
"""Columns between two panels."""
SIDE = 22
"""The least columns of a panel beside others."""
LARGE = 16
"""Up to this many rows and columns, each cell is two columns wide and a line high, if there is room."""
SMALL = 12
"""The most cells along a side of a panel of a small picture."""
WIDEST_LABEL, LONGEST_LABEL = 12, 6
"""The most characters of a label beside a row, and below a column."""
BAR = 24
"""The most columns of the colour scale in the legend."""

_RESET = "\x1b[0m"
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_NONE = -9
"""The step of a cell below the last row, which has no colour."""
_INKLESS = {MASKED: " ", NAN: "?", INFINITE: "!"}
_TICK = 4
"""Lines between two row numbers."""


def draw(picture: Picture, *, width: int | None = None, depth: Depth = "none", small: bool = False) -> str:
    """Return the picture as lines of at most `width` columns; the text ends with a line feed.

    A `small` picture is one row of small panels, with as many heads as fit. Masked cells have no colour: a dot if both
    cells of a character are masked, and blank without colours.
    """
    columns = WIDTH if width is None else max(width, NARROWEST)
    text = ""
    drawing = _SmallDrawing(picture, columns, depth) if small else _Drawing(picture, columns, depth)
    for line in drawing.lines():
        text += line.rstrip(" ") + "\n"
    return text


class _Drawing:
    """A picture at a given width and number of colours."""

    def __init__(self, picture: Picture, width: int, depth: Depth) -> None:
        self.picture = picture
        self.width = width
        self.depth: Depth = depth
        self.is_inked = depth != "none"
        """Whether cells have colours."""
        self.codes = () if depth == "none" else codes(picture.signed, depth)
        self.count = len(self.codes) if self.codes else len(RAMP)
        """Number of steps of the colour map."""
        _, height, _ = picture.shape
        self.gutter = _gutter(picture.rows, picture.columns, height)
        """The columns left of the panels."""
        self.widest_name = max(map(cells, picture.panels))
        self.zoom = 2 if self._has_room_for_wide_cells() else 1
        """The columns of a cell."""
        self.is_tall = self.zoom > 1 or not self.is_inked
        """Whether a cell is a whole line high instead of half a line."""
        self.beside = self._panels_in_a_row()

    def _has_room_for_wide_cells(self) -> bool:
        """Return whether the picture is small, or has labels, which need room, and fits with wide cells."""
        count, height, across = self.picture.shape
        is_labelled = bool(self.picture.rows.labels or self.picture.columns.labels)
        limit = 2 * LARGE if is_labelled else LARGE
        if max(height, across) > limit:
            return False
        beside = count if self.is_inked and not is_labelled else 1
        return 2 * across <= self.room(beside)

    def _panels_in_a_row(self) -> int:
        count, _, across = self.picture.shape
        least = 2 * across if self.zoom > 1 else min(across, SIDE)
        side = max(least, self.widest_name) + GAP
        fitting = self._width_of_panels() // side
        return max(min(count, fitting), 1)

    def _width_of_panels(self) -> int:
        """Return the columns for panels that have a gap after each, as if there was one after the last."""
        return self.width - self.gutter + GAP

    def room(self, beside: int) -> int:
        """Return the columns of a panel if so many are beside each other."""
        return self._width_of_panels() // beside - GAP

    def lines(self) -> list[str]:
        """Return the panels, as many beside each other as fit, and below them the legend."""
        picture = self.picture
        down, across = self._most_cells()
        values, block = reduced(picture.values, down, across)
        panels = steps(values, picture.scale, self.count).tolist()
        lines: list[str] = []
        for first in range(0, len(panels), self.beside):
            last = first + self.beside
            names = picture.panels[first:last]
            lines += self.band(names, panels[first:last], block)
            lines.append("")
        lines += self.legend(block)
        return lines

    def _most_cells(self) -> tuple[int, int]:
        """Return the most cells of a panel, down and across."""
        count, rows, _ = self.picture.shape
        across = self.room(self.beside) // self.zoom
        # One panel alone may be as wide as the page, and about as high as a screen.
        most = 3 * SIDE if count == 1 else 2 * SIDE
        across = max(min(across, most), 1)
        if self.is_inked or rows <= across:
            return across, across
        # A character is twice as high as it is wide.
        return max(across // 2, 1), across

    def band(self, names: Sequence[str], panels: Sequence[list[list[int]]], block: tuple[int, int]) -> list[str]:
        """Return panels in a row, between their names and the numbers or labels of their columns."""
        rows = self.picture.rows
        columns = self.picture.columns
        rows_in_cell, columns_in_cell = block
        first_row = panels[0][0]
        count = len(first_row)
        room_for_name = min(self.widest_name, self.room(self.beside))
        across = max(count * self.zoom, room_for_name)
        titles = [_cut(name, across) for name in names]
        lines = [self._line(f"{rows.name} ↓", titles, across)]
        bodies = [self.panel(panel) for panel in panels]
        height = len(bodies[0])
        for number, parts in enumerate(zip(*bodies, strict=True)):
            tick = self._tick(number, height, rows_in_cell)
            lines.append(self._line(tick, parts, across))
        left = f"{columns.name} →"
        for ticks in _across(columns, count, columns_in_cell, self.zoom):
            same_below_each = [ticks] * len(panels)
            lines.append(self._line(left, same_below_each, across))
            left = ""
        return lines

    def _line(self, left: str, parts: Iterable[str], across: int) -> str:
        """Return a line of panels that are so many columns `across`, with a text left of them."""
        # One column of the gutter is between the text and the panels.
        room = self.gutter - 1
        margin = " " * (room - cells(left))
        gap = " " * GAP
        padded = [_padded(part, across) for part in parts]
        return f"{margin}{left} {gap.join(padded)}"

    def _tick(self, number: int, height: int, size: int) -> str:
        """Return the label or the number of the row that begins in a line; empty between two row numbers.

        `height` is the number of lines of the panel, and `size` that of the rows in a cell.
        """
        labels = self.picture.rows.labels
        row = number if self.is_tall else 2 * number
        if labels:
            label = _label(labels, row, size)
            return _cut(label, WIDEST_LABEL)
        if number % _TICK == 0 or height <= _TICK:
            return str(row * size)
        return ""

    def panel(self, rows: list[list[int]]) -> list[str]:
        """Return the lines of a panel, whose cells are steps of the colour map, or without a colour."""
        if not self.is_inked:
            lines = []
            for row in rows:
                characters = [_character(step) * self.zoom for step in row]
                lines.append("".join(characters))
            return lines
        if self.zoom > 1:
            wide = [np.repeat(row, 2).tolist() for row in rows]
            return [self.pairs(row, row) for row in wide]
        upper_rows = rows[::2]
        lower_rows = rows[1::2]
        below_last = [_NONE] * len(rows[0])
        pairs = zip_longest(upper_rows, lower_rows, fillvalue=below_last)
        return [self.pairs(upper, lower) for upper, lower in pairs]

    def pairs(self, upper: Sequence[int], lower: Sequence[int]) -> str:
        """Return one line of two rows; both are the same row if a cell is a line high."""
        parts: list[str] = []
        before = ""
        for above, below in zip(upper, lower, strict=True):
            style, character = self.character(above, below)
            if style != before:
                # Reset first: the previous style may set more than this one.
                parts.append(f"\x1b[0;{style}m" if style else _RESET)
                before = style
            parts.append(character)
        if before:
            parts.append(_RESET)
        return "".join(parts)

    def character(self, above: int, below: int) -> tuple[str, str]:
        """Return the style and the character of two cells, one above the other."""
        upper = self._code(above)
        lower = self._code(below)
        if not upper and not lower:
            is_masked = MASKED in (above, below)
            return "", "·" if is_masked else " "
        if not lower:
            return f"38;{upper}", "▀"
        if not upper:
            return f"38;{lower}", "▄"
        # Different characters, not only different colours.
        black_on_colour = f"38;5;16;48;{upper}"
        if above == below == NAN:
            return black_on_colour, "×"
        if above == below == INFINITE:
            return black_on_colour, "+"
        return f"38;{upper};48;{lower}", "▀"

    def _code(self, step: int) -> str:
        """Return the colour of a cell; empty if it has none."""
        if step >= 0:
            return self.codes[step]
        special = SPECIAL[self.depth]
        return special.get(step, "")

    def legend(self, block: tuple[int, int]) -> list[str]:
        """Return the meaning of the colours, and the notes."""
        lines = self._joined([*self._scale(), *self._signs()])
        for note in self._notes(block):
            lines += wrap(note, self.width)
        return lines

    def _joined(self, parts: Iterable[str]) -> list[str]:
        """Return the parts in lines, as many in each as fit."""
        lines: list[str] = []
        for part in parts:
            joined = f"{lines[-1]}   {part}" if lines else part
            if lines and _width(joined) <= self.width:
                lines[-1] = joined
            else:
                lines.append(part)
        return lines

    def _scale(self) -> list[str]:
        """Return the title with the colour scale between its ends."""
        picture = self.picture
        title = picture.title
        span = picture.range
        if span.nan + span.infinite + span.masked == picture.values.size:
            return [f"{title}: every element is masked, NaN or inf"]
        first, last = picture.scale
        low = number(first)
        high = number(last)
        if first == last:
            step = self._step_of(first)
            return [f"{title}: every number is {low} {self.swatch(step)}"]
        ends = f"{low}  {high}"
        room = self.width - cells(ends)
        room_beside = room - cells(title) - 2
        if room_beside >= BAR // 2:
            parts = [f"{title}  {low} {self.bar(room_beside)} {high}"]
        else:
            # A long title goes above the colour scale.
            parts = [title, f"{low} {self.bar(room)} {high}"]
        if picture.signed:
            parts.append(f"from {number(span.least)} to {number(span.most)}")
        return parts

    def _step_of(self, value: float) -> int:
        """Return the step of the colour map for a number."""
        values = np.full((1, 1, 1), value, np.float32)
        step = steps(values, self.picture.scale, self.count)
        return int(step.item())

    def _signs(self) -> Iterator[str]:
        """Yield the meaning of the signs of elements that are no finite numbers."""
        span = self.picture.range
        if span.masked:
            yield "·: masked" if self.is_inked else "blank: masked"
        if span.nan:
            yield f"{self._sign(NAN, 'magenta')}: NaN, {plural(span.nan, 'element')}"
        if span.infinite:
            yield f"{self._sign(INFINITE, 'white')}: inf, {plural(span.infinite, 'element')}"

    def _sign(self, step: int, colour: str) -> str:
        """Return the sign of a step, with the name of its colour where there are colours."""
        swatch = self.swatch(step)
        return f"{swatch} {colour}" if self.is_inked else swatch

    def _notes(self, block: tuple[int, int]) -> Iterator[str]:
        """Yield how many elements a cell has, if it has several, and the notes of the picture."""
        picture = self.picture
        height, width = block
        if height > 1 or width > 1:
            _, rows, columns = picture.shape
            elements = f"{height} × {width} elements ({picture.rows.name} × {picture.columns.name})"
            yield f"Each cell is the largest of {elements}: {rows:,} × {columns:,} do not fit."
        yield from picture.notes

    def bar(self, room: int) -> str:
        """Return the colour scale, in at most so many columns."""
        if not self.is_inked:
            return RAMP
        size = max(min(BAR, room), 2)
        places = [place * self.count // size for place in range(size)]
        return self.pairs(places, places)

    def swatch(self, step: int) -> str:
        """Return a sample of a colour, two columns wide; its character if there are no colours."""
        if not self.is_inked:
            return _character(step)
        wide = [step, step]
        return self.pairs(wide, wide)


class _SmallDrawing(_Drawing):
    """A picture as one row of small panels."""

    def _has_room_for_wide_cells(self) -> bool:
        return False

    def _panels_in_a_row(self) -> int:
        count, _, _ = self.picture.shape
        fitting = self._width_of_panels() // (self.widest_name + GAP)
        return max(min(count, fitting), 1)

    def _most_cells(self) -> tuple[int, int]:
        across = max(min(self.room(self.beside), SMALL), 1)
        return (across, across) if self.is_inked else (across // 2 + 1, across)

    def lines(self) -> list[str]:
        """Return the title, as many panels as fit beside each other, and what is not drawn."""
        picture = self.picture
        values, block = reduced(picture.values, *self._most_cells())
        panels = steps(values[: self.beside], picture.scale, self.count).tolist()
        parts = [*self._scale(), *self._signs()]
        height, width = block
        if height > 1 or width > 1:
            parts.append(f"a cell: the largest of {height} × {width}")
        lines = self._joined(parts)
        lines += self.band(picture.panels[: self.beside], panels, block)
        if self.beside < len(picture.panels):
            lines.append(f"{self.beside} of {len(picture.panels)} heads fit; --picture draws all.")
        return lines


def number(value: float) -> str:
    """Return a number of the legend with four digits."""
    return f"{value:.4g}"


def _gutter(rows: PictureAxis, columns: PictureAxis, height: int) -> int:
    """Return the columns left of the panels: room for the row numbers, the row labels and both names."""
    last_number = str(height - 1)
    # An arrow follows each name.
    widths = [len(last_number), cells(rows.name) + 2, cells(columns.name) + 2]
    for label in rows.labels:
        widths.append(min(cells(label), WIDEST_LABEL))
    return max(widths) + 1


def _character(step: int) -> str:
    """Return the character of a cell without colours."""
    return RAMP[step] if step >= 0 else _INKLESS[step]


def _width(text: str) -> int:
    """Return the columns of a text with escape sequences."""
    shown = _ESCAPE.sub("", text)
    return cells(shown)


def _padded(text: str, width: int) -> str:
    """Return the text with spaces up to a width."""
    missing = width - _width(text)
    return text + " " * missing


def _label(labels: tuple[str, ...], cell: int, size: int) -> str:
    """Return the label of a cell: the first label of several, with an ellipsis; empty if there is none."""
    place = cell * size
    if place >= len(labels):
        return ""
    return f"{labels[place]}…" if size > 1 else labels[place]


def _across(axis: PictureAxis, count: int, size: int, zoom: int) -> list[str]:
    """Return the lines below a panel: numbers with enough distance, or labels downwards, one character in a line."""
    if axis.labels:
        labels = [_label(axis.labels, cell, size) for cell in range(count)]
        return _downwards(labels, zoom)
    last_number = str((count - 1) * size)
    distance = _distance(len(last_number) + 1, zoom)
    if distance is None:
        distance = max(count, 1)
    line = ""
    for cell in range(0, count, distance):
        text = str(cell * size)
        start = cell * zoom
        if start + len(text) <= count * zoom:
            line = line.ljust(start) + text
    return [line]


def _downwards(labels: Iterable[str], zoom: int) -> list[str]:
    """Return the lines of labels that are written downwards, each in the columns of a cell."""
    columns = []
    for label in labels:
        column = []
        for character in _cut(label, LONGEST_LABEL * 2):
            width = cells(character)
            # A dot replaces a character that is too wide; one without a width belongs to the one before it.
            if width > zoom:
                column.append("·")
            elif width:
                column.append(character)
        columns.append(column[:LONGEST_LABEL])
    lines = []
    for row in zip_longest(*columns, fillvalue=" "):
        padded = [_padded(character, zoom) for character in row]
        lines.append("".join(padded))
    return lines


def _distance(widest: int, zoom: int) -> int | None:
    """Return the cells between two column numbers, so that the widest fits; None if no round number is enough."""
    for distance in (1, 2, 4, 5, 8, 10, 16, 20, 32):
        if distance * zoom >= widest:
            return distance
    return None


def _cut(text: str, room: int) -> str:
    """Return the text cut to `room` columns, with an ellipsis if it was longer."""
    if cells(text) <= room:
        return text
    end = fitting(text, room - 1)
    return text[:end] + "…"
