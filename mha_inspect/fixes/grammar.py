"""The grammar of source edits: its rows by name, and the edits that they make of an expression.

A row is a function of an expression and its source, which yields the replacements of each way to write it. Its doc
comment has examples, `what the user wrote -> what a fix may be`, and each is a test.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from .source import Edit, Replacement, Source

Ways = Iterator[Sequence[Replacement]]
RowFunction = Callable[[ast.AST, Source], Ways]
RAISES = "raises"
"""In the place of the name of a check: the forward raises."""
_FILES = ("axes", "equations", "masks", "names", "numbers", "scales", "softmaxes")


@dataclass(frozen=True)
class Row:
    """One kind of edit."""

    name: str
    checks: tuple[str, ...]
    """The checks whose findings it may fix; `RAISES` of a forward that raises."""
    of: RowFunction


_ROWS: dict[str, Row] = {}


def row(*checks: str) -> Callable[[RowFunction], RowFunction]:
    """Register a row for the findings of these checks."""

    def register(function: RowFunction) -> RowFunction:
        _ROWS[function.__name__] = Row(function.__name__, checks, function)
        return function

    return register


@cache
def all_rows() -> dict[str, Row]:
    """Return every row by its name."""
    for file in _FILES:
        import_module(f".rows.{file}", __package__)
    return _ROWS


def edits(source: Source, nodes: Iterable[ast.AST], check: str) -> Iterator[Edit]:
    """Yield the edits of these expressions that may fix a finding of a check."""
    rows = [row for row in all_rows().values() if check in row.checks]
    for node in nodes:
        for row in rows:
            for replacements in row.of(node, source):
                yield Edit(row.name, tuple(replacements))
