"""Plain text for pipes: a line an item, nothing cut, nothing wrapped, no colour, no boxes.

Fields are set apart by two spaces or more and an empty one is a `-`, so that `awk -F '  +'` reads every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
        lines = [[c.title for c in block.columns], *([cell.full or "-" for cell in row] for row in block.rows)]
        yield from _aligned(lines, [column.align == "right" for column in block.columns])
        if block.legend:
            yield block.legend
    elif isinstance(block, Facts):
        yield from _aligned(block.items, (False, False))
    elif isinstance(block, Paragraph):
        yield block.text
    else:
        yield _GAP.join(part for part in (block.title, block.shape, block.axes) if part)
        yield from block.lines


def _aligned(lines: Sequence[Sequence[str]], rights: Sequence[bool]) -> Iterator[str]:
    widths = [max(map(cells, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = []
        for field, width, is_right in zip(line, widths, rights, strict=True):
            spaces = " " * (width - cells(field))
            padded.append(spaces + field if is_right else field + spaces)
        yield _GAP.join(padded)
