"""Define the report of `check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..explained import explain_fields
from .common import Environment, LayerInfo, Report


@dataclass(frozen=True)
class Finding:
    """A fault, or a possible fault."""

    check: str
    """Name of the check that found it."""
    sentence: str
    """The fault, with its size."""
    evidence: str
    """The input that was changed and the outputs that changed, or the axes that were mixed."""
    sure: bool = True
    """False if it may be intended; then it does not fail the run."""
    source: str = ""
    """Source line, e.g. `attention.py:41`; empty if not known."""
    module: str = ""
    """Path of the module; empty for the checked module itself."""
    fix: str = ""
    """How to fix the fault; empty if the evidence shows no fix."""
    confirm: str = ""
    """For a possible fault: the option that confirms or dismisses it, e.g. `--scale sqrt_head_dim`."""


@dataclass(frozen=True)
class Fact:
    """An observed property of the attention, which may be intended."""

    name: str
    """The property: `scale`, `who sees whom`."""
    sentence: str
    """The property in words."""
    picture: tuple[str, ...] = ()
    """Lines of a picture, with one row per query and one column per key; empty if there is no picture."""


@dataclass(frozen=True)
class PassedCheck:
    """A check that ran and passed."""

    check: str
    """Name of the check."""
    sentence: str
    """The property that is true because the check passed."""


@dataclass(frozen=True)
class SkippedCheck:
    """A check that was not run, and why."""

    check: str
    """Name of the check."""
    reason: str
    """Why it was not run, as a phrase."""
    _brief: str = ""
    """A short form of the reason, shared by similar checks; empty if there is none."""
    _give: str = ""
    """What to give so that the check can run, the end of the reason; empty if any other input may do."""
    _in_part: bool = False
    """Whether the check ran, and the reason is about a part that it could not judge."""


@dataclass(frozen=True, repr=False)
class CheckReport(Report):
    """The faults and properties of a module's attention, and the checks that passed or were skipped."""

    command = "check"

    environment: Environment
    """The conditions of the run: device, dtype, seed and version of torch."""
    layer: LayerInfo
    """The inspected layer with its sizes."""
    intent: dict[str, Any]
    """The declared properties, by name."""
    findings: tuple[Finding, ...]
    """The faults, and after them the possible faults."""
    facts: tuple[Fact, ...]
    """Observed properties that may be intended."""
    passed: tuple[PassedCheck, ...]
    """The checks that passed."""
    left_out: tuple[SkippedCheck, ...]
    """The checks that were skipped."""
    runs: int
    """Number of runs of the module."""
    notes: tuple[str, ...] = ()
    """Important sentences on this report."""
    patch: str | None = None
    """A unified diff of the target's own file with which no check fails; None if none was found in the time."""

    @property
    def ok(self) -> bool:
        """Whether no check failed; a finding that is not sure does not count."""
        return not any(finding.sure for finding in self.findings)


explain_fields(globals())
