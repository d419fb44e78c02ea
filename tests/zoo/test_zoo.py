"""Libraries that others wrote: everything that is told of them is measured.

Outside of CI: `pip install -e .[zoo]`, then `pytest tests/zoo`, or `python -m zoo` in tests for a list by library.
"""

from __future__ import annotations

import pytest
import torch

from . import configurations
from .oracle import Configuration, judge

pytest.importorskip("x_transformers", reason="the zoo is an extra: pip install -e .[zoo]")


@pytest.mark.parametrize("own", configurations(), ids=lambda own: own.name)
def test_what_is_told_is_so(own: Configuration) -> None:
    torch.manual_seed(0)
    try:
        found = judge(own)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    assert (found.crash, found.wrong) == ([], [])
