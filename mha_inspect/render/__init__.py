"""Reports as text: table, plain, json, html.

A report is turned into a `Page` once, and every format but JSON shows that; JSON is the report itself.
Nothing heavy is imported here: Rich only for a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from .page import Page


@dataclass(frozen=True)
class Kind:
    """How one class of report is rendered."""

    command: str
    """The command that makes it: the `command` of its JSON, and the name of its schema."""
    module: str
    """The file of the report, and that of its page."""

    def page(self, report: Any) -> Page:
        """Return the page of a report of this kind."""
        made: Page = getattr(import_module(f".{self.module}", __package__), f"{self.module}_page")(report)
        return made


KINDS = {
    "Trace": Kind("trace", "trace"),
    "ParamsReport": Kind("params", "params"),
    "CompareHeadsReport": Kind("compare-heads", "compare_heads"),
    "DiffReport": Kind("diff", "diff"),
    "CheckpointDiffReport": Kind("diff-checkpoints", "checkpoint_diff"),
    "CheckReport": Kind("check", "check"),
    "LayersReport": Kind("layers", "layers"),
}
"""Class in `reports` to how it is rendered."""


def kind_of(report: object) -> Kind:
    """Return how this report is rendered. Raises `TypeError` for what is not a report."""
    name = type(report).__name__
    kind = KINDS.get(name)
    if kind is None or not type(report).__module__.endswith(f".reports.{kind.module}"):
        raise TypeError(f"{name} is not a report that can be rendered: {', '.join(KINDS)}")
    return kind


Format = Literal["table", "plain", "json", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)

__all__ = ["FORMATS", "Format", "to_cell", "to_text"]


def to_text(report: object, format: Format, *, width: int | None = None, color: bool = False) -> str:
    """Return the report in one of `FORMATS`; ends with a line feed.

    `width` (columns) and `color` matter to table; a width of None is the terminal's.

    Raises `TypeError` for what is not a report, `ValueError` for an unknown format.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is not one of {', '.join(FORMATS)}")
    kind = kind_of(report)
    if format == "json":
        from ..reports.json import to_json

        return to_json(report, kind.command)
    if format == "plain":
        from .plain import to_plain

        return to_plain(kind.page(report))
    if format == "html":
        from .html import to_html

        return to_html(kind.page(report))
    from .terminal import to_table

    return to_table(kind.page(report), width=width, color=color)


def to_cell(report: object) -> str:
    """Return the report as html for a page that holds other things, such as a notebook."""
    from .html import to_cell

    return to_cell(kind_of(report).page(report))
