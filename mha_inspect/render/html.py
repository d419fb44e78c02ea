"""The page as html: real tables, each of which scrolls by itself, light or dark as the reader's system is.

The frames are page.html and cell.html beside this file, with the styles of page.css. What stands between two @ in them
is filled in here. They are self-contained: nothing is fetched, no script, fonts that systems have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib.resources import files

from .page import Block, Cell, Facts, Page, Paragraph, Section, Table, Tone, Verbatim, by_axis

_COLOURS = {
    "RED": "var(--red)",
    "GREEN": "var(--green)",
    "MAGENTA": "var(--magenta)",
    "CYAN": "var(--cyan)",
    "BLUE": "var(--blue)",
}
"""Colours of a page of its own, which page.html gives for light and for dark."""
_BETWEEN = {"RED": "#d1402f", "GREEN": "#2d8549", "MAGENTA": "#9560d8", "CYAN": "#1f8089", "BLUE": "#2f76cf"}
"""Colours that can be read on white and on black alike, for a page whose ground is not known."""


def to_html(page: Page) -> str:
    """Return the page as one html file: nothing is fetched, no script."""
    title = escape(f"mha-inspect: {page.title}")
    return _filled("page.html", STYLES=_styles("body", _COLOURS), TITLE=title, PAGE=_page(page))


def to_cell(page: Page) -> str:
    """Return the page as a piece of html that can stand inside of another page, in the colours of which it is."""
    return _filled("cell.html", STYLES=_styles(".mha-inspect", _BETWEEN), PAGE=_page(page))


def _styles(scope: str, colours: dict[str, str]) -> str:
    return _filled("page.css", SCOPE=scope, **colours).strip()


def _filled(name: str, **values: str) -> str:
    """Return the file with its marks filled in."""
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda mark: values[mark[1]], text)


def with_pre(page: str, text: str) -> str:
    """Return a whole page with a text that is laid out by its characters at its end."""
    body, _, end = page.rpartition("</body>")
    return f'{body}<section class="scroll"><pre>{escape(text)}</pre></section>\n</body>{end}'


def _page(page: Page) -> str:
    lines = [_titled("h1", page.title, page.detail), _element("p", page.subtitle, "muted")]
    for section in page.sections:
        lines += ["<section>", *_section(section), "</section>"]
    return "\n".join(lines)


def _section(section: Section) -> Iterator[str]:
    if section.title:
        yield _titled("h2", section.title, section.detail)
    for block in section.blocks:
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Facts):
        items = [_element("dt", label) + _element("dd", text, block.tone) for label, text in block.items]
        yield f"<dl>{''.join(items)}</dl>"
    elif isinstance(block, Paragraph):
        yield _element("p", block.text, block.tone)
    else:
        yield from _verbatim(block)


def _table(table: Table) -> Iterator[str]:
    names = ["right " * (c.align == "right") + "wrap" * bool(c.wrap) for c in table.columns]
    heads = [_element("th", c.title, name, ' scope="col"') for c, name in zip(table.columns, names, strict=True)]
    tones = [column.tone for column in table.columns]
    rows = [f"<tr>{''.join(map(_field, row, tones, names))}</tr>" for row in table.rows]
    body, foot = (rows[:-1], rows[-1:]) if table.total else (rows, [])
    yield f'<div class="scroll"><table>\n<thead><tr>{"".join(heads)}</tr></thead>'
    yield "\n".join(["<tbody>", *body, "</tbody>"] + (["<tfoot>", *foot, "</tfoot>"] if foot else []))
    yield "</table></div>"
    if table.legend:
        yield _element("p", table.legend, "muted")


def _field(cell: Cell, usual: Tone, name: str) -> str:
    tone = cell.tone or usual
    mark = f' <span class="muted">{escape(cell.mark)}</span>' if cell.mark else ""
    return f"<td{_class(f'{name} {tone}')}>{_coloured(cell.text, tone, cell.axes)}{mark}</td>"


def _coloured(text: str, tone: Tone, axes: str) -> str:
    pieces = by_axis(text, tone, axes)
    return "".join(_element("span", piece, f"axis-{axis}") if axis else escape(piece) for piece, axis in pieces)


def _verbatim(block: Verbatim) -> Iterator[str]:
    shape, axes = _coloured(block.shape, "shape", block.axes), _coloured(block.axes, "axes", "")
    yield f"<h3>{escape(block.title)} <span>{shape} {axes}</span></h3>"
    yield f'<div class="scroll"><pre>{escape(chr(10).join(block.lines))}</pre></div>'


def _titled(tag: str, title: str, detail: str) -> str:
    return f"<{tag}>{escape(title)}{_element('span', detail) if detail else ''}</{tag}>"


def _element(tag: str, text: str, name: str = "", settings: str = "") -> str:
    return f"<{tag}{_class(name)}{settings}>{escape(text)}</{tag}>"


def _class(names: str) -> str:
    return f' class="{" ".join(names.split())}"' if names.strip() else ""
