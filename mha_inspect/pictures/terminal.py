"""Draw pictures as text: two rows in a line with colours, or characters with more and more ink without colours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from textwrap import wrap

import numpy as np

from ..text import cells, fitting, plural
from .grid import RAMP, SPECIAL, Depth, Picture, PictureAxis, codes, reduced, steps

WIDTH = 80
"""Columns of the page if its width is unknown."""
GAP = 2
"""Columns between two panels."""
SIDE = 22
"""The least columns of a panel beside others."""
LARGE = 16
"""Up to this many rows and columns, each cell is two columns wide and a line high, if there is room."""
WIDEST_LABEL, LONGEST_LABEL = 12, 6
"""The most characters of a label beside a row, and below a column."""
BAR = 24
"""The most columns of the colour scale in the legend."""

_RESET = "\x1b[0m"
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")
_MASKED, _NAN, _INFINITE, _NONE = -1, -2, -3, -9
"""Steps without a colour; the last is below the last row."""
_INKLESS = {_MASKED: " ", _NAN: "?", _INFINITE: "!"}
_TICK = 4
"""Lines between two row numbers."""


def draw(picture: Picture, *, width: int | None = None, depth: Depth = "none") -> str:
    """Return the picture as lines of at most `width` columns; the text ends with a line feed.

    Masked cells have no colour: a dot if both cells of a character are masked, and blank without colours.
    """
    lines = _Drawing(picture, WIDTH if width is None else max(width, 20), depth).lines()
    return "\n".join(line.rstrip(" ") for line in lines) + "\n"


class _Drawing:
    """A picture at a given width and number of colours."""

    def __init__(self, picture: Picture, width: int, depth: Depth) -> None:
        self.picture, self.width, self.depth = picture, width, depth
        self.codes = () if depth == "none" else codes(picture.signed, depth)
        self.count = len(self.codes or RAMP)
        """Number of steps of the colour map."""
        (count, height, across), rows, columns = picture.shape, picture.rows, picture.columns
        ticks = [len(str(height - 1)), *(min(cells(label), WIDEST_LABEL) for label in rows.labels)]
        self.gutter = max(*ticks, cells(rows.name) + 2, cells(columns.name) + 2) + 1
        self.widest_name = max(map(cells, picture.panels))
        # A cell is two columns wide if the picture is small, or has labels, which need room.
        named, is_inked = bool(rows.labels or columns.labels), depth != "none"
        beside = count if is_inked and not named else 1
        limit = 2 * LARGE if named else LARGE
        self.zoom = 2 if max(height, across) <= limit and 2 * across <= self.room(beside) else 1
        self.is_tall = self.zoom > 1 or not is_inked
        """Whether a cell is a whole line high instead of half a line."""
        side = max(2 * across if self.zoom > 1 else min(across, SIDE), self.widest_name)
        fit = (width - self.gutter + GAP) // (side + GAP)
        self.beside = max(min(count, fit), 1)
        """Number of panels in a row."""

    def room(self, beside: int) -> int:
        return (self.width - self.gutter + GAP) // beside - GAP

    def lines(self) -> list[str]:
        count, rows, _ = self.picture.shape
        across = (self.width - self.gutter - GAP * (self.beside - 1)) // self.beside // self.zoom
        # One panel alone may be as wide as the page, and about as high as a screen.
        across = max(min(across, 3 * SIDE if count == 1 else 2 * SIDE), 1)
        # A character is twice as high as it is wide.
        down = across if self.depth != "none" or rows <= across else max(across // 2, 1)
        values, block = reduced(self.picture.values, down, across)
        panels = steps(values, self.picture.scale, self.count).tolist()
        lines: list[str] = []
        for first in range(0, len(panels), self.beside):
            names = self.picture.panels[first : first + self.beside]
            lines += [*self.band(names, panels[first : first + self.beside], block), ""]
        return [*lines, *self.legend(block)]

    def band(self, names: Sequence[str], panels: Sequence[list[list[int]]], block: tuple[int, int]) -> list[str]:
        """Return panels in a row, between their names and the numbers or labels of their columns."""
        rows, columns = self.picture.rows, self.picture.columns
        count = len(panels[0][0])
        across = max(count * self.zoom, min(self.widest_name, self.room(self.beside)))

        def line(left: str, parts: Iterable[str]) -> str:
            padded = (part + " " * (across - cells(_ESCAPE.sub("", part))) for part in parts)
            return " " * (self.gutter - 1 - cells(left)) + left + " " + (" " * GAP).join(padded)

        lines = [line(f"{rows.name} ↓", (_cut(name, across) for name in names))]
        bodies = [self.panel(panel) for panel in panels]
        for number, parts in enumerate(zip(*bodies, strict=True)):
            row = number if self.is_tall else 2 * number
            tick = _cut(_label(rows.labels, row, block[0]), WIDEST_LABEL) if rows.labels else str(row * block[0])
            has_tick = rows.labels or number % _TICK == 0 or len(bodies[0]) <= _TICK
            lines.append(line(tick if has_tick else "", parts))
        for number, ticks in enumerate(_across(columns, count, block[1], self.zoom)):
            lines.append(line(f"{columns.name} →" if number == 0 else "", [ticks] * len(panels)))
        return lines

    def panel(self, rows: list[list[int]]) -> list[str]:
        if self.depth == "none":
            return ["".join((RAMP[s] if s >= 0 else _INKLESS[s]) * self.zoom for s in row) for row in rows]
        if self.zoom > 1:
            wide = [[step for step in row for _ in range(2)] for row in rows]
            return [self.pairs(row, row) for row in wide]
        return [self.pairs(*pair) for pair in zip_longest(rows[::2], rows[1::2], fillvalue=[_NONE] * len(rows[0]))]

    def pairs(self, upper: Sequence[int], lower: Sequence[int]) -> str:
        """Return one line of two rows; both are the same row if a cell is a line high."""
        parts, before = [], ""
        for above, below in zip(upper, lower, strict=True):
            style, character = self.character(above, below)
            if style != before:
                # Reset first: the previous style may set more than this one.
                parts.append(f"\x1b[0;{style}m" if style else _RESET)
                before = style
            parts.append(character)
        return "".join([*parts, _RESET] if before else parts)

    def character(self, above: int, below: int) -> tuple[str, str]:
        """Return the style and the character of two cells, one above the other."""
        upper, lower = (self.codes[step] if step >= 0 else SPECIAL[self.depth].get(step, "") for step in (above, below))
        if not upper and not lower:
            return "", "·" if _MASKED in (above, below) else " "
        if not upper or not lower:
            return f"38;{upper or lower}", "▀" if upper else "▄"
        if above == below and above in (_NAN, _INFINITE):  # different characters, not only different colours
            return f"38;5;16;48;{upper}", "×" if above == _NAN else "+"
        return f"38;{upper};48;{lower}", "▀"

    def legend(self, block: tuple[int, int]) -> list[str]:
        """Return the meaning of the colours, and the notes."""
        picture, span = self.picture, self.picture.range
        (low, high), title, is_inked = picture.scale, picture.title, self.depth != "none"
        if span.nan + span.infinite + span.masked == picture.values.size:
            parts = [f"{title}: every element is masked, NaN or inf"]
        elif low == high:
            step = int(steps(np.full((1, 1, 1), low, np.float32), picture.scale, self.count)[0, 0, 0])
            parts = [f"{title}: every number is {number(low)} {self.swatch(step)}"]
        else:
            ends = f"{number(low)} ", f" {number(high)}"
            room = self.width - sum(map(cells, ends))
            beside = cells(title) + 2
            # A long title goes above the colour scale.
            is_beside = room - beside >= BAR // 2
            bar = self.bar(room - beside if is_beside else room).join(ends)
            parts = [f"{title}  {bar}"] if is_beside else [title, bar]
            parts += [f"from {number(span.least)} to {number(span.most)}"] if picture.signed else []
        parts += [f"{'·' if is_inked else 'blank'}: masked"] if span.masked else []
        odd = (span.nan, _NAN, " magenta", "NaN"), (span.infinite, _INFINITE, " white", "inf")
        for count, step, colour, name in odd:
            if count:
                parts.append(f"{self.swatch(step)}{colour if is_inked else ''}: {name}, {plural(count, 'element')}")
        notes = list(picture.notes)
        if block != (1, 1):
            _, rows, columns = picture.shape
            size = f"{block[0]} × {block[1]} elements ({picture.rows.name} × {picture.columns.name})"
            notes.insert(0, f"Each cell is the largest of {size}: {rows:,} × {columns:,} do not fit.")
        lines: list[str] = []
        for part in parts:
            if lines and cells(_ESCAPE.sub("", f"{lines[-1]}   {part}")) <= self.width:
                lines[-1] += f"   {part}"
            else:
                lines.append(part)
        return [*lines, *(line for note in notes for line in wrap(note, self.width))]

    def bar(self, room: int) -> str:
        if self.depth == "none":
            return RAMP
        size = max(min(BAR, room), 2)
        places = [place * self.count // size for place in range(size)]
        return self.pairs(places, places)

    def swatch(self, step: int) -> str:
        if self.depth == "none":
            return RAMP[step] if step >= 0 else _INKLESS[step]
        return self.pairs([step, step], [step, step])


def number(value: float) -> str:
    """Return a number of the legend with four digits."""
    return f"{value:.4g}"


def _label(labels: tuple[str, ...], cell: int, size: int) -> str:
    """Return the label of a cell: the first label of several, with an ellipsis; empty if there is none."""
    return labels[cell * size] + ("…" if size > 1 else "") if cell * size < len(labels) else ""


def _across(axis: PictureAxis, count: int, size: int, zoom: int) -> list[str]:
    """Return the lines below a panel: numbers with enough distance, or labels downwards, one character in a line."""
    if axis.labels:
        names = [_cut(_label(axis.labels, cell, size), LONGEST_LABEL * 2) for cell in range(count)]
        # A dot replaces a character that is too wide.
        columns = [[c if cells(c) <= zoom else "·" for c in name if cells(c)][:LONGEST_LABEL] for name in names]
        rows = zip_longest(*columns, fillvalue=" ")
        return ["".join(c + " " * (zoom - cells(c)) for c in row) for row in rows]
    widest = len(str((count - 1) * size)) + 1
    apart = next((n for n in (1, 2, 4, 5, 8, 10, 16, 20, 32) if n * zoom >= widest), max(count, 1))
    line = ""
    for cell in range(0, count, apart):
        text = str(cell * size)
        if cell * zoom + len(text) <= count * zoom:
            line = line.ljust(cell * zoom) + text
    return [line]


def _cut(text: str, room: int) -> str:
    """Return the text cut to `room` columns, with an ellipsis if it was longer."""
    return text if cells(text) <= room else text[: fitting(text, room - 1)] + "…"
