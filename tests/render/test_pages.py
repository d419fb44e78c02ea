"""Pages as they stand on a terminal: `pytest --snapshot-update` writes them anew; read the difference.

Numbers with a point, and how many columns they take, differ from one processor to another.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from syrupy.assertion import SnapshotAssertion

from mha_inspect import text
from mha_inspect.render.formats import to_text
from mha_inspect.render.page import Column, Page, section, table
from mha_inspect.render.terminal import to_table

from .samples import report

TABLES = ("check", "params", "layers", "diff-checkpoints", "params-checkpoint", "trace-decode")
WIDTHS = [*((name, 100) for name in TABLES), ("trace-full", 60)]


@pytest.mark.parametrize(("name", "width"), WIDTHS)
def test_table(name: str, width: int, snapshot: SnapshotAssertion) -> None:
    shown = re.sub(r"torch \d[\w.+]*", "torch #", to_text(report(name), "table", width=width))
    shown = re.sub(r"-?\d+(\.\d+)?e[-+]?\d+|-?\d+\.\d+|10[⁰¹²³⁴⁵⁶⁷⁸⁹]+|/tmp/\S+|\.py:\d+", "#", shown)
    assert re.sub(r" +", " ", re.sub("─+", "─", shown)) == snapshot


@pytest.mark.parametrize("width", range(46, 101, 3))
def test_a_shape_wraps_between_its_sizes_and_breaks_no_number(width: int) -> None:
    sizes = (21, 128, 1536)
    columns = [Column(f"c{place}", lambda _: text.shape(sizes), tone="shape") for place in range(6)]
    page = Page("title", "", "", (section("shapes", table([None], columns)),))
    numbers = re.findall(r"(?<!c)\d+", to_table(page, width=width, color=False))
    assert Counter(numbers) == Counter(map(str, sizes * 6))
