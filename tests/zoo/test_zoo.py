"""Libraries that others wrote: everything that is told of them is measured.

Outside of CI: `pip install -e .[zoo]`, then `pytest tests/zoo`.
"""

from __future__ import annotations

import pytest
import torch

from . import configurations
from .oracle import Configuration, judge

for name in ("x_transformers", "vit_pytorch", "timm", "keras", "local_attention", "perceiver_pytorch"):
    pytest.importorskip(name, reason="the zoo is an extra: pip install -e .[zoo]")


@pytest.mark.parametrize("own", configurations(), ids=lambda own: own.name)
def test_what_is_told_is_so(own: Configuration) -> None:
    torch.manual_seed(0)
    found = judge(own)
    assert (found.crash, found.wrong) == ([], [])
