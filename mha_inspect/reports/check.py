"""The report of `check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .common import Environment, LayerInfo, Report


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or may be."""

    check: str
    sentence: str
    evidence: str
    sure: bool = True
    """False: it may be meant so, and does not fail the run."""
    source: str = ""
    module: str = ""
    fix: str = ""


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


@dataclass(frozen=True, repr=False)
class CheckReport(Report):
    """What is wrong with a module's attention, what is so, and what could not be told."""

    command = "check"

    environment: Environment
    layer: LayerInfo
    intent: dict[str, Any]
    findings: tuple[Finding, ...]
    facts: tuple[Fact, ...]
    heads: tuple[Head, ...]
    held: tuple[PassedCheck, ...]
    left_out: tuple[SkippedCheck, ...]
    runs: int
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Return whether something is wrong for sure."""
        return any(finding.sure for finding in self.findings)
