"""Golden files: `pytest tests/render --update-golden` writes them anew; look at the difference before keeping it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files of the renderers anew")
    parser.addoption("--update-schemas", action="store_true", help="write the JSON Schemas anew, from the reports")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Asserts that a text is what the golden file of that name holds."""
    # Run from the root without naming this folder, pytest reads this file too late to add the option.
    update = request.config.getoption("--update-golden", default=False)

    def check(name: str, text: str) -> None:
        file = GOLDEN / name
        if update:
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8"), f"{name} is stale: pytest tests/render --update-golden"

    return check
