"""Tables for a terminal, and the same page as svg and html. The only importer of Rich.

Text reaches Rich as `Text`, never as markup, and was cleaned when it entered the document.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from io import StringIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from . import templates
from .document import Block, Cell, Document, Facts, Paragraph, Section, Table, Tone, Verbatim
from .layout import GAP, Layout, ShownColumn, layouts
from .wrapping import breaks, pieces

PROSE_WIDTH = 110
"""Sentences are not set wider than they are easy to read."""
EXPORT_WIDTH = 120

# The sixteen colours only: they follow the palette that the reader has chosen.
STYLES: dict[Tone, str] = {
    "": "",
    "strong": "bold",
    "muted": "bright_black",
    "axes": "",
    "shape": "",
    "good": "green",
    "bad": "bold red",
    "warn": "yellow",
}

AXIS_STYLES = {
    "batch": "blue",
    "heads": "magenta",
    "kv_heads": "magenta",
    "query": "cyan",
    "key": "yellow",
    "head_dim": "green",
}
"""A dimension has one colour, in its name and in its size. Every other name has none."""

_RULES = box.Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
"""A line under the titles and one above the total."""


def _colour(code: str) -> tuple[int, int, int]:
    return int(code[:2], 16), int(code[2:4], 16), int(code[4:], 16)


def _theme(background: str, foreground: str, normal: str, bright: str) -> TerminalTheme:
    """Colours as hex codes: black, red, green, yellow, blue, magenta, cyan, white, and the same again bright."""
    normals, brights = ([_colour(code) for code in codes.split()] for codes in (normal, bright))
    return TerminalTheme(_colour(background), _colour(foreground), normals, brights)


HTML_THEME = _theme(
    background="ffffff",
    foreground="24292f",
    normal="24292f cf222e 116329 7d4e00 0969da 8250df 1b7c83 6e7781",
    bright="656d76 a40e26 1a7f37 633c01 218bff a475f9 3192aa 24292f",
)
SVG_THEME = _theme(
    background="161b22",
    foreground="d0d7de",
    normal="484f58 ff7b72 7ec685 d6b25e 79b4fa c89bf0 62c3cd b1bac4",
    bright="7d8590 ffa198 56d364 e3b341 a5d6ff e2c5ff b3f0ff ffffff",
)


def _codes(theme: TerminalTheme) -> list[str]:
    colours = [theme.background_color, theme.foreground_color, *(theme.ansi_colors[n] for n in range(16))]
    return [bytes(colour).hex() for colour in colours]


_IN_THE_DARK = dict(reversed(list(zip(_codes(HTML_THEME), _codes(SVG_THEME), strict=True))))
"""The colours of a page as they are where the reader's system is dark."""


def to_table(document: Document, *, width: int | None, color: bool) -> str:
    """The page for a terminal of that width; without colour there is no escape sequence in it."""
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
    _print(console, document)
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n"))


def to_svg(document: Document, *, width: int | None) -> str:
    """The page as one svg image."""
    console = _recorder(document, width)
    return console.export_svg(title=f"mha-inspect: {document.title}", theme=SVG_THEME, code_format=templates.SVG)


def to_html(document: Document, *, width: int | None) -> str:
    """The page as one html file."""
    light = _recorder(document, width).export_html(theme=HTML_THEME, code_format=templates.HTML)
    style = light[light.index("<style>") : light.index("</style>")].partition(">")[2]
    dark = re.sub("#([0-9a-f]{6})", lambda colour: f"#{_IN_THE_DARK.get(colour[1], colour[1])}", style)
    return light.replace("</style>", f"@media (prefers-color-scheme: dark) {{\n{dark}}}\n</style>", 1)


def to_cell(document: Document) -> str:
    """The page as a piece of html that can stand inside of another page."""
    console = _recorder(document, None)
    return console.export_html(theme=HTML_THEME, code_format=templates.CELL, inline_styles=True)


def _recorder(document: Document, width: int | None) -> Console:
    console = Console(
        file=StringIO(),
        record=True,
        width=max(EXPORT_WIDTH if width is None else width, 1),
        force_terminal=True,
        color_system="standard",
        no_color=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    _print(console, document)
    return console


def _print(console: Console, document: Document) -> None:
    prose = min(console.width, PROSE_WIDTH)
    console.print(_title(document.title, document.detail), width=prose)
    console.print(Text(document.subtitle, STYLES["muted"]), width=prose)
    for section in document.sections:
        console.print()
        for item, item_width in _section(section, console.width):
            console.print(item, width=item_width, soft_wrap=False)


def _title(title: str, detail: str) -> Text:
    text = Text().append(title, "bold")
    return text.append(f"  {detail}") if detail else text


def _section(section: Section, width: int) -> Iterator[tuple[RenderableType, int]]:
    """What to print, each with the width that it may take."""
    prose = min(width, PROSE_WIDTH)
    if section.title:
        yield _title(section.title, section.detail), prose
    before: Block | None = None
    for block in section.blocks:
        apart = isinstance(block, (Table, Verbatim)) or isinstance(before, (Table, Verbatim))
        if apart and (before is not None or section.title):
            yield Text(), width
        if isinstance(block, Table):
            yield from ((item, width) for item in _table(block, width))
        elif isinstance(block, Facts):
            yield _labelled([(label, text, "") for label, text in block.items]), prose
        elif isinstance(block, Paragraph) and block.label:
            yield _labelled([(block.label, block.text, block.tone)]), prose
        elif isinstance(block, Paragraph):
            yield Text(block.text, STYLES[block.tone], overflow="fold"), prose
        else:
            yield from ((item, width) for item in _verbatim(block, width))
        before = block


def _labelled(lines: list[tuple[str, str, Tone]]) -> RenderableType:
    """Labels, and beside them sentences that wrap under themselves."""
    grid = RichTable.grid(padding=(0, GAP, 0, 0), pad_edge=False)
    grid.add_column(overflow="fold", no_wrap=False)
    grid.add_column(overflow="fold", ratio=1)
    for label, text, tone in lines:
        grid.add_row(Text(label, STYLES["muted"]), Text(text, STYLES[tone]))
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
    """The field, and under it those of the columns that were moved there."""
    cell = row[shown.index]
    text = _styled(cell.text, cell.tone or table.columns[shown.index].tone, cell.axes)
    if cell.mark:
        text.append(f" {cell.mark}", STYLES["muted"])
    text = Text("\n").join(text.divide(breaks(text.plain, shown.width)))
    for line in pieces(_behind([row[i].text for i in shown.below]), shown.width - 2):
        text.append(f"\n  {line}", STYLES["muted"])
    return text


def _behind(texts: list[str]) -> str:
    """The texts of columns that share one line: the first, and the others behind it in brackets."""
    first, *others = [text for text in texts if text] or [""]
    return f"{first} ({', '.join(others)})" if others else first


def _styled(content: str, tone: Tone, axes: str) -> Text:
    text = Text(overflow="fold").append(content, STYLES[tone])
    if tone == "axes":
        for word in re.finditer(r"\w+", content):
            text.stylize(AXIS_STYLES.get(word[0], ""), *word.span())
    elif tone == "shape":
        names = re.findall(r"\([^)]*\)|\S+", axes)
        sizes = list(re.finditer(r"\d+", content))
        if len(names) == len(sizes):
            for name, found in zip(names, sizes, strict=True):
                text.stylize(AXIS_STYLES.get(name, ""), *found.span())
    return text


def _verbatim(block: Verbatim, width: int) -> Iterator[RenderableType]:
    heading = Text().append(block.title, "bold")
    if block.shape:
        heading.append("  ").append_text(_styled(block.shape, "shape", block.axes))
    if block.axes:
        heading.append("  ").append_text(_styled(block.axes, "axes", ""))
    yield heading
    for line in block.text.split("\n"):
        # A line that is too long goes on under its own first number, behind the brackets.
        opening = re.match(r"(?:tensor\()?[ \[]*", line)
        indent = min(opening.end() if opening else 0, max(width - 20, 0))
        first, rest = line[:indent], line[indent:]
        yield _hanging(first, rest) if len(line) > width else Text(line)


def _hanging(first: str, rest: str) -> RenderableType:
    grid = RichTable.grid(padding=0, pad_edge=False)
    grid.add_column(width=len(first))
    grid.add_column(overflow="fold", ratio=1)
    grid.add_row(Text(first), Text(rest))
    return grid
