"""The report of `check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .common import Environment, LayerInfo, Report


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be."""

    check: str
    """Name of the check that found it."""
    sentence: str
    """What is wrong, and by how much."""
    evidence: str
    """What was changed and what moved, or which axes were joined."""
    sure: bool = True
    """False: it may be meant so, and does not fail the run."""
    source: str = ""
    """The line: `attention.py:41`."""
    module: str = ""
    """Path of the module; empty for the checked one itself."""
    fix: str = ""
    """What to do, where the evidence shows it."""


@dataclass(frozen=True)
class Fact:
    """Something that is so, and may well be meant."""

    name: str
    sentence: str
    picture: tuple[str, ...] = ()
    """Lines of a picture: a row a query, a column a key."""


@dataclass(frozen=True)
class Head:
    """What hangs on one head."""

    module: str
    head: int
    output_change: float
    """How much the attention's output changes when the head's context is zeroed, beside the output itself."""
    gradient_share: float | None
    """Its share of the gradient that arrives at all heads, 0 to 1."""


@dataclass(frozen=True)
class PassedCheck:
    """A check that ran and found nothing."""

    check: str
    sentence: str


@dataclass(frozen=True)
class SkippedCheck:
    """What could not be checked."""

    check: str
    reason: str
    _brief: str = ""
    """The reason in two words, where others have the same."""


@dataclass(frozen=True, repr=False)
class CheckReport(Report):
    """What is wrong with a module's attention, what is so, and what could not be told."""

    command = "check"

    environment: Environment
    layer: LayerInfo
    intent: dict[str, Any]
    """What was declared, by name."""
    findings: tuple[Finding, ...]
    facts: tuple[Fact, ...]
    heads: tuple[Head, ...]
    held: tuple[PassedCheck, ...]
    left_out: tuple[SkippedCheck, ...]
    runs: int
    """How often the module was run."""
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no check failed. A finding that only may be wrong does not count."""
        return not any(finding.sure for finding in self.findings)
