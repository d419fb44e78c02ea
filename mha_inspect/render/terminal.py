"""Tables for a terminal. The only importer of Rich, with `screen`.

Text reaches Rich as `Text`, never as markup, and was cleaned when it entered the page.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from io import StringIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from .layout import GAP, Layout, ShownColumn, breaks, layouts, pieces
from .page import Block, Cell, Facts, Page, Paragraph, Table, Tone, Verbatim, apart, by_axis

PROSE_WIDTH = 110
"""Sentences are not set wider than they are easy to read."""

# Of the sixteen colours, which follow the palette that the reader has chosen, those that no common one makes pale:
# yellow is on white, and bright black vanishes on black. No meaning hangs on a colour alone.
STYLES: dict[Tone, str] = {
    "": "",
    "strong": "bold",
    "muted": "dim",
    "axes": "",
    "shape": "",
    "good": "green",
    "bad": "bold red",
    "warn": "red",
}

AXIS_STYLES = {"heads": "magenta", "kv_heads": "magenta", "query": "cyan", "key": "blue", "head_dim": "green"}

_RULES = box.Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
"""A line under the titles and one above the total."""


def to_table(page: Page, *, width: int | None, color: bool) -> str:
    """Return the page for a terminal of that width; without colour there is no escape sequence in it."""
    file = StringIO()
    columns = shutil.get_terminal_size().columns if width is None else width
    console = Console(
        file=file,
        width=max(columns, 1),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    _print(console, page)
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def _print(console: Console, page: Page) -> None:
    prose = min(console.width, PROSE_WIDTH)
    console.print(_title(page.title, page.detail), width=prose)
    console.print(Text(page.subtitle, STYLES["muted"]), width=prose)
    for section in page.sections:
        console.print()
        if section.title:
            console.print(_title(section.title, section.detail), width=prose)
        before: Block | None = None
        for block in section.blocks:
            if apart(before, block) and (before is not None or section.title):
                console.print()
            for item in _block(block, console.width):
                console.print(item, width=prose if isinstance(block, (Facts, Paragraph)) else None, soft_wrap=False)
            before = block


def _title(title: str, detail: str) -> Text:
    text = Text().append(title, "bold")
    return text.append(f"  {detail}") if detail else text


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    if isinstance(block, Table):
        yield from _table(block, width)
    elif isinstance(block, Facts):
        yield _labelled(block)
    elif isinstance(block, Paragraph):
        yield Text(block.text, STYLES[block.tone], overflow="fold")
    else:
        yield from _verbatim(block, width)


def _labelled(facts: Facts) -> RenderableType:
    """Return labels, and beside them sentences that wrap under themselves."""
    grid = RichTable.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(overflow="fold", no_wrap=False)
    grid.add_column(overflow="fold", ratio=1)
    for label, text in facts.items:
        grid.add_row(Text(label, STYLES["muted"]), Text(text, STYLES[facts.tone]))
    return grid


def _table(table: Table, width: int) -> Iterator[RenderableType]:
    for number, layout in enumerate(layouts(table, width)):
        if number:
            yield Text()
        yield _laid_out(table, layout)
        if layout.dropped:
            yield Text(f"no room at this width for: {', '.join(layout.dropped)}", STYLES["muted"])
    if table.legend:
        yield Text(table.legend, STYLES["muted"])


def _laid_out(table: Table, layout: Layout) -> RichTable:
    made = RichTable(
        box=_RULES,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        border_style=STYLES["muted"],
        header_style="",
    )
    for shown in layout.columns:
        column = table.columns[shown.index]
        header = Text(column.title, STYLES["muted"])
        if shown.below:
            header.append(f"\n  {_behind([table.columns[i].title for i in shown.below])}")
        made.add_column(header, justify=column.align, width=shown.width, overflow="fold")
    for number, row in enumerate(table.rows):
        last = number == len(table.rows) - 1
        if last and table.total:
            made.add_section()
        style = "bold" if last and table.total else ""
        made.add_row(*(_field(table, shown, row) for shown in layout.columns), style=style)
    return made


def _field(table: Table, shown: ShownColumn, row: tuple[Cell, ...]) -> Text:
    """Return the field, and under it those of the columns that were moved there."""
    cell = row[shown.index]
    text = _styled(cell.text, cell.tone or table.columns[shown.index].tone, cell.axes)
    if cell.mark:
        text.append(f" {cell.mark}", STYLES["muted"])
    text = Text("\n").join(text.divide(breaks(text.plain, shown.width)))
    for line in pieces(_behind([row[i].text for i in shown.below]), shown.width - 2):
        text.append(f"\n  {line}", STYLES["muted"])
    return text


def _behind(texts: list[str]) -> str:
    """Return the texts of columns that share one line: the first, and the others behind it in brackets."""
    first, *others = [text for text in texts if text] or [""]
    return f"{first} ({', '.join(others)})" if others else first


def _styled(content: str, tone: Tone, axes: str) -> Text:
    text = Text(overflow="fold", style=STYLES[tone])
    for piece, axis in by_axis(content, tone, axes):
        text.append(piece, AXIS_STYLES.get(axis, ""))
    return text


def _verbatim(block: Verbatim, width: int) -> Iterator[RenderableType]:
    heading = Text().append(block.title, "bold")
    if block.shape:
        heading.append("  ").append_text(_styled(block.shape, "shape", block.axes))
    if block.axes:
        heading.append("  ").append_text(_styled(block.axes, "axes", ""))
    yield heading
    for line in block.lines:
        # A line that is too long goes on under its own first number, behind the brackets.
        opening = re.match(r"(?:tensor\()?[ \[]*", line)
        indent = min(opening.end() if opening else 0, max(width - 20, 0)) if len(line) > width else 0
        for number, part in enumerate(pieces(line[indent:], width - indent) or [""]):
            yield Text((" " * indent if number else line[:indent]) + part)
