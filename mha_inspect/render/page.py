"""A page as plain data: sections of tables, facts, paragraphs and verbatim text, before any format.

A report becomes a page once; terminal, plain and html all show that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, TypeAlias

from ..text import printable

Tone = Literal["", "strong", "muted", "axes", "shape", "good", "bad", "warn"]
"""The role of a text, from which a renderer may choose a colour. No meaning depends on the colour alone."""

WIDE, FULL_WIDTH = 110, 120
"""Page widths from which every column of a table, and every text in full, is shown."""

LONGEST = 1000
"""Most characters of a table field, and a quarter of those of a sentence. A longer text loses its middle."""


@dataclass(frozen=True)
class Cell:
    """One field of a table."""

    text: str
    tone: Tone = ""
    """Empty: the column's tone."""
    axes: str = ""
    """For a shape: the names of its dimensions, so that both get the same colours."""
    mark: str = ""
    """A sign after the text, explained under the table."""
    brief: str = ""
    """Replaces the text where the page has fewer than `FULL_WIDTH` columns; empty: the text is shown as it is."""

    @property
    def full(self) -> str:
        """Return the text and its mark."""
        return self.text + self.mark


@dataclass(frozen=True)
class Column:
    """One column of a table, and how it gives way on a narrow page."""

    title: str
    of: Callable[[Any], object]
    """Returns the content for an item: a cell, or any value to be shown as text."""
    align: Literal["left", "right"] = "left"
    tone: Tone = ""
    wide: bool = False
    """Shown only where the page has `WIDE` columns or more."""
    drop: int = 0
    """0: always shown. Else the highest number goes first, and the page says what went."""
    wrap: int = 0
    """0: kept on one line as long as possible. Else it may be wrapped between words down to this width."""
    into: str = ""
    """Title of the column under whose text this one is put, as a second line, before anything is dropped."""
    optional: bool = False
    """True: the column is dropped if every field is empty."""
    legend: str = ""
    """Explains its words under the table."""
    after: str | None = None
    """If given, a field is shown only where it differs from the row above; the first row is compared with this."""


@dataclass(frozen=True)
class Table:
    """Rows of fields."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    legend: str = ""
    """The meaning of the marks after its fields."""
    total: bool = False
    """Whether the last row sums up the others."""

    def explained(self, places: Iterable[int] | None = None) -> str:
        """Return the legend and the explanations of the columns at these places, by default of all; may be empty."""
        if places is None:
            places = range(len(self.columns))
        legends = [self.legend]
        for place in places:
            legends.append(self.columns[place].legend)
        return "; ".join(filter(None, legends))


@dataclass(frozen=True)
class Facts:
    """Lines of a label and a text."""

    items: tuple[tuple[str, str], ...]
    tone: Tone = ""
    """The tone of the texts."""


@dataclass(frozen=True)
class Paragraph:
    """One sentence or several."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Verbatim:
    """Preformatted text: the content of a tensor, or a patch."""

    lines: tuple[str, ...]
    title: str = ""
    shape: str = ""
    axes: str = ""

    @property
    def has_heading(self) -> bool:
        """Whether a line is above the text."""
        return bool(self.title or self.shape or self.axes)

    def tone_of(self, line: str) -> Tone:
        """Return the tone of a line of a patch: of what it takes out or puts in; empty for other lines."""
        if self.has_heading or line.startswith(("---", "+++")):
            return ""
        tones: dict[str, Tone] = {"-": "bad", "+": "good"}
        return tones.get(line[:1], "")


Block: TypeAlias = Table | Facts | Paragraph | Verbatim


@dataclass(frozen=True)
class Section:
    """A part of the page, with a title or, as a continuation, without."""

    title: str
    blocks: tuple[Block, ...]
    detail: str = ""
    """Text after the title, on the same line."""
    more: str | None = None
    """None: always shown. Else a terminal that is too low shows this line instead; no line where it is empty."""
    brief: tuple[Block, ...] = ()
    """What a terminal that is too low shows, in the place of all blocks and of `more`."""


@dataclass(frozen=True)
class Page:
    """The page. When it is made, its texts are cleaned, so that no renderer can forget to, and empty sections go."""

    title: str
    detail: str
    subtitle: str
    sections: tuple[Section, ...]
    verdict: Paragraph | None = None
    """The first line, and on a terminal the last one too if the page is longer than the screen."""
    fix: str = ""
    """How to fix what the verdict says first; after the verdict where that is repeated."""

    def __post_init__(self) -> None:
        filled = [section for section in self.sections if section.blocks or section.title]
        vars(self)["sections"] = tuple(filled)
        _cleaned(self, 0)


def _cleaned(value: Any, longest: int) -> Any:
    """Return a part of a page with every text printable and of limited length."""
    if isinstance(value, str):
        return printable(value, longest)
    if isinstance(value, tuple):
        return tuple(_cleaned(item, longest) for item in value)
    if is_dataclass(value):
        fields = vars(value)
        longest = LONGEST if isinstance(value, (Cell, Column)) else 4 * LONGEST
        for name, item in fields.items():
            if item:
                fields[name] = _cleaned(item, longest)
    return value


def table(items: Iterable[Any], columns: Sequence[Column], *, legend: str = "", total: bool = False) -> Table:
    """Return a table with a row for each item, without optional columns that are empty."""
    items = list(items)
    shown, fields = [], []
    for column in columns:
        cells = _cells(items, column)
        if not column.optional or any(cell.text for cell in cells):
            shown.append(column)
            fields.append(cells)
    rows = zip(*fields, strict=True)
    return Table(tuple(shown), tuple(rows), legend, total)


def _cells(items: Iterable[Any], column: Column) -> list[Cell]:
    """Return the fields of a column; where only differences are shown, those like the field above are empty."""
    cells: list[Cell] = []
    above = None if column.after is None else Cell(column.after)
    for value in map(column.of, items):
        cell = value if isinstance(value, Cell) else Cell(str(value))
        cells.append(Cell("") if cell == above else cell)
        if column.after is not None:
            above = cell
    return cells


def facts(*items: tuple[str, str], tone: Tone = "") -> Facts:
    """Return lines of a label and a text."""
    return Facts(items, tone)


def section(title: str, *blocks: Block, detail: str = "", more: str | None = None) -> Section:
    """Return a part of the page; `title` may be empty."""
    return Section(title, blocks, detail, more)


def apart(before: Block | None, block: Block) -> bool:
    """Return whether a blank line stands between two blocks: around tables and verbatim text."""
    if isinstance(block, (Table, Verbatim)):
        return True
    return isinstance(before, (Table, Verbatim))


AXES = ("heads", "kv_heads", "query", "key", "head_dim")
"""Axes whose names and sizes are coloured."""


def by_axis(content: str, tone: Tone, axes: str) -> Iterator[tuple[str, str]]:
    """Yield axes, or a shape with known axes, as pieces of text, each with its axis; empty for other text.

    `[2, 12]` of `heads query` is `[`, `2` of heads, `, `, `12` of query, `]`.
    """
    done = 0
    for piece, name in _pieces(content, tone, axes):
        if name in AXES:
            yield content[done : piece.start()], ""
            yield piece[0], name
            done = piece.end()
    yield content[done:], ""


def _pieces(content: str, tone: Tone, axes: str) -> list[tuple[re.Match[str], str]]:
    """Return the names in axes, or the sizes in a shape, each with its axis; none if the shape has other axes."""
    if tone == "axes":
        return [(name, name[0]) for name in re.finditer(r"\w+", content)]
    if tone == "shape":
        sizes = [*re.finditer(r"\d+", content)]
        names = re.findall(r"\([^)]*\)|\S+", axes)
        if len(sizes) == len(names):
            return [*zip(sizes, names, strict=True)]
    return []
