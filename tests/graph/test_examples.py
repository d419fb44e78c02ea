"""The examples in docstrings are real: they run against torch."""

from __future__ import annotations

import doctest

import pytest

from mha_inspect.graph import axis, dataflow, indices, label
from mha_inspect.naming import axes, placement, roles


@pytest.mark.parametrize("module", [axis, dataflow, indices, label, axes, placement, roles])
def test_an_example_gives_what_its_docstring_shows(module) -> None:
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed
