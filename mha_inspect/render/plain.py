"""Plain text for pipes: a line an item, nothing cut, nothing wrapped, no colour, no boxes.

Fields are set apart by two spaces or more and an empty one is a `-`, so that `awk -F '  +'` reads every row.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..text import cells
from .page import Block, Facts, Page, Paragraph, Table, apart

_GAP = "  "


def to_plain(page: Page) -> str:
    """Return the page as aligned lines; ends with a line feed."""
    return "\n".join(line.rstrip() for line in _page(page)) + "\n"


def _page(page: Page) -> Iterator[str]:
    yield _titled(page.title, page.detail)
    yield page.subtitle
    for section in page.sections:
        yield ""
        if section.title:
            yield _titled(section.title, section.detail)
        previous: Block | None = None
        for block in section.blocks:
            if previous is not None and apart(previous, block):
                yield ""
            yield from _block(block)
            previous = block


def _titled(title: str, detail: str) -> str:
    return f"{title}: {detail}" if detail else title


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Facts):
        width = max((cells(label) for label, _ in block.items), default=0)
        for label, text in block.items:
            yield _pad(label, width, "left") + _GAP + text
    elif isinstance(block, Paragraph):
        yield block.text
    else:
        yield _GAP.join(part for part in (block.title, block.shape, block.axes) if part)
        yield from block.text.split("\n")


def _table(table: Table) -> Iterator[str]:
    lines = [[c.title for c in table.columns], *([cell.full or "-" for cell in row] for row in table.rows)]
    widths = [max(cells(line[i]) for line in lines) for i in range(len(table.columns))]
    for line in lines:
        yield _GAP.join(_pad(f, w, c.align) for f, w, c in zip(line, widths, table.columns, strict=True))
    if table.legend:
        yield table.legend


def _pad(text: str, width: int, align: str) -> str:
    spaces = " " * (width - cells(text))
    return spaces + text if align == "right" else text + spaces
