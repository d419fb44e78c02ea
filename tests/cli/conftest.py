"""What the tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def mine(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file with the `CODE` of a test's module: the user's own."""
    path = tmp_path / "mine.py"
    path.write_text(request.module.CODE)
    return str(path)
