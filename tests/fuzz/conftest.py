"""A few hundred cases that are the same each time; `--fuzz-cases 100000 --hypothesis-seed 7` draws others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


@pytest.fixture
def try_all(request: pytest.FixtureRequest) -> Callable[[Callable[[Any], None], st.SearchStrategy[Any], int], None]:
    """Run a check on drawn cases: `try_all(check, cases, 200)`, that many where the command line says none."""

    def run(check: Callable[[Any], None], cases: st.SearchStrategy[Any], number: int) -> None:
        asked = request.config.getoption("fuzz_cases")
        settings(
            max_examples=asked or number,
            derandomize=asked is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            phases=[phase for phase in Phase if phase is not Phase.explain],  # it traces every line, and takes its time
        )(given(cases)(lambda case: check(case)))()

    return run
