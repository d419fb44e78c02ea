"""Samples in plain, as a table and as JSON, as they are meant to look."""

from __future__ import annotations

import pytest

from mha_inspect.render.formats import to_text

from .samples import REPORTS

TABLES = ("check", "trace-full", "params-full", "compare-heads", "diff", "diff-checkpoints")
WIDTHS = [*((name, 100) for name in TABLES), ("trace", 60), ("diff", 60)]


@pytest.mark.parametrize("name", REPORTS)
def test_plain_looks_as_it_is_meant_to(name, golden):
    golden(f"{name}.plain.txt", to_text(REPORTS[name], "plain"))


@pytest.mark.parametrize(("name", "width"), WIDTHS)
def test_table_looks_as_it_is_meant_to(name, width, golden):
    golden(f"{name}.table.{width}.txt", to_text(REPORTS[name], "table", width=width))


@pytest.mark.parametrize("name", ["params", "compare-heads"])
def test_json_is_as_it_is_meant_to_be(name, golden):
    golden(f"{name}.json", to_text(REPORTS[name], "json"))
