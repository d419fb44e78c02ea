"""Reports as text: table, plain, json, svg, html.

A report is turned into a `Page` once, and every format but JSON shows that; JSON is the report itself.
Nothing heavy is imported here: Rich only for table and svg.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

Format = Literal["table", "plain", "json", "svg", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)

__all__ = ["FORMATS", "Format", "to_cell", "to_pieces", "to_text"]


def to_text(report: object, format: Format, *, width: int | None = None, color: bool = False) -> str:
    """Return the report in one of `FORMATS`; ends with a line feed.

    `width` (columns) matters to table and svg; None means the terminal's for a table, and 120 for the image.
    `color` matters to table. Raises `TypeError` for what is not a report, `ValueError` for an unknown format.
    """
    from .pages import kind_of

    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    kind = kind_of(report)
    if format == "json":
        return "".join(to_pieces(report, format))
    page = kind.page(report)
    if format == "plain":
        from .plain import to_plain

        return to_plain(page)
    if format == "html":
        from .html import to_html

        return to_html(page)
    from . import terminal

    if format == "svg":
        return terminal.to_svg(page, width=width)
    return terminal.to_table(page, width=width, color=color)


def to_pieces(report: object, format: Format, *, width: int | None = None, color: bool = False) -> Iterator[str]:
    """Yield the text of `to_text`; JSON, which may hold every number of a tensor, a piece at a time."""
    if format == "json":
        from ..reports.json import to_json
        from .pages import kind_of

        yield from to_json(report, kind_of(report).command)
    else:
        yield to_text(report, format, width=width, color=color)


def to_cell(report: object) -> str:
    """Return the report as html for a page that holds other things, such as a notebook."""
    from .html import to_cell
    from .pages import kind_of

    return to_cell(kind_of(report).page(report))
