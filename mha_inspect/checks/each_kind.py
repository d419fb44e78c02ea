"""Build a check of a whole run from a function that judges one attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps

from ..compare.replay import LostError
from ..graph.attention import Attention
from ..naming.axes import AxisNames
from ..reports.check import Finding
from .evidence import Evidence
from .factors import NotHereError
from .lab import NotPossibleError

Judge = Callable[[Evidence, Attention, AxisNames], Iterator[Finding]]
"""Yields the faults of one attention."""


def of_each_kind(without: str, judge: Judge) -> Callable[[Evidence], Iterator[Finding]]:
    """Build a check from a function that judges one attention and raises `LostError` if it cannot.

    The check yields the findings of each kind of attention, with its module and the number of equal attentions. If an
    attention could not be judged and no other has a fault, it raises `NotPossibleError`, with the reason `without` if
    each judge raised `NotHereError`; or it passes if `without` is empty.
    """

    @wraps(judge)
    def check(evidence: Evidence) -> Iterator[Finding]:
        is_judged = False
        lost: list[LostError] = []
        faults = _Faults()
        for attention, names, count in evidence.kinds:
            try:
                findings = list(judge(evidence, attention, names))
            except NotHereError:
                continue
            except LostError as error:
                lost.append(error)
                continue
            is_judged = True
            for finding in findings:
                faults.add(replace(finding, module=attention.module), count)
        yield from faults.findings()
        if not without:
            return
        if lost:
            _raise_lost(lost[0], in_part=is_judged)
        if not is_judged:
            raise NotPossibleError(without, "none here")

    return check


def _raise_lost(error: LostError, *, in_part: bool) -> None:
    """Raise `NotPossibleError` with why an attention could not be judged."""
    reason = str(error) or "could not be recomputed"
    sentence = str(error) or f"the steps from a projection to the products {reason}"
    if in_part:
        sentence = f"only some attentions could be judged: {sentence}"
    raise NotPossibleError(sentence, reason)


@dataclass
class _Fault:
    """A finding of attentions that have a line in common."""

    finding: Finding
    counts: list[int] = field(default_factory=list)
    """The number of attentions of each kind that has it."""

    def with_count(self) -> Finding:
        """Return the finding with the number of attentions that have it."""
        total = sum(self.counts)
        if total == 1:
            return self.finding
        if len(self.counts) == 1:
            return replace(self.finding, evidence=f"{self.finding.evidence} {total} attentions share this code.")
        return replace(self.finding, evidence=f"{self.finding.evidence} {total} attentions have this fault.")


class _Faults:
    """Findings of attentions, each once: attentions of different code may have a line in common, and its fault."""

    def __init__(self) -> None:
        self._faults: dict[tuple[str, str, str], _Fault] = {}

    def add(self, finding: Finding, count: int) -> None:
        """Add a finding of attentions with equal code."""
        sign = finding.check, finding.sentence, finding.source
        fault = self._faults.setdefault(sign, _Fault(finding))
        fault.counts.append(count)

    def findings(self) -> Iterator[Finding]:
        """Yield each finding with the number of attentions that have it."""
        for fault in self._faults.values():
            yield fault.with_count()
