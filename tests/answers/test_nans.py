"""Where the NaN of what a module returns begins, as a line of its trace says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mha_inspect


class Own(nn.Module):
    """Attention whose output has NaN for what comes out below 0; `most` is how often it runs."""

    def __init__(self, most: int = 100) -> None:
        super().__init__()
        self.project, self.most = nn.Linear(6, 18), most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) > self.most:
            raise RuntimeError("it runs once")
        q, k, v = self.project(x).chunk(3, -1)
        return ((q @ k.mT).softmax(-1) @ v).log()


calls: list[torch.Tensor] = []


def said(module: nn.Module, x: torch.Tensor) -> str:
    calls.clear()
    return " ".join(mha_inspect.trace(module, x).notes)


def test_where_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    begins = "NaN: it first appears in the result of aten.log.default ("
    assert begins in said(Own(most=1), x)
    assert len(calls) == 1
    with monkeypatch.context() as patched:  # tensors that take too much are not kept: the module is run again
        patched.setattr("mha_inspect.answers.trace.ROOM", 0)
        assert begins in said(Own(), x)
        assert len(calls) == 2
        assert "Its origin could not be determined, because the module fails in a second run" in said(Own(most=1), x)
    broken = x.clone()
    broken[1, 2, 3] = torch.nan
    assert "has NaN, and so has the input." in said(Own(), broken)
    module = Own()
    with torch.no_grad():
        module.project.bias[4] = torch.nan
    assert "has NaN, and so have parameters or buffers." in said(module, x)
    assert len(calls) == 1
