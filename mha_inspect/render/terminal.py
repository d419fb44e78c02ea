"""Tables for a terminal. The only importer of Rich, with `screen`.

Text reaches Rich as `Text`, never as markup, and was cleaned when it entered the page. Rich wraps; which columns there
is room for, and how wide each is, is decided here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ..text import cells
from .page import FULL_WIDTH, WIDE, Block, Cell, Facts, Page, Paragraph, Section, Table, Tone, Verbatim, apart, by_axis

PROSE_WIDTH = 110
"""Widest line of a sentence that is easy to read."""
GAP = 2
"""Spaces between columns."""

# Of the sixteen colours, which follow the palette that the reader has chosen. Bright black vanishes on black. Yellow is
# pale on white, but the usual colour of what may be wrong. No meaning depends on a colour alone.
STYLES: dict[Tone, str] = {"strong": "bold", "muted": "dim", "good": "green", "bad": "bold red", "warn": "yellow"}

AXIS_STYLES = {"heads": "magenta", "kv_heads": "magenta", "query": "cyan", "key": "bright_blue", "head_dim": "green"}

_RULES = box.Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
"""A line under the titles and one above the total."""

_WHOLE = re.compile(r"(?:%\d+ )?\[[\d, ]*\]|× (?=\w)|(?:\d+: )?[\d.]+ %")
"""A shape, an operand with its shape, `%3 [2, 12, 256]`, `× noise` or a percentage: a word with spaces in it."""
_SPACE = "\ue000"
"""A space in such a word while Rich wraps. No text of a page has this character: it is not printable."""


def to_table(page: Page, *, width: int | None, color: bool, height: int | None = None) -> str:
    """Return the page for a terminal of that width, without escape sequences if `color` is False.

    A page of more than `height` lines, with one for the prompt, loses its blank lines; if it is still too long, it
    loses the sections that another option shows, and ends with the verdict. A height of None has no limit.
    """
    columns = max(shutil.get_terminal_size().columns if width is None else width, 1)
    for airy, whole in ((True, True), (False, True), (False, False)):
        shown = page if whole else _shortened(page)
        text = _text(columns, color, _page(shown, columns, airy=airy))
        if height is None or text.count("\n") < height:
            return text
    return text + _text(columns, color, _verdict(page, columns))


def _text(width: int, color: bool, lines: Iterable[tuple[RenderableType, int]]) -> str:
    file = StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    for line, columns in lines:
        console.print(line, width=columns, soft_wrap=False)
    return "\n".join(line.rstrip() for line in file.getvalue().replace(_SPACE, " ").split("\n"))


def _shortened(page: Page) -> Page:
    """Return the page without the sections that another option shows, each option named once, and the subtitle."""
    sections: list[Section] = []
    for part in page.sections:
        if part.more is None:
            sections.append(part)
        elif part.more and all(part.more != before.more for before in sections):
            sections.append(replace(part, title="", blocks=(Paragraph(part.more, "muted"),)))
    return replace(page, sections=tuple(sections), subtitle="")


def _page(page: Page, width: int, *, airy: bool) -> Iterator[tuple[RenderableType, int]]:
    """Yield each item to print with its width. An `airy` page has blank lines."""
    prose = min(width, PROSE_WIDTH)
    yield from _verdict(page, width)
    yield _title(page.title, page.detail), prose
    if page.subtitle:
        yield Text(page.subtitle, STYLES["muted"]), prose
    for section in page.sections:
        if airy:
            yield Text(), prose
        if section.title:
            yield _title(section.title, section.detail), prose
        before: Block | None = None
        for block in section.blocks:
            if airy and apart(before, block) and (before is not None or section.title):
                yield Text(), prose
            for item in _block(block, width, airy=airy):
                yield item, prose if isinstance(block, (Facts, Paragraph)) else width
            before = block


def _verdict(page: Page, width: int) -> Iterator[tuple[RenderableType, int]]:
    if page.verdict is not None:
        yield Text(page.verdict.text, STYLES.get(page.verdict.tone, ""), overflow="fold"), min(width, PROSE_WIDTH)


def _title(title: str, detail: str) -> Text:
    text = Text().append(title, "bold")
    return text.append(f"  {detail}") if detail else text


def _block(block: Block, width: int, *, airy: bool) -> Iterator[RenderableType]:
    if isinstance(block, Table):
        fit = _fitted(_brief(block) if width < FULL_WIDTH else block, width)
        yield _rows(fit, ruled=airy)
        said = airy or any(not column.wide for column in block.columns if column.title in fit.dropped)
        dropped = f"Not shown at this width: {', '.join(fit.dropped)}." if fit.dropped and said else ""
        if under := ". ".join(filter(None, (block.explained(fit.widths), dropped))):
            yield Text(under, STYLES["muted"])
    elif isinstance(block, Facts):
        # Sentences wrap beside their labels.
        grid = RichTable.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        grid.add_column(overflow="fold", no_wrap=False)
        grid.add_column(overflow="fold", ratio=1)
        for label, text in block.items:
            grid.add_row(Text(label, STYLES["muted"]), Text(text, STYLES.get(block.tone, "")))
        yield grid
    elif isinstance(block, Paragraph):
        yield Text(block.text, STYLES.get(block.tone, ""), overflow="fold")
    else:
        yield from _verbatim(block)


def _brief(table: Table) -> Table:
    rows = (tuple(replace(cell, text=cell.brief or cell.text) for cell in row) for row in table.rows)
    return replace(table, rows=tuple(rows))


@dataclass(frozen=True)
class _Fit:
    """How a table is shown. A column is the number of its place in the table."""

    table: Table
    widths: dict[int, int]
    """Width of each shown column."""
    below: dict[int, list[int]]
    """The columns that are put under each column."""
    dropped: list[str]
    """Titles of the columns that did not fit."""


def _fitted(table: Table, width: int) -> _Fit:
    """Return how to show a table: columns are first put under others, then dropped, then words are broken."""
    columns = table.columns
    shown = [place for place, column in enumerate(columns) if width >= WIDE or not column.wide]
    bodies = [max((cells(row[i].full) for row in table.rows), default=0) for i in range(len(columns))]
    words = [max((_longest_word(row[i].full) for row in table.rows), default=0) for i in range(len(columns))]
    below: dict[int, list[int]] = {}
    dropped = [columns[place].title for place in range(len(columns)) if place not in shown]
    while True:
        room = width - GAP * (len(shown) - 1)
        least = {i: max([_longest_word(columns[i].title), *(2 + words[j] for j in below.get(i, []))]) for i in shown}
        titles = {i: cells(columns[i].title) for i in shown}
        wraps = {i: max(min(columns[i].wrap or bodies[i], bodies[i]), words[i], least[i]) for i in shown}
        hosts = {columns[i].title: i for i in shown}
        guest = next((i for i in shown if columns[i].into in hosts), None)
        last = max(shown, key=lambda i: columns[i].drop)
        if sum(wraps.values()) <= room:
            whole = {i: max(wraps[i], titles[i]) for i in shown}
            least = wraps = whole if sum(whole.values()) <= room else wraps
            break
        if guest is not None:
            shown.remove(guest)
            below.setdefault(hosts[columns[guest].into], []).append(guest)
        elif columns[last].drop:
            shown.remove(last)
            dropped.insert(0, columns[last].title)
        else:
            wraps = {i: max(words[i], least[i]) for i in shown}
            wraps = wraps if sum(wraps.values()) <= room else dict.fromkeys(shown, 1)
            break
    widths = _narrowed({i: max(bodies[i], least[i]) for i in shown}, wraps, room)
    for host, guests in below.items():
        missing = sum(2 + bodies[guest] for guest in guests) - widths[host]
        widths[host] += max(min(missing, room - sum(widths.values())), 0)
    return _Fit(table, widths, below, dropped)


def _narrowed(widths: dict[int, int], floors: dict[int, int], room: int) -> dict[int, int]:
    """Narrow the widest column above its minimum, until all fit or all are at their minimum."""
    widths = dict(widths)
    while sum(widths.values()) > room and (givers := [i for i in widths if widths[i] > floors[i]]):
        widths[max(givers, key=lambda i: widths[i])] -= 1
    return widths


def _longest_word(text: str) -> int:
    return max(map(cells, _in_words(text).split()), default=0)


def _in_words(text: str) -> str:
    return _WHOLE.sub(lambda match: match[0].replace(" ", _SPACE), text)


def _rows(fit: _Fit, *, ruled: bool) -> RichTable:
    table = fit.table
    rows = RichTable(
        box=_RULES if ruled else None,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1) if ruled else (0, GAP, 0, 0),
        collapse_padding=True,
        border_style=STYLES["muted"],
        header_style="",
    )
    for place, width in fit.widths.items():
        column = table.columns[place]
        header = Text(_in_words(column.title), STYLES["muted"])
        if guests := fit.below.get(place):
            header.append(f"\n  {_behind([table.columns[guest].title for guest in guests])}")
        rows.add_column(header, justify=column.align, width=max(width, 1), overflow="fold")
    for number, row in enumerate(table.rows):
        is_total = table.total and number == len(table.rows) - 1
        if is_total:
            rows.add_section()
        fields = (_field(table, row, place, fit.below.get(place, [])) for place in fit.widths)
        rows.add_row(*fields, style="bold" if is_total else "")
    return rows


def _field(table: Table, row: tuple[Cell, ...], place: int, guests: Sequence[int]) -> RenderableType:
    """Return the field, with the fields of the columns below it."""
    cell = row[place]
    text = _styled(_in_words(cell.text), cell.tone or table.columns[place].tone, cell.axes)
    if cell.mark:
        text.append(cell.mark, STYLES["muted"])
    under = _in_words(_behind([row[guest].text for guest in guests]))
    return Group(text, Padding(Text(under, STYLES["muted"], overflow="fold"), (0, 0, 0, 2))) if under else text


def _behind(texts: list[str]) -> str:
    """Return texts that share one line: the first, and the others in brackets."""
    first, *others = [text for text in texts if text] or [""]
    return f"{first} ({', '.join(others)})" if others else first


def _styled(content: str, tone: Tone, axes: str) -> Text:
    text = Text(overflow="fold", style=STYLES.get(tone, ""))
    for piece, axis in by_axis(content, tone, axes):
        text.append(piece, AXIS_STYLES.get(axis, ""))
    return text


def _verbatim(block: Verbatim) -> Iterator[RenderableType]:
    heading = Text().append(block.title, "bold")
    if block.shape:
        heading.append("  ").append_text(_styled(block.shape, "shape", block.axes))
    if block.axes:
        heading.append("  ").append_text(_styled(block.axes, "axes", ""))
    yield heading
    yield from (Text(line, overflow="fold") for line in block.lines)
