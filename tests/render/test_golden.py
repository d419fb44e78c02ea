"""Every sample in every text format, as it is meant to look."""

from __future__ import annotations

import pytest

from mha_inspect.render import to_text

from .samples import REPORTS

TABLE_WIDTHS = (60, 100, 140)


@pytest.mark.parametrize("name", REPORTS)
def test_plain_looks_as_it_is_meant_to(name, golden):
    golden(f"{name}.plain.txt", to_text(REPORTS[name], "plain"))


@pytest.mark.parametrize("width", TABLE_WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_table_looks_as_it_is_meant_to(name, width, golden):
    golden(f"{name}.table.{width}.txt", to_text(REPORTS[name], "table", width=width))


@pytest.mark.parametrize("name", REPORTS)
def test_json_is_as_it_is_meant_to_be(name, golden):
    golden(f"{name}.json", to_text(REPORTS[name], "json"))
