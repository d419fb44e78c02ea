"""A page as plain data: sections of tables, facts, paragraphs and verbatim text, before any format.

A report becomes a page once; terminal, plain, svg and html all show that. Every string is cleaned when it
enters, so that no renderer can forget to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..text import printable, printable_lines

Tone = Literal["", "strong", "muted", "axes", "shape", "good", "bad", "warn"]
"""What a piece of text is, from which a renderer may choose a colour. Meaning never hangs on it alone."""


LONGEST = 1000
"""Characters of one field. No name that anybody gave has so many; one that does loses its middle, but in JSON."""


def _set(block: object, name: str, value: object) -> None:
    object.__setattr__(block, name, value)


@dataclass(frozen=True)
class Cell:
    """One field of a table."""

    text: str
    tone: Tone = ""
    """Empty: that of its column."""
    axes: str = ""
    """For a shape: what its dimensions are, so that both can be shown in the same colours."""
    mark: str = ""
    """A sign behind the text that a line under the table explains."""

    def __post_init__(self) -> None:
        _set(self, "text", printable(self.text, LONGEST))
        _set(self, "axes", printable(self.axes, LONGEST))
        _set(self, "mark", printable(self.mark, LONGEST))

    @property
    def full(self) -> str:
        """Return the text and its mark."""
        return f"{self.text} {self.mark}" if self.mark else self.text


@dataclass(frozen=True)
class Column:
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

    def __post_init__(self) -> None:
        _set(self, "title", printable(self.title, LONGEST))


@dataclass(frozen=True)
class Table:
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
        _set(self, "legend", printable(self.legend, LONGEST))
        kept = [i for i, c in enumerate(self.columns) if not c.optional or any(row[i].text for row in self.rows)]
        _set(self, "columns", tuple(self.columns[i] for i in kept))
        _set(self, "rows", tuple(tuple(row[i] for i in kept) for row in self.rows))


def table(
    columns: Iterable[Column],
    rows: Iterable[Iterable[Cell | str]],
    *,
    legend: str = "",
    total: bool = False,
    split: bool = False,
) -> Table:
    """Return a table whose fields may be bare strings."""
    made = tuple(tuple(f if isinstance(f, Cell) else Cell(f) for f in row) for row in rows)
    return Table(tuple(columns), made, legend, total, split)


@dataclass(frozen=True)
class Facts:
    """Lines of a label and what it stands for."""

    items: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        _set(
            self,
            "items",
            tuple((printable(label, LONGEST), printable(text, 4 * LONGEST)) for label, text in self.items),
        )


@dataclass(frozen=True)
class Paragraph:
    """A sentence or a few."""

    text: str
    tone: Tone = ""
    label: str = ""
    """What it is about, set before it and apart from it."""

    def __post_init__(self) -> None:
        _set(self, "text", printable(self.text, 4 * LONGEST))
        _set(self, "label", printable(self.label, LONGEST))


@dataclass(frozen=True)
class Verbatim:
    """Text whose line breaks are its own: the content of a tensor."""

    text: str
    title: str = ""
    shape: str = ""
    axes: str = ""

    def __post_init__(self) -> None:
        _set(self, "text", printable_lines(self.text))
        for name in ("title", "shape", "axes"):
            _set(self, name, printable(getattr(self, name), LONGEST))


Block: TypeAlias = Table | Facts | Paragraph | Verbatim


@dataclass(frozen=True)
class Section:
    """A part of the page under a title; without one it goes on from the part before."""

    blocks: tuple[Block, ...]
    title: str = ""
    detail: str = ""
    """What is said behind the title on the same line."""

    def __post_init__(self) -> None:
        _set(self, "title", printable(self.title, LONGEST))
        _set(self, "detail", printable(self.detail, LONGEST))


@dataclass(frozen=True)
class Page:
    """The page."""

    title: str
    detail: str
    subtitle: str
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        for name in ("title", "detail", "subtitle"):
            _set(self, name, printable(getattr(self, name), LONGEST))


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
