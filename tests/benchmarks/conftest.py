"""Benchmarks, run on request: `pytest tests/benchmarks/bench_*.py`. The last table puts each ratio beside its bound.

They are no tests: nothing fails because a clock ran slow. Each pair is timed in turn, A B A B, so that a machine whose
speed drifts slows both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

ROWS: list[Row] = []


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    against: str
    ratio: float
    at_most: float
    detail: str


@pytest.fixture
def side_by_side(benchmark: Any) -> Callable[..., None]:
    """Time two callables in turn: `side_by_side("what", ours, "against", theirs, at_most=1.3)`."""

    def run(
        what: str, ours: Callable[[], Any], against: str, theirs: Callable[[], Any], *, at_most: float, rounds: int = 9
    ) -> None:
        ours()
        theirs()
        pairs = []
        for _ in range(rounds):
            start = time.perf_counter()
            ours()
            middle = time.perf_counter()
            theirs()
            pairs.append((middle - start, time.perf_counter() - middle))
        a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(x / y for x, y in pairs)
        ROWS.append(Row(what, against, ratio, at_most, f"{a * 1e3:.1f} ms against {b * 1e3:.1f} ms"))
        benchmark.pedantic(ours, rounds=3)

    return run


@pytest.fixture
def add_row() -> Callable[..., None]:
    """Add a ratio that was measured otherwise, such as one of memory."""
    return lambda *fields: ROWS.append(Row(*fields))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    terminalreporter.section("ratios")
    width = max(len(f"{row.what} / {row.against}") for row in ROWS)
    for row in ROWS:
        within = "within" if row.ratio <= row.at_most else "ABOVE "
        name = f"{row.what} / {row.against}"
        terminalreporter.write_line(f"{name:{width}}  {row.ratio:5.2f}  {within} {row.at_most:.2f}  {row.detail}")
