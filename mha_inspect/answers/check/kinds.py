"""What is judged once for each kind of attention, however many layers have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ...reports.check import Finding
from .bench import Bench, NotPossibleError
from .evidence import kinds
from .tokens import LostError, Tokens

Judge = Callable[[Bench, Tokens], Iterator[Finding]]
"""Yields what is wrong with an attention. Raises `LostError` where that cannot be told."""


def each_kind(bench: Bench, judge: Judge, without: str = "") -> Iterator[Finding]:
    """Yield what a judge finds in each kind of attention, with its module, and how many attentions have it.

    Raises `NotPossibleError`, saying what is `without`, where it can be told of none; unless nothing is said of that.
    """
    is_told = not without
    for found, names, count in kinds(bench.seen):
        try:
            findings = list(judge(bench, Tokens(bench.flow, found, names)))
        except LostError:
            continue
        is_told = True
        more = f" The same in {count} attentions." if count > 1 else ""
        for finding in findings:
            yield replace(finding, module=found.module, evidence=finding.evidence + more)
    if not is_told:
        raise NotPossibleError(without)
