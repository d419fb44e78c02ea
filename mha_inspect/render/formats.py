"""Write a report as text: table, plain, json, html.

A report is turned into a `Page` once, and every format but JSON shows that; JSON is the report itself.
Nothing heavy is imported here: Rich only for a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Literal, get_args

from ..reports.common import Report
from ..text import cells
from .page import Block, Facts, Page, Paragraph, Table, apart
from .verdict import verdict_of

if TYPE_CHECKING:
    from .html import Drawn

Format = Literal["table", "plain", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)

_MODULES = {"diff-checkpoints": "diff", "layers": "check"}
"""Modules of pages whose name is not the command's."""


def to_text(
    report: Report,
    format: Format,
    *,
    width: int | None = None,
    color: bool = False,
    height: int | None = None,
    drawn: Drawn | None = None,
) -> str:
    """Return the report in one of `FORMATS`; ends with a line feed.

    `width` (columns), `height` (lines) and `color` matter to table; a width of None is the terminal's, a height of None
    has no end. `drawn` is the picture of html.

    Raises `ValueError` for an unknown format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    if format == "json":
        return json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"
    page = page_of(report)
    if format == "plain":
        return "\n".join(line.rstrip() for line in _plain(page)) + "\n"
    if format == "html":
        from .html import to_html

        return to_html(page, drawn)
    from .terminal import to_table

    return to_table(page, width=width, color=color, height=height)


def to_cell(report: Report, drawn: Drawn | None = None) -> str:
    """Return the report as html for a page with other content, such as a notebook."""
    from .html import to_cell

    return to_cell(page_of(report), drawn)


def page_of(report: Report) -> Page:
    """Return the page of a report."""
    name = report.command.replace("-", "_")
    module = import_module(f".{_MODULES.get(report.command, name)}", __package__)
    make_page = getattr(module, f"{name}_page")
    page: Page = make_page(report)
    return replace(page, verdict=verdict_of(report), fix=_first_fix(report))


def _first_fix(report: Report) -> str:
    """Return the fix of the first finding that has one; empty without."""
    for finding in getattr(report, "findings", ()):
        if finding.fix:
            return str(finding.fix)
    return ""


# Plain text for pipes: a line an item, nothing cut, nothing wrapped, no colour, no boxes. Fields are set apart by two
# spaces or more and an empty one is a `-`, so that `awk -F '  +'` reads every row.


def _plain(page: Page) -> Iterator[str]:
    if page.verdict is not None:
        yield page.verdict.text
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
            yield from _lines(block)
            previous = block


def _titled(title: str, detail: str) -> str:
    return f"{title}: {detail}" if detail else title


def _lines(block: Block) -> Iterator[str]:
    if isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Facts):
        yield from _aligned(block.items, (False, False))
    elif isinstance(block, Paragraph):
        yield block.text
    else:
        if block.has_heading:
            yield "  ".join(filter(None, (block.title, block.shape, block.axes)))
        yield from block.lines


def _table(table: Table) -> Iterator[str]:
    """Yield the titles, the rows and the legend."""
    lines = [[column.title for column in table.columns]]
    for row in table.rows:
        lines.append([cell.full or "-" for cell in row])
    yield from _aligned(lines, [column.align == "right" for column in table.columns])
    legend = table.explained()
    if legend:
        yield legend


def _aligned(lines: Sequence[Sequence[str]], rights: Sequence[bool]) -> Iterator[str]:
    """Yield a line for each row, whose fields are as wide as their columns; `rights` are aligned to the right."""
    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(map(cells, column)))
    for line in lines:
        fields = []
        for field, width, is_right in zip(line, widths, rights, strict=True):
            gap = " " * (width - cells(field))
            fields.append(gap + field if is_right else field + gap)
        yield "  ".join(fields)
