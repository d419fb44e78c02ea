"""Pages as they stand on a terminal: `pytest --snapshot-update` writes them anew; read the difference.

Numbers with a point, and how many columns they take, differ from one processor to another.
"""

from __future__ import annotations

import re

import pytest
from syrupy.assertion import SnapshotAssertion

from mha_inspect.render.formats import to_text

from .samples import report

TABLES = ("check", "params", "layers", "diff-checkpoints", "params-checkpoint", "trace-decode")
WIDTHS = [*((name, 100) for name in TABLES), ("trace-full", 60)]


@pytest.mark.parametrize(("name", "width"), WIDTHS)
def test_table(name: str, width: int, snapshot: SnapshotAssertion) -> None:
    text = re.sub(r"torch \d[\w.+]*", "torch #", to_text(report(name), "table", width=width))
    text = re.sub(r"-?\d+(\.\d+)?e[-+]?\d+|-?\d+\.\d+|10[⁰¹²³⁴⁵⁶⁷⁸⁹]+|/tmp/\S+|\.py:\d+", "#", text)
    assert re.sub(r" +", " ", re.sub("─+", "─", text)) == snapshot
