"""Options of the tests of pages and documents."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-schemas", action="store_true", help="write the JSON Schemas anew, from the reports")
