"""A page as plain data: sections of tables, facts, paragraphs and verbatim text, before any format.

A report becomes a page once; terminal, plain and html all show that. Every string is cleaned in one place, when the
page is made, so that no renderer can forget to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, TypeAlias

from ..text import printable

Tone = Literal["", "strong", "muted", "axes", "shape", "good", "bad", "warn"]
"""What a piece of text is, from which a renderer may choose a colour. Meaning never hangs on it alone."""

LONGEST = 1000
"""Characters of a field of a table, and a quarter of those of a sentence. No name that anybody gave has so many; one
that does loses its middle, but in JSON."""


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


@dataclass(frozen=True)
class Table:
    """Rows of fields."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    legend: str = ""
    """What the marks behind its fields mean."""
    total: bool = False
    """Whether the last row sums up the others."""
    split: bool = False
    """Where it is too wide: whether it is cut into several tables, each with the first column again."""


@dataclass(frozen=True)
class Facts:
    """Lines of a label and what it stands for."""

    items: tuple[tuple[str, str], ...]
    tone: Tone = ""
    """That of what the labels stand for."""


@dataclass(frozen=True)
class Paragraph:
    """A sentence or a few."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Verbatim:
    """Text whose line breaks are its own: the content of a tensor."""

    lines: tuple[str, ...]
    title: str = ""
    shape: str = ""
    axes: str = ""


Block: TypeAlias = Table | Facts | Paragraph | Verbatim


@dataclass(frozen=True)
class Section:
    """A part of the page under a title; without one it goes on from the part before."""

    title: str
    blocks: tuple[Block, ...]
    detail: str = ""
    """What is said behind the title on the same line."""


@dataclass(frozen=True)
class Page:
    """The page. It is cleaned, and sections with nothing in them are taken out, when it is made."""

    title: str
    detail: str
    subtitle: str
    sections: tuple[Section, ...]

    def __post_init__(self) -> None:
        sections = tuple(section for section in self.sections if section.blocks or section.title)
        vars(self).update(sections=sections)
        _clean(self)


def _clean(part: Any) -> None:
    """Make every text of a part of a page printable, and none of them endless."""
    longest = LONGEST if isinstance(part, (Cell, Column)) else 4 * LONGEST
    for field in fields(part):
        value = getattr(part, field.name)
        if value and isinstance(value, (str, tuple)):
            vars(part)[field.name] = _cleaned(value, longest)


def _cleaned(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return printable(value, longest)
    if isinstance(value, tuple):
        return tuple(_cleaned(item, longest) for item in value)
    if is_dataclass(value):
        _clean(value)
    return value


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[object]],
    *,
    legend: str = "",
    total: bool = False,
    split: bool = False,
) -> Table:
    """Return a table, without optional columns that are empty. With a `total` the last row sums up the others.

    What stands in a field is a cell, or anything that is written as a text.
    """
    cells = [tuple(field if isinstance(field, Cell) else Cell(str(field)) for field in row) for row in rows]
    kept = [i for i, column in enumerate(columns) if not column.optional or any(row[i].text for row in cells)]
    shown = tuple(tuple(row[i] for i in kept) for row in cells)
    return Table(tuple(columns[i] for i in kept), shown, legend, total, split)


def facts(*items: tuple[str, str], tone: Tone = "") -> Facts:
    """Return lines of a label and what it stands for; of one alone a sentence with what it is about before it."""
    return Facts(items, tone)


def section(title: str, *blocks: Block, detail: str = "") -> Section:
    """Return a part of the page; `title` may be empty."""
    return Section(title, blocks, detail)


def apart(before: Block | None, block: Block) -> bool:
    """Return whether a blank line stands between two blocks: around tables and verbatim text."""
    return isinstance(block, (Table, Verbatim)) or isinstance(before, (Table, Verbatim))


AXES = ("heads", "kv_heads", "query", "key", "head_dim")
"""Axes that have a colour of their own, in their names and in their sizes. Every other one has none."""


def by_axis(content: str, tone: Tone, axes: str) -> Iterator[tuple[str, str]]:
    """Cut axes, or a shape whose axes are known, into pieces of text, each with the axis that it is; else empty."""
    pieces = list(re.finditer({"axes": r"\w+", "shape": r"\d+"}.get(tone, "(?!)"), content))
    names = [piece[0] for piece in pieces] if tone == "axes" else re.findall(r"\([^)]*\)|\S+", axes)
    done = 0
    for name, piece in zip(names, pieces, strict=True) if len(names) == len(pieces) else ():
        if name in AXES:
            yield content[done : piece.start()], ""
            yield piece[0], name
            done = piece.end()
    yield content[done:], ""
