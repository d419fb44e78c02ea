"""Tables for a terminal. The only importer of Rich, with `screen`.

Text reaches Rich as `Text`, never as markup, and was cleaned when it entered the page. Rich wraps; which columns there
is room for, and how wide each is, is decided here.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from ..text import cells
from .page import (
    FULL_WIDTH,
    WIDE,
    Block,
    Cell,
    Facts,
    Page,
    Paragraph,
    Section,
    Table,
    Tone,
    Verbatim,
    apart,
    by_axis,
    facts,
)

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
    if width is None:
        width = shutil.get_terminal_size().columns
    columns = max(width, 1)
    text = _text(columns, color, _page(page, columns, airy=True))
    if _fits(text, height):
        return text
    text = _text(columns, color, _page(page, columns, airy=False))
    if _fits(text, height):
        return text
    text = _text(columns, color, _page(_shortened(page), columns, airy=False))
    if _fits(text, height):
        return text
    return text + _text(columns, color, _repeated(page, columns))


def _fits(text: str, height: int | None) -> bool:
    """Return whether a text and the line of the prompt fit on a screen of that many lines."""
    return height is None or text.count("\n") < height


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
    printed = file.getvalue().replace(_SPACE, " ")
    return "\n".join(line.rstrip() for line in printed.split("\n"))


def _shortened(page: Page) -> Page:
    """Return the page without the sections that another option shows, each option named once, and the subtitle."""
    sections: list[Section] = []
    named = {""}
    for part in page.sections:
        if part.brief:
            sections.append(replace(part, blocks=part.brief))
        elif part.more is None:
            sections.append(part)
        elif part.more not in named:
            named.add(part.more)
            line = Paragraph(part.more, "muted")
            sections.append(replace(part, title="", blocks=(line,)))
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
        yield from _section(section, width, airy=airy)


def _section(section: Section, width: int, *, airy: bool) -> Iterator[tuple[RenderableType, int]]:
    """Yield the title of a section, then its blocks; if `airy`, a blank line around tables and verbatim text."""
    prose = min(width, PROSE_WIDTH)
    if section.title:
        yield _title(section.title, section.detail), prose
    before: Block | None = None
    for block in section.blocks:
        has_line_above = before is not None or section.title
        if airy and has_line_above and apart(before, block):
            yield Text(), prose
        columns = prose if isinstance(block, (Facts, Paragraph)) else width
        for item in _block(block, width, airy=airy):
            yield item, columns
        before = block


def _verdict(page: Page, width: int) -> Iterator[tuple[RenderableType, int]]:
    """Yield the verdict with its width, if the page has one."""
    if page.verdict is not None:
        yield _paragraph(page.verdict), min(width, PROSE_WIDTH)


def _repeated(page: Page, width: int) -> Iterator[tuple[RenderableType, int]]:
    """Yield the verdict and its fix again, for the end of a page that scrolls."""
    yield from _verdict(page, width)
    if page.fix:
        yield _facts(facts(("fix", page.fix))), min(width, PROSE_WIDTH)


def _paragraph(paragraph: Paragraph) -> Text:
    style = STYLES.get(paragraph.tone, "")
    return Text(paragraph.text, style, overflow="fold")


def _title(title: str, detail: str) -> Text:
    text = Text().append(title, "bold")
    return text.append(f"  {detail}") if detail else text


def _block(block: Block, width: int, *, airy: bool) -> Iterator[RenderableType]:
    if isinstance(block, Table):
        yield from _table(block, width, airy=airy)
    elif isinstance(block, Facts):
        yield _facts(block)
    elif isinstance(block, Paragraph):
        yield _paragraph(block)
    else:
        yield from _verbatim(block)


def _facts(facts: Facts) -> RichTable:
    """Return labels and texts as a grid, in which sentences wrap beside their labels."""
    grid = RichTable.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(overflow="fold", no_wrap=False)
    grid.add_column(overflow="fold", ratio=1)
    style = STYLES.get(facts.tone, "")
    for label, text in facts.items:
        grid.add_row(Text(label, STYLES["muted"]), Text(text, style))
    return grid


def _table(table: Table, width: int, *, airy: bool) -> Iterator[RenderableType]:
    """Yield the table, and under it its legend and the titles of the columns that were dropped."""
    is_narrow = width < FULL_WIDTH
    fit = _fitted(_brief(table) if is_narrow else table, width)
    yield _rows(fit, ruled=airy)
    under = []
    legend = table.explained(fit.widths)
    if legend:
        under.append(legend)
    # On a short screen, a column that only a wide terminal shows is dropped without a word.
    narrow = {column.title for column in table.columns if not column.wide}
    names_dropped = airy or not narrow.isdisjoint(fit.dropped)
    if fit.dropped and names_dropped:
        under.append(f"Not shown at this width: {', '.join(fit.dropped)}.")
    if under:
        yield Text(". ".join(under), STYLES["muted"])


def _brief(table: Table) -> Table:
    """Return the table with the brief text of each field that has one."""
    rows = []
    for row in table.rows:
        briefs = [replace(cell, text=cell.brief) if cell.brief else cell for cell in row]
        rows.append(tuple(briefs))
    return replace(table, rows=tuple(rows))


_INDENT = 2
"""Columns of the margin before a text that is put under another."""


@dataclass(frozen=True)
class _Fit:
    """How a table is shown. A column is the number of its place in the table."""

    table: Table
    widths: Mapping[int, int]
    """Width of each shown column."""
    below: Mapping[int, Sequence[int]]
    """The columns that are put under each column."""
    dropped: Sequence[str]
    """Titles of the columns that did not fit."""


@dataclass(frozen=True)
class _Columns:
    """The columns that are shown while a table is fitted, and how wide their contents are."""

    table: Table
    bodies: tuple[int, ...]
    """The widest field of each column."""
    words: tuple[int, ...]
    """The longest word in the fields of each column."""
    pieces: tuple[int, ...]
    """The longest word where shapes are broken between their sizes."""
    shown: tuple[int, ...]
    below: Mapping[int, tuple[int, ...]]
    """The columns that are put under each column."""
    dropped: tuple[str, ...]
    """Titles of the columns that are not shown."""

    @classmethod
    def of(cls, table: Table, width: int) -> _Columns:
        """Return the columns of a table, at first without those that only a wide terminal shows."""
        bodies, words, pieces, shown, dropped = [], [], [], [], []
        for place, column in enumerate(table.columns):
            texts = [row[place].full for row in table.rows]
            bodies.append(max(map(cells, texts), default=0))
            words.append(max(map(_longest_word, texts), default=0))
            pieces.append(max(map(_longest_piece, texts), default=0))
            if column.wide and width < WIDE:
                dropped.append(column.title)
            else:
                shown.append(place)
        return cls(
            table=table,
            bodies=tuple(bodies),
            words=tuple(words),
            pieces=tuple(pieces),
            shown=tuple(shown),
            below={},
            dropped=tuple(dropped),
        )

    # -- widths of a shown column -------------------------------------------------------------------------------------

    def least(self, place: int) -> int:
        """Return the width at which the title, and the words of the columns below, are whole."""
        least = _longest_word(self.table.columns[place].title)
        for guest in self.below.get(place, ()):
            least = max(least, _INDENT + self.words[guest])
        return least

    def unbroken(self, place: int) -> int:
        """Return the width at which no word is broken."""
        return max(self.words[place], self.least(place))

    def pieced(self, place: int) -> int:
        """Return the width at which no number is broken: a shape wraps between its sizes."""
        return max(self.pieces[place], self.least(place))

    def wrapped(self, place: int) -> int:
        """Return the width at which texts wrap no narrower than the column asks for."""
        body = self.bodies[place]
        wrap = self.table.columns[place].wrap or body
        return max(min(wrap, body), self.unbroken(place))

    def titled(self, place: int) -> int:
        """Return the width at which the title is on one line too."""
        title = self.table.columns[place].title
        return max(self.wrapped(place), cells(title))

    def widths(self, width_of: Callable[[int], int]) -> dict[int, int]:
        """Return a width of every shown column, by its place."""
        return {place: width_of(place) for place in self.shown}

    # -- fewer columns ------------------------------------------------------------------------------------------------

    def guest(self) -> tuple[int, int] | None:
        """Return the first column that may be put under another shown one, and that one; None if there is none."""
        hosts = {self.table.columns[place].title: place for place in self.shown}
        for place in self.shown:
            into = self.table.columns[place].into
            if into in hosts:
                return place, hosts[into]
        return None

    def last(self) -> int | None:
        """Return the column to drop first; None if all of them must stay."""
        place = max(self.shown, key=lambda place: self.table.columns[place].drop)
        return place if self.table.columns[place].drop else None

    def put_below(self, guest: int, host: int) -> _Columns:
        """Return the columns with one of them under another."""
        guests = (*self.below.get(host, ()), guest)
        below = {**self.below, host: guests}
        return replace(self._without(guest), below=below)

    def drop(self, place: int) -> _Columns:
        """Return the columns with one of them dropped."""
        title = self.table.columns[place].title
        return replace(self._without(place), dropped=(title, *self.dropped))

    def _without(self, place: int) -> _Columns:
        rest = [shown for shown in self.shown if shown != place]
        return replace(self, shown=tuple(rest))


def _fitted(table: Table, width: int) -> _Fit:
    """Return how to show a table: columns are first put under others, then dropped, then words are broken."""
    columns = _Columns.of(table, width)
    while _total(columns.widths(columns.wrapped)) > width:
        guest, last = columns.guest(), columns.last()
        if guest is not None:
            columns = columns.put_below(*guest)
        elif last is not None:
            columns = columns.drop(last)
        else:
            break
    limits = _limits(columns, width)
    wished: dict[int, int] = {}
    for place, first in limits.first.items():
        wished[place] = max(columns.bodies[place], first)
    widths = _narrowed(wished, limits.last, width)
    # Texts below a column may have the room that is left.
    for host, guests in columns.below.items():
        needed = sum(_INDENT + columns.bodies[guest] for guest in guests)
        spare = width - _total(widths)
        more = min(needed - widths[host], spare)
        widths[host] += max(more, 0)
    return _Fit(table, widths, columns.below, columns.dropped)


def _total(widths: Mapping[int, int]) -> int:
    """Return the width of columns with the gaps between them."""
    gaps = len(widths) - 1
    return sum(widths.values()) + GAP * gaps


@dataclass(frozen=True)
class _Limits:
    """How narrow the columns may be, by place."""

    first: Mapping[int, int]
    """Before anything is narrowed."""
    last: Mapping[int, int]
    """After everything is narrowed."""


def _limits(columns: _Columns, width: int) -> _Limits:
    """Return how narrow the columns may be: titles wrap first, then texts, then shapes, then words are broken."""
    titled = columns.widths(columns.titled)
    if _total(titled) <= width:
        return _Limits(titled, titled)
    wrapped = columns.widths(columns.wrapped)
    if _total(wrapped) <= width:
        return _Limits(wrapped, wrapped)
    least = columns.widths(columns.least)
    unbroken = columns.widths(columns.unbroken)
    if _total(unbroken) <= width:
        return _Limits(least, unbroken)
    pieced = columns.widths(columns.pieced)
    if _total(pieced) <= width:
        return _Limits(least, pieced)
    return _Limits(least, dict.fromkeys(columns.shown, 1))


def _narrowed(widths: Mapping[int, int], floors: Mapping[int, int], width: int) -> dict[int, int]:
    """Narrow the widest column above its minimum, until all fit or all are at their minimum."""
    widths = dict(widths)
    while _total(widths) > width:
        givers = [place for place in widths if widths[place] > floors[place]]
        if not givers:
            break
        widest = max(givers, key=lambda place: widths[place])
        widths[widest] -= 1
    return widths


def _longest_word(text: str) -> int:
    return max(map(cells, _in_words(text).split()), default=0)


def _longest_piece(text: str) -> int:
    return max(map(cells, text.split()), default=0)


def _whole(text: str, width: int) -> str:
    """Return a text whose shapes are words, if they fit into the width; else they wrap between their sizes."""
    return _in_words(text) if _longest_word(text) <= width else text


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
        justify = table.columns[place].align
        rows.add_column(_header(fit, place), justify=justify, width=max(width, 1), overflow="fold")
    for number, row in enumerate(table.rows):
        fields = []
        for place in fit.widths:
            guests = fit.below.get(place, ())
            fields.append(_field(fit, row, place, guests))
        is_total = table.total and number == len(table.rows) - 1
        if is_total:
            rows.add_section()
        rows.add_row(*fields, style="bold" if is_total else "")
    return rows


def _header(fit: _Fit, place: int) -> Text:
    """Return the title of a column, with the titles of the columns below it."""
    columns = fit.table.columns
    header = Text(_in_words(columns[place].title), STYLES["muted"])
    guests = fit.below.get(place, ())
    if guests:
        titles = [columns[guest].title for guest in guests]
        header.append("\n  " + _behind(titles))
    return header


def _field(fit: _Fit, row: tuple[Cell, ...], place: int, guests: Sequence[int]) -> RenderableType:
    """Return the field, with the fields of the columns below it."""
    cell, width = row[place], fit.widths[place]
    tone = cell.tone or fit.table.columns[place].tone
    text = _styled(_whole(cell.text, width), tone, cell.axes)
    if cell.mark:
        text.append(cell.mark, STYLES["muted"])
    texts_under = [row[guest].text for guest in guests]
    under = _whole(_behind(texts_under), width - _INDENT)
    if not under:
        return text
    muted = Text(under, STYLES["muted"], overflow="fold")
    return Group(text, Padding(muted, (0, 0, 0, _INDENT)))


def _behind(texts: Iterable[str]) -> str:
    """Return texts that share one line: the first, and the others in brackets."""
    filled = [text for text in texts if text]
    if len(filled) < 2:
        return "".join(filled)
    first, *others = filled
    return f"{first} ({', '.join(others)})"


def _styled(content: str, tone: Tone, axes: str) -> Text:
    text = Text(overflow="fold", style=STYLES.get(tone, ""))
    for piece, axis in by_axis(content, tone, axes):
        text.append(piece, AXIS_STYLES.get(axis, ""))
    return text


def _verbatim(block: Verbatim) -> Iterator[RenderableType]:
    if block.has_heading:
        heading = Text().append(block.title, "bold")
        if block.shape:
            heading.append("  ").append_text(_styled(block.shape, "shape", block.axes))
        if block.axes:
            heading.append("  ").append_text(_styled(block.axes, "axes", ""))
        yield heading
    for line in block.lines:
        style = STYLES.get(block.tone_of(line), "")
        yield Text(line, style, overflow="fold")
