"""Which reports can be rendered. A new one needs a file of its own here, as in `reports`, and a line below.

Only what is rendered is imported: to make the classes of all reports takes as long as to trace a small layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

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
