"""The page as html: real tables, each of which scrolls by itself, light or dark as the reader's system is.

The frames are page.html and cell.html beside this file, with the styles of page.css. What stands between two @ in them
is filled in here. They are self-contained: nothing is fetched, fonts that systems have, and no script but that of a
picture. Below a picture, tables are folded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from .page import Block, Cell, Column, Facts, Page, Paragraph, Section, Table, Tone, Verbatim, by_axis

_COLOURS = {name.upper(): f"var(--{name})" for name in ("red", "green", "magenta", "cyan", "blue")}
"""Colours of a whole page: page.html sets them for light and for dark."""
_BETWEEN = {"RED": "#d1402f", "GREEN": "#2d8549", "MAGENTA": "#9560d8", "CYAN": "#1f8089", "BLUE": "#2f76cf"}
"""Colours that are readable on white and on black, for a page of unknown background."""


@dataclass(frozen=True)
class Drawn:
    """The picture of a page."""

    content: str
    policy: str = ""
    """A `meta` element that says which scripts and styles the page may run; empty where another page says it."""


def to_html(page: Page, drawn: Drawn | None = None) -> str:
    """Return the page as one html file, below its first lines a picture if one is drawn: nothing is fetched."""
    styles = _filled("page.css", SCOPE="body", **_COLOURS).strip()
    lines = [*_verdict(page), *_title(page)]
    if drawn is not None:
        lines = [*_verdict(page), *_fix(page), *_title(page), drawn.content]
    lines += _sections(page, folds=drawn is not None)
    title = escape(f"mha-inspect: {page.title}")
    policy = "" if drawn is None else drawn.policy
    return _filled("page.html", POLICY=policy, STYLES=styles, TITLE=title, PAGE="\n".join(lines))


def to_cell(page: Page, drawn: Drawn | None = None) -> str:
    """Return the page as a piece of html for use inside another page, in that page's colours."""
    styles = _filled("page.css", SCOPE=".mha-inspect", **_BETWEEN).strip()
    lines = [*_verdict(page), *_title(page)]
    if drawn is not None:  # it is seen first
        lines = [*_verdict(page), *_fix(page), drawn.content, *_title(page)]
    content = "\n".join([*lines, *_sections(page, folds=drawn is not None)])
    return _filled("cell.html", STYLES=styles, PAGE=content)


def _filled(name: str, **values: str) -> str:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda mark: values[mark[1]], text)


def _verdict(page: Page) -> Iterator[str]:
    if page.verdict is not None:
        yield from _block(page.verdict)


def _fix(page: Page) -> Iterator[str]:
    """Yield how to fix what the verdict says, above a picture: the findings stand below it."""
    if page.fix:
        yield _element("p", escape(f"fix: {page.fix}"))


def _title(page: Page) -> Iterator[str]:
    yield _titled("h1", page.title, page.detail)
    yield _element("p", escape(page.subtitle), "muted")


def _sections(page: Page, *, folds: bool) -> Iterator[str]:
    for part in _parts(page.sections):
        yield from _folded(part) if folds and _is_long(part) else _open(part)


def _parts(sections: Iterable[Section]) -> list[list[Section]]:
    """Return each section that has a title, with those after it that continue it."""
    parts: list[list[Section]] = []
    for section in sections:
        if section.title or not parts:
            parts.append([])
        parts[-1].append(section)
    return parts


def _is_long(part: Iterable[Section]) -> bool:
    """Return whether a part has a table, or the content of a tensor, and so is folded below a picture."""
    return any(isinstance(block, (Table, Verbatim)) for section in part for block in section.blocks)


def _folded(part: Sequence[Section]) -> Iterator[str]:
    first = part[0]
    title = _titled("h2", first.title, first.detail) if first.title else _element("h2", "more")
    yield f"<details><summary>{title}</summary>"
    for section in part:
        for block in section.blocks:
            yield from _block(block)
    yield "</details>"


def _open(part: Iterable[Section]) -> Iterator[str]:
    for section in part:
        yield "<section>"
        if section.title:
            yield _titled("h2", section.title, section.detail)
        for block in section.blocks:
            yield from _block(block)
        yield "</section>"


def _titled(tag: str, title: str, detail: str) -> str:
    content = escape(title)
    if detail:
        content += _element("span", escape(detail))
    return _element(tag, content)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Facts):
        yield _facts(block)
    elif isinstance(block, Paragraph):
        yield _element("p", escape(block.text), block.tone)
    else:
        if block.has_heading:
            shape = _coloured(block.shape, "shape", block.axes)
            axes = _coloured(block.axes, "axes", "")
            yield f"<h3>{escape(block.title)} <span>{shape} {axes}</span></h3>"
        lines = "\n".join([_line(line, block.tone_of(line)) for line in block.lines])
        yield f'<div class="scroll"><pre>{lines}</pre></div>'


def _line(line: str, tone: Tone) -> str:
    return _element("span", escape(line), tone) if tone else escape(line)


def _facts(facts: Facts) -> str:
    content = ""
    for label, text in facts.items:
        content += _element("dt", escape(label)) + _element("dd", escape(text), facts.tone)
    return _element("dl", content)


def _table(table: Table) -> Iterator[str]:
    classes = [_classes(column) for column in table.columns]
    heads = ""
    for column, names in zip(table.columns, classes, strict=True):
        heads += _element("th", escape(column.title), names, ' scope="col"')
    rows = []
    for row in table.rows:
        fields = map(_field, row, table.columns, classes)
        rows.append(f"<tr>{''.join(fields)}</tr>")
    yield f'<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>'
    if table.total and rows:
        yield "\n".join(["<tbody>", *rows[:-1], "</tbody>", "<tfoot>", rows[-1], "</tfoot>"])
    else:
        yield "\n".join(["<tbody>", *rows, "</tbody>"])
    yield "</table></div>"
    legend = table.explained()
    if legend:
        yield _element("p", escape(legend), "muted")


def _classes(column: Column) -> str:
    """Return how a column is set: `right`, `wrap`, with a space after each."""
    names = ""
    if column.align == "right":
        names += "right "
    if column.wrap and column.tone != "axes":
        names += "wrap "
    return names


def _field(cell: Cell, column: Column, classes: str) -> str:
    tone = cell.tone or column.tone
    content = _coloured(cell.text, tone, cell.axes)
    if cell.mark:
        content += _element("span", escape(cell.mark), "muted")
    return _element("td", content, f"{classes}{tone}")


def _coloured(text: str, tone: Tone, axes: str) -> str:
    content = ""
    for piece, axis in by_axis(text, tone, axes):
        content += _element("span", escape(piece), f"axis-{axis}") if axis else escape(piece)
    return content


def _element(tag: str, content: str, names: str = "", settings: str = "") -> str:
    """Return an element with its classes, `names`, and other settings: ` scope="col"`."""
    classes = f' class="{names.strip()}"' if names.strip() else ""
    return f"<{tag}{classes}{settings}>{content}</{tag}>"
