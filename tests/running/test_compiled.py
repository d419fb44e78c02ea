"""Compiled functions and modules inside a module: their original code is recorded, and nothing stays switched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import mha_inspect
from mha_inspect.errors import ForwardError


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 2).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.qkv, self.proj, self.attend = nn.Linear(8, 24), nn.Linear(8, 8), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (2, 4)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


def compiled_in_place() -> nn.Module:
    module = nn.Sequential(Attention(attend))
    module[0].compile()
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: Attention(torch.compile(attend)),
        lambda: Attention(torch.compile(flex_attention)),
        lambda: torch.compile(Attention(attend)),
        compiled_in_place,
    ],
    ids=["function", "flex", "module", "in place"],
)
def test_the_code_of_what_is_compiled_is_recorded(make):
    torch.manual_seed(0)
    module, x = make().eval(), torch.randn(2, 5, 8)
    before = torch._dynamo.eval_frame._stance
    with torch.no_grad():
        report = mha_inspect.trace(module, x)
        (attention,) = report.attentions
        assert attention.num_heads == 2
        assert "weights" in {stage.name for stage in attention.stages}
        assert not any("cannot be shown" in note for note in report.notes)
    assert torch._dynamo.eval_frame._stance is before


def test_the_setting_is_restored_when_the_forward_raises():
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise ValueError("broken")

    module, before = Attention(torch.compile(broken)), torch._dynamo.eval_frame._stance
    with pytest.raises(ForwardError):
        mha_inspect.trace(module, torch.randn(2, 5, 8))
    assert torch._dynamo.eval_frame._stance is before


attend_compiled = torch.compile(attend, backend="eager")


class Named(Attention):
    """The compiled function is a name of the file, as torch's pages recommend for flex attention."""

    def __init__(self) -> None:
        super().__init__(None)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(-1, (2, 4)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1))
        return self.proj(attend_compiled(q, k, v).transpose(1, 2).flatten(2))


def test_a_block_says_that_compiled_functions_cannot_be_seen():
    module, x = Named().eval(), torch.randn(2, 5, 8)
    with torch.no_grad(), mha_inspect.recording() as seen:
        module(x)
    (note,) = [note for note in seen.trace.notes if "compiled" in note]
    assert note.startswith("The module is using a compiled function (torch.compile), and operations inside")
    assert "every stage is exactly what PyTorch computed" not in str(seen.trace)
    (note,) = [note for note in mha_inspect.trace(module, x).notes if "compiled" in note]
    assert note == "The module is using a compiled function (torch.compile). This run used the original Python code."


def test_what_torch_jit_traced_runs_as_it_does_alone():
    x = torch.randn(2, 5, 8)
    module = nn.Sequential(nn.Linear(8, 8), torch.jit.trace(Attention(attend).eval(), x), nn.ReLU())
    with torch.no_grad():
        expected = module(x)
        with mha_inspect.recording() as seen:
            assert torch.equal(module(x), expected)
    assert len(seen.trace.attentions) == 1
    assert not any("compiled" in note for note in seen.trace.notes)
    assert "every stage is exactly what PyTorch computed" in str(seen.trace)
