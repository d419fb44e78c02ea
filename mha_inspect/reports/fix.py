"""Define the report of `fix`."""

from __future__ import annotations

from dataclasses import dataclass

from ..explained import explain_fields
from .check import Finding
from .common import Environment, LayerInfo, Report


@dataclass(frozen=True, repr=False)
class FixReport(Report):
    """The problems of a module, and a patch of its file with which they no longer occur."""

    command = "fix"

    environment: Environment
    """The conditions of the run: device, dtype, seed and version of torch."""
    layer: LayerInfo
    """The inspected layer with its sizes."""
    file: str
    """The file that the patch is of."""
    problems: tuple[Finding, ...]
    """The problems of the file as it is. The check `raises` is of a forward that raises."""
    patch: str
    """A unified diff that was run; empty if none was found."""
    alternative: str
    """Another patch that is as small, with equal outputs; empty if there is none."""
    rivals: tuple[str, ...]
    """Patches that are equally small and whose outputs differ: which one is meant is not known, so none is written."""
    remaining: tuple[Finding, ...]
    """The problems that remain with the patch."""
    reason: str
    """Why a problem remains, as a sentence; empty if none remains."""
    edits_run: int
    """The number of edits that were run."""

    @property
    def ok(self) -> bool:
        """Whether no problem remains."""
        return not self.remaining


explain_fields(globals())
