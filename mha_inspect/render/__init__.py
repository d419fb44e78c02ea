"""Reports as text: table, plain, json, html.

A report is turned into a `Page` once, and every format but JSON shows that; JSON is the report itself.
Nothing heavy is imported here: Rich only for a table.
"""

from __future__ import annotations

import json
from importlib import import_module
from typing import Literal, get_args

from ..reports.report import Report
from ..text import printable_json
from .page import Page

Format = Literal["table", "plain", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)

__all__ = ["FORMATS", "Format", "page_of", "to_cell", "to_text"]


def to_text(report: Report, format: Format, *, width: int | None = None, color: bool = False) -> str:
    """Return the report in one of `FORMATS`; ends with a line feed.

    `width` (columns) and `color` matter to table; a width of None is the terminal's.

    Raises `ValueError` for an unknown format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    if format == "json":
        return printable_json(json.dumps(report.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)) + "\n"
    page = page_of(report)
    if format == "plain":
        from .plain import to_plain

        return to_plain(page)
    if format == "html":
        from .html import to_html

        return to_html(page)
    from .terminal import to_table

    return to_table(page, width=width, color=color)


def to_cell(report: Report) -> str:
    """Return the report as html for a page that holds other things, such as a notebook."""
    from .html import to_cell

    return to_cell(page_of(report))


def page_of(report: Report) -> Page:
    """Return the page of a report."""
    page: Page = import_module(f".{report.command.replace('-', '_')}", __package__).page(report)
    return page
