"""Reports as text: table, plain, json, svg, html.

A report is turned into a `Document` once, and every format but JSON shows that document; JSON is the report itself.
Nothing heavy is imported here: Rich only for table, svg and html.
"""

from __future__ import annotations

from typing import Literal, get_args

Format = Literal["table", "plain", "json", "svg", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)

__all__ = ["FORMATS", "Format", "to_cell", "to_text"]


def to_text(report: object, format: Format, *, width: int | None = None, color: bool = False) -> str:
    """The report in one of `FORMATS`; ends with a line feed.

    `width` (columns) matters to table, svg and html; None means the terminal's for a table, and 120 for the others.
    `color` matters to table. Raises `TypeError` for what is not a report, `ValueError` for an unknown format.
    """
    from .kinds import kind_of

    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    kind = kind_of(report)
    if format == "json":
        from .json_text import to_json

        return to_json(report, kind.command)
    document = kind.document(report)
    if format == "plain":
        from .plain import to_plain

        return to_plain(document)
    from . import terminal

    if format == "table":
        return terminal.to_table(document, width=width, color=color)
    export = terminal.to_svg if format == "svg" else terminal.to_html
    return export(document, width=width)


def to_cell(report: object) -> str:
    """The report as html for a page that holds other things, such as a notebook."""
    from . import terminal
    from .kinds import kind_of

    return terminal.to_cell(kind_of(report).document(report))
