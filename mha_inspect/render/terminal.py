"""Tables for a terminal, as lines of text with their styles."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import TypeAlias

from ..text import cells, fitting
from .layout import GAP, Layout, breaks, layouts, pieces
from .page import Block, Cell, Facts, Page, Paragraph, Table, Tone, Verbatim, apart, by_axis

Line: TypeAlias = "list[tuple[str, str]]"
"""Pieces of text, each with its style: the numbers that a terminal is told, as `1;31`."""

PROSE_WIDTH = 110
"""Sentences are not set wider than they are easy to read."""
_BOLD, _DIM = "1", "2"

# Of the sixteen colours, which follow the palette that the reader has chosen, those that no common one makes pale:
# yellow is on white, and bright black vanishes on black. No meaning hangs on a colour alone.
STYLES: dict[Tone, str] = {"strong": _BOLD, "muted": _DIM, "good": "32", "bad": "1;31", "warn": "31"}
AXIS_STYLES = {"heads": "35", "kv_heads": "35", "query": "36", "key": "34", "head_dim": "32"}


def to_table(page: Page, *, width: int | None, color: bool) -> str:
    """Return the page for a terminal of that width; without colour there is no escape sequence in it."""
    columns = max(shutil.get_terminal_size().columns if width is None else width, 1)
    return "".join(_written(line, columns, color) + "\n" for line in _page(page, columns))


def _written(line: Line, width: int, color: bool) -> str:
    """Return a line without spaces at its end; what a page of a few columns has no room for is cut off."""
    text = _text(line)
    room = len(text[: fitting(text, width)].rstrip(" "))
    parts = []
    for piece, style in line:
        shown = piece[: max(room, 0)]
        room -= len(piece)
        parts.append(f"\x1b[{style}m{shown}\x1b[0m" if color and style and shown else shown)
    return "".join(parts)


def _page(page: Page, width: int) -> Iterator[Line]:
    prose = min(width, PROSE_WIDTH)
    yield from _titled(page.title, page.detail, prose)
    yield from _lines([(page.subtitle, _DIM)], prose)
    for section in page.sections:
        yield []
        if section.title:
            yield from _titled(section.title, section.detail, prose)
        before: Block | None = None
        for block in section.blocks:
            if apart(before, block) and (before is not None or section.title):
                yield []
            yield from _block(block, width, prose)
            before = block


def _titled(title: str, detail: str, width: int) -> list[Line]:
    return _lines([(title, _BOLD), (f"  {detail}" if detail else "", "")], width)


def _lines(line: Line, width: int) -> list[Line]:
    """Return the lines that a line takes."""
    text = _text(line)
    starts = [0, *breaks(text, width), len(text)]
    lines = []
    for start, end in pairwise(starts):
        stop, place, part = start + len(text[start:end].rstrip(" ")), 0, []
        for piece, style in line:
            part.append((piece[max(start - place, 0) : max(stop - place, 0)], style))
            place += len(piece)
        lines.append(part)
    return lines


def _text(line: Line) -> str:
    return "".join(piece for piece, _ in line)


def _block(block: Block, width: int, prose: int) -> Iterator[Line]:
    if isinstance(block, Table):
        for number, layout in enumerate(layouts(block, width)):
            yield from [[]] if number else []
            yield from _table(block, layout)
            if layout.dropped:
                yield from _lines([(f"no room at this width for: {', '.join(layout.dropped)}", _DIM)], width)
        if block.legend:
            yield from _lines([(block.legend, _DIM)], width)
    elif isinstance(block, Facts):
        yield from _facts(block, prose)
    elif isinstance(block, Paragraph):
        yield from _lines([(block.text, STYLES.get(block.tone, ""))], prose)
    else:
        yield from _verbatim(block, width)


def _facts(facts: Facts, width: int) -> Iterator[Line]:
    """Yield labels, and beside them sentences that wrap under themselves."""
    widest = [max((cells(item[side]) for item in facts.items), default=0) for side in (0, 1)]
    label_width = widest[0]
    if sum(widest) + GAP > width:
        label_width = min(label_width, max((width - GAP + 1) // 2, 1))
    room = max(width - label_width - GAP, 1)
    style = STYLES.get(facts.tone, "")
    for label, text in facts.items:
        labels, texts = _lines([(label, _DIM)], label_width), _lines([(text, style)], room)
        yield from _beside([labels, texts], [label_width, room], ["left", "left"])


def _beside(columns: Iterable[Sequence[Line]], widths: Sequence[int], aligns: Sequence[str]) -> Iterator[Line]:
    """Yield the lines of columns that stand side by side."""
    for parts in zip_longest(*columns, fillvalue=()):
        line: Line = []
        for place, (part, width, align) in enumerate(zip(parts, widths, aligns, strict=True)):
            spaces = (" " * (width - cells(_text(list(part)))), "")
            line += [(" " * GAP, "")] * bool(place) + ([spaces, *part] if align == "right" else [*part, spaces])
        yield line


def _table(table: Table, layout: Layout) -> Iterator[Line]:
    shown = [table.columns[column.index] for column in layout.columns]
    widths, aligns = [column.width for column in layout.columns], [column.align for column in shown]
    rule = [("─" * (sum(widths) + GAP * (len(widths) - 1)), _DIM)]
    titles = [Cell(column.title, "muted") for column in table.columns]
    for number, row in enumerate([titles, *table.rows]):
        is_total = table.total and number == len(table.rows)
        if number == 1 or is_total:
            yield rule
        columns = []
        for column, width in zip(layout.columns, widths, strict=True):
            cell, below = row[column.index], _behind([row[i].text for i in column.below])
            styled = _styled(cell.text, cell.tone or table.columns[column.index].tone, cell.axes, _BOLD * is_total)
            marked = [*styled, (f" {cell.mark}" if cell.mark else "", _DIM)]
            under = [[("  ", ""), (line, _DIM)] for line in pieces(below, width - 2)]
            columns.append([*_lines(marked, width), *under])
        if number == 0:  # titles stand on the rule
            high = max(map(len, columns))
            columns = [[[]] * (high - len(lines)) + lines for lines in columns]
        yield from _beside(columns, widths, aligns)


def _behind(texts: list[str]) -> str:
    """Return the texts of columns that share one line: the first, and the others behind it in brackets."""
    first, *others = [text for text in texts if text] or [""]
    return f"{first} ({', '.join(others)})" if others else first


def _styled(content: str, tone: Tone, axes: str, more: str = "") -> Line:
    """Return a text with the colours of its axes, in the style of its tone and `more`."""
    styles = [style for style in (more, STYLES.get(tone, "")) if style]
    pieces_of = by_axis(content, tone, axes)
    return [(piece, ";".join([*styles, AXIS_STYLES[axis]] if axis else styles)) for piece, axis in pieces_of]


def _verbatim(block: Verbatim, width: int) -> Iterator[Line]:
    heading = [(block.title, _BOLD)]
    heading += [("  ", ""), *_styled(block.shape, "shape", block.axes)] if block.shape else []
    heading += [("  ", ""), *_styled(block.axes, "axes", "")] if block.axes else []
    yield from _lines(heading, width)
    for line in block.lines:
        # A line that is too long goes on under its own first number, behind the brackets.
        opening = re.match(r"(?:tensor\()?[ \[]*", line)
        indent = min(opening.end() if opening else 0, max(width - 20, 0)) if len(line) > width else 0
        for number, part in enumerate(pieces(line[indent:], width - indent) or [""]):
            yield [(" " * indent if number else line[:indent], ""), (part, "")]
