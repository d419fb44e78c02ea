"""Benchmarks, run on request: `pytest tests/benchmarks/bench_*.py`. The last table puts each ratio beside its bound.

They are no tests: nothing fails because a clock ran slow. Each pair is timed in turn, A B B A, in CPU time, so that a
machine whose speed drifts, or that others use, slows both alike. Beside the median of the pairs stands where the middle
half of them lies: where that is wide, the machine was busy, and a few hundredths mean nothing.
"""

from __future__ import annotations

import ctypes
import resource
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch

ROWS: list[Row] = []

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h


@pytest.fixture(scope="session", autouse=True)
def keep_freed_memory() -> None:
    """Keep glibc from handing freed memory back to the system.

    Whether it does between two runs, so that the next has to fault it in again for up to a tenth of a forward's time,
    hangs on where on the heap other things happen to lie, and not on what is measured.
    """
    with suppress(AttributeError, OSError, TypeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 2**30)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Run torch in one thread: others spin while they wait for the next operation, and that counts as CPU time."""
    torch.set_num_threads(1)


def cpu_time() -> float:
    """Return the seconds of CPU time that this process and those that it has waited for took."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


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
        for place in range(rounds):
            pair = [0.0, 0.0]
            for side in (0, 1) if place % 2 == 0 else (1, 0):
                start = cpu_time()
                (ours, theirs)[side]()
                pair[side] = cpu_time() - start
            pairs.append(pair)
        a, b = (statistics.median(side) for side in zip(*pairs, strict=True))
        low, ratio, high = statistics.quantiles((x / y for x, y in pairs), n=4)
        detail = f"{a * 1e3:.1f} ms against {b * 1e3:.1f} ms, half of the pairs {low:.2f} to {high:.2f}"
        ROWS.append(Row(what, against, ratio, at_most, detail))
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
