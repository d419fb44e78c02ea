"""The registry of checks: `@rule` registers a function under its name, and its docstring is its page.

@rule(runs=True, after=("finite",))
def repeat(evidence: Evidence) -> Iterator[Finding]:
    \"\"\"Two runs in eval mode give the same output.

    Why it matters, an example that is wrong, and the lines that make it right.
    \"\"\"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from ..reports.check import Finding, SkippedCheck
from .evidence import Evidence
from .intent import CHECKS
from .pages import claim_in

Find = Callable[[Evidence], Iterator[Finding | SkippedCheck]] | Callable[[Evidence], Iterator[Finding]]
"""Yields findings; raises `NotPossibleError` with the reason if the check cannot be decided."""
Found = TypeVar("Found", bound=Find)


@dataclass(frozen=True)
class Rule:
    """A check: a function that searches the evidence for faults."""

    name: str
    claim: str
    """What is true if it finds none."""
    find: Find
    runs: bool = False
    """Whether the check runs the module again."""
    on_meta: str = ""
    """What is true if the check passes on meta; empty if the check needs numbers."""
    after: tuple[str, ...] = ()
    """Checks whose findings explain the findings of this check: it is skipped until they pass."""
    confirm: str = ""
    """The option that confirms or dismisses a finding that is not sure; empty: --skip with the name."""
    by_position: bool = False
    """Whether the check relies on one token per position."""
    of_outputs: str = ""
    """What is true if the check passes for a module without attention, by its outputs; empty if it needs attention."""


RULES: dict[str, Rule] = {}
"""The rules that are loaded, by name."""


def rule(
    *,
    runs: bool = False,
    on_meta: str = "",
    after: tuple[str, ...] = (),
    confirm: str = "",
    by_position: bool = False,
    of_outputs: str = "",
) -> Callable[[Found], Found]:
    """Register a function as the check of its name; the first line of its docstring is what is true if it passes."""

    def registered(find: Found) -> Found:
        name = find.__name__
        claim = claim_in(find.__doc__ or "")
        RULES[name] = Rule(name, claim, find, runs, on_meta, after, confirm, by_position, of_outputs)
        return find

    return registered


def all_rules() -> dict[str, Rule]:
    """Return every rule, causes before their consequences."""
    for name in CHECKS:
        import_module(f".rules.{name}", __package__)
    return {name: RULES[name] for name in CHECKS}
