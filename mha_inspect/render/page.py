"""A page as plain data: sections of tables, facts, paragraphs and verbatim text, before any format.

A report becomes a page once; terminal, plain, svg and html all show that. Every string is cleaned when it
enters, so that no renderer can forget to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, TypeVar

from ..text import printable, printable_lines

T = TypeVar("T")
Tone = Literal["", "strong", "muted", "axes", "shape", "good", "bad", "warn"]
"""What a piece of text is, from which a renderer may choose a colour. Meaning never hangs on it alone."""


LONGEST = 1000
"""Characters of one field. No name that anybody gave has so many; one that does loses its middle, but in JSON."""


def _set(block: object, name: str, value: object) -> None:
    object.__setattr__(block, name, value)


class _Cleaned:
    """A part of a page, whose texts are printable, and none of them endless, from the moment that it is made."""

    longest: ClassVar[int] = LONGEST

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value and isinstance(value, str) and (cleaned := printable(value, self.longest)) != value:
                _set(self, name, cleaned)


@dataclass(frozen=True)
class Cell(_Cleaned):
    """One field of a table."""

    text: str
    tone: Tone = ""
    """Empty: that of its column."""
    axes: str = ""
    """For a shape: what its dimensions are, so that both can be shown in the same colours."""
    mark: str = ""
    """A sign behind the text that a line under the table explains."""

    @property
    def full(self) -> str:
        """Return the text and its mark."""
        return f"{self.text} {self.mark}" if self.mark else self.text


@dataclass(frozen=True)
class Column(_Cleaned):
    """One column of a table, and what may happen to it where the page is narrow."""

    title: str
    align: Literal["left", "right"] = "left"
    tone: Tone = ""
    drop: int = 0
    """0: always shown. Else the highest number goes first, and the page says what went."""
    wrap: int = 0
    """0: kept on one line as long as possible. Else it may be wrapped between words down to this width."""
    into: str = ""
    """Title of the column under whose text this one is put, as a second line, before anything is dropped."""
    optional: bool = False
    """Left out where every field is empty."""


@dataclass(frozen=True)
class Table(_Cleaned):
    """Rows of fields. Empty optional columns are taken out when it is made."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    legend: str = ""
    """What the marks behind its fields mean."""
    total: bool = False
    """Whether the last row sums up the others."""
    split: bool = False
    """Where it is too wide: whether it is cut into several tables, each with the first column again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = [i for i, c in enumerate(self.columns) if not c.optional or any(row[i].text for row in self.rows)]
        _set(self, "columns", tuple(self.columns[i] for i in kept))
        _set(self, "rows", tuple(tuple(row[i] for i in kept) for row in self.rows))


Field: TypeAlias = Cell | str | int
"""What stands in a field, be it bare."""


def table(
    items: Iterable[T],
    *columns: tuple[Column, Callable[[T], Field]],
    legend: str = "",
    total: Sequence[Field] = (),
    split: bool = False,
) -> Table:
    """Return a table with a row an item; each column comes with what stands in it of one item.

    `total` is a row under the others that sums them up.
    """
    rows: list[Sequence[Field]] = [[field(item) for _, field in columns] for item in items]
    rows += [total] if total else []
    cells = tuple(tuple(f if isinstance(f, Cell) else Cell(str(f)) for f in row) for row in rows)
    return Table(tuple(column for column, _ in columns), cells, legend, bool(total), split)


@dataclass(frozen=True)
class Facts:
    """Lines of a label and what it stands for."""

    items: tuple[tuple[str, str], ...]
    tone: Tone = ""
    """That of what the labels stand for."""

    def __post_init__(self) -> None:
        items = ((printable(label, LONGEST), printable(text, 4 * LONGEST)) for label, text in self.items)
        _set(self, "items", tuple(items))


def facts(*items: tuple[str, str], tone: Tone = "") -> Facts:
    """Return lines of a label and what it stands for; of one alone a sentence with what it is about before it."""
    return Facts(items, tone)


@dataclass(frozen=True)
class Paragraph(_Cleaned):
    """A sentence or a few."""

    longest = 4 * LONGEST
    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Verbatim(_Cleaned):
    """Text whose line breaks are its own: the content of a tensor."""

    text: str
    title: str = ""
    shape: str = ""
    axes: str = ""

    def __post_init__(self) -> None:
        lines = printable_lines(self.text)
        super().__post_init__()
        _set(self, "text", lines)


Block: TypeAlias = Table | Facts | Paragraph | Verbatim


def apart(before: Block | None, block: Block) -> bool:
    """Return whether a blank line stands between two blocks: around tables and verbatim text."""
    return isinstance(block, (Table, Verbatim)) or isinstance(before, (Table, Verbatim))


@dataclass(frozen=True)
class Section(_Cleaned):
    """A part of the page under a title; without one it goes on from the part before."""

    title: str
    blocks: tuple[Block, ...]
    detail: str = ""
    """What is said behind the title on the same line."""


def section(title: str, *blocks: Block, detail: str = "") -> Section:
    """Return a part of the page; `title` may be empty."""
    return Section(title, blocks, detail)


@dataclass(frozen=True)
class Page(_Cleaned):
    """The page. Sections with nothing in them are taken out when it is made."""

    title: str
    detail: str
    subtitle: str
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "sections", tuple(section for section in self.sections if section.blocks or section.title))


AXES = ("heads", "kv_heads", "query", "key", "head_dim")
"""Axes that have a colour of their own, in their names and in their sizes. Every other one has none."""


def by_axis(content: str, tone: Tone, axes: str) -> Iterator[tuple[str, str]]:
    """Cut axes, or a shape whose axes are known, into pieces of text, each with the axis that it is; else empty."""
    names: list[str] = []
    found: list[re.Match[str]] = []
    if tone == "axes":
        found = list(re.finditer(r"\w+", content))
        names = [word[0] for word in found]
    elif tone == "shape":
        found = list(re.finditer(r"\d+", content))
        names = re.findall(r"\([^)]*\)|\S+", axes)
    done = 0
    for name, piece in zip(names, found, strict=True) if len(names) == len(found) else ():
        if name in AXES:
            yield content[done : piece.start()], ""
            yield piece[0], name
            done = piece.end()
    yield content[done:], ""
