"""A module whose batch is turned inside says nothing of the batch outside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

B, N, HEADS, WIDTH = 2, 7, 3, 12
X = torch.randn(B, N, WIDTH, generator=torch.Generator().manual_seed(0))


class Turned(nn.Module):
    """PointerNet and SAM 2: the batch is put behind the positions, or before them, inside."""

    def __init__(self, batch_first: bool | None) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS)
        if batch_first is not None:
            self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.inner.batch_first else x.transpose(0, 1)
        return self.inner(x, x, x)[0].transpose(0, 1)


@pytest.mark.parametrize(("batch_first", "found"), [(None, []), (False, [False])])
def test_the_layout_inside_is_no_proof_of_the_layout_outside(
    batch_first: bool | None, found: list[bool], tmp_path: Path, invoke: Callable[..., Any]
) -> None:
    lines = f"from {__name__} import Turned, X\n\n\ndef made():\n    return Turned({batch_first}), (X,)\n"
    (tmp_path / "made.py").write_text(lines, encoding="utf-8")
    code, out, err = invoke("check", f"{tmp_path / 'made.py'}:made", "--json")
    assert code == 0, err
    assert [finding["sure"] for finding in json.loads(out)["findings"] if finding["check"] == "batch"] == found
