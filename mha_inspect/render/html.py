"""The page as html: real tables, each of which scrolls by itself, light or dark as the reader's system is.

The frames are page.html and cell.html beside this file, with the styles of page.css. What stands between two @ in them
is filled in here. They are self-contained: nothing is fetched, no script, fonts that systems have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from importlib.resources import files

from .page import Block, Cell, Facts, Page, Paragraph, Table, Tone, by_axis

_COLOURS = {name.upper(): f"var(--{name})" for name in ("red", "green", "magenta", "cyan", "blue")}
"""Colours of a whole page: page.html sets them for light and for dark."""
_BETWEEN = {"RED": "#d1402f", "GREEN": "#2d8549", "MAGENTA": "#9560d8", "CYAN": "#1f8089", "BLUE": "#2f76cf"}
"""Colours that are readable on white and on black, for a page of unknown background."""


def to_html(page: Page) -> str:
    """Return the page as one html file: nothing is fetched, no script."""
    styles = _filled("page.css", SCOPE="body", **_COLOURS).strip()
    return _filled("page.html", STYLES=styles, TITLE=escape(f"mha-inspect: {page.title}"), PAGE=_page(page))


def to_cell(page: Page) -> str:
    """Return the page as a piece of html for use inside another page, in that page's colours."""
    styles = _filled("page.css", SCOPE=".mha-inspect", **_BETWEEN).strip()
    return _filled("cell.html", STYLES=styles, PAGE=_page(page))


def _filled(name: str, **values: str) -> str:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return re.sub("@([A-Z]+)@", lambda mark: values[mark[1]], text)


def with_pre(page: str, text: str) -> str:
    """Return a whole page with a preformatted text at its end."""
    body, _, end = page.rpartition("</body>")
    return f'{body}<section class="scroll"><pre>{escape(text)}</pre></section>\n</body>{end}'


def _page(page: Page) -> str:
    lines = [] if page.verdict is None else [*_block(page.verdict)]
    lines += [_titled("h1", page.title, page.detail), _element("p", escape(page.subtitle), "muted")]
    for section in page.sections:
        titles = [_titled("h2", section.title, section.detail)] if section.title else []
        blocks = (line for block in section.blocks for line in _block(block))
        lines += ["<section>", *titles, *blocks, "</section>"]
    return "\n".join(lines)


def _titled(tag: str, title: str, detail: str) -> str:
    return _element(tag, escape(title) + (_element("span", escape(detail)) if detail else ""))


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Facts):
        items = (_element("dt", escape(label)) + _element("dd", escape(t), block.tone) for label, t in block.items)
        yield _element("dl", "".join(items))
    elif isinstance(block, Paragraph):
        yield _element("p", escape(block.text), block.tone)
    else:
        shape, axes = _coloured(block.shape, "shape", block.axes), _coloured(block.axes, "axes", "")
        yield f"<h3>{escape(block.title)} <span>{shape} {axes}</span></h3>"
        yield f'<div class="scroll"><pre>{escape(chr(10).join(block.lines))}</pre></div>'


def _table(table: Table) -> Iterator[str]:
    names = [f"{'right ' * (c.align == 'right')}{'wrap ' * bool(c.wrap and c.tone != 'axes')}" for c in table.columns]
    tones = [column.tone for column in table.columns]
    heads = [_element("th", escape(c.title), n, ' scope="col"') for c, n in zip(table.columns, names, strict=True)]
    rows = [f"<tr>{''.join(map(_field, row, tones, names))}</tr>" for row in table.rows]
    body, foot = (rows[:-1], rows[-1:]) if table.total else (rows, [])
    yield f'<div class="scroll"><table>\n<thead><tr>{"".join(heads)}</tr></thead>'
    yield "\n".join(["<tbody>", *body, "</tbody>"] + (["<tfoot>", *foot, "</tfoot>"] if foot else []))
    yield "</table></div>"
    if legend := table.explained():
        yield _element("p", escape(legend), "muted")


def _field(cell: Cell, usual: Tone, names: str) -> str:
    tone = cell.tone or usual
    mark = f"{_element('span', escape(cell.mark), 'muted')}" if cell.mark else ""
    return _element("td", _coloured(cell.text, tone, cell.axes) + mark, f"{names}{tone}")


def _coloured(text: str, tone: Tone, axes: str) -> str:
    pieces = by_axis(text, tone, axes)
    return "".join(_element("span", escape(t), f"axis-{axis}") if axis else escape(t) for t, axis in pieces)


def _element(tag: str, content: str, names: str = "", settings: str = "") -> str:
    classes = f' class="{names.strip()}"' if names.strip() else ""
    return f"<{tag}{classes}{settings}>{content}</{tag}>"
