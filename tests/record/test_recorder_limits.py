"""What cannot be recorded is said, with what to do; what can be, is not refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import mha_inspect

X = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Attention over six features, which torch.jit can script."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Linear(6, 18)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.packed(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def made(how: str) -> nn.Module:
    torch.manual_seed(0)
    attention = Attention().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how == "compiled":
            return torch.compile(attention, backend="eager")
        if how == "compiled in place":
            attention.compile(backend="aot_eager")
            return attention
        if how == "scripted":
            return torch.jit.script(attention)
        return torch.jit.trace(attention, X)


@pytest.mark.parametrize("how", ["compiled", "compiled in place", "scripted", "traced by torch.jit"])
def test_code_that_is_no_longer_python_runs_as_it_does_alone(how):
    module = nn.Sequential(nn.Linear(6, 6), made(how), nn.ReLU())
    with torch.no_grad():
        expected = module(X)
        with mha_inspect.recording() as seen:
            assert torch.equal(module(X), expected)
        trace = mha_inspect.trace(module, X)
    for shown in (seen.trace, trace):
        assert len(shown.attentions) == 1
        compiled = [note for note in shown.notes if "compiled (torch.compile)" in note]
        assert len(compiled) == how.startswith("compiled")
        assert all(note.startswith("Module 1 is") for note in compiled)
