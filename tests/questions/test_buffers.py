"""Buffers are no weights: each side of a comparison keeps its own, and they count as no parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.compare.shared_weights import differing_buffers

from ..corpus.idioms import PerHead
from ..corpus.pairs import WIDTH, Buffers, N


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(3))


def made(make: Callable[..., nn.Module], seed: int = 0, **settings: object) -> nn.Module:
    torch.manual_seed(seed)
    return make(**settings).eval()


def test_buffers_of_another_dtype_are_compared_within_its_rounding():
    left, right = made(Buffers, slope=0.3), made(Buffers, slope=0.3).bfloat16()
    assert differing_buffers(left, right) == ()
    assert differing_buffers(left, right.float()) == ("slopes",)


def test_a_head_count_does_not_change_parameters_by_its_buffers(x):
    report = mha_inspect.compare_heads((1, 2), lambda heads: PerHead(WIDTH, heads), x)
    assert [count.same_parameters for count in report.counts] == [True, True]
    assert not any("tril" in sentence for sentence in report.answer)


def test_buffers_of_a_checkpoint_are_told_from_weights(tmp_path: Path, x):
    model = made(Buffers)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "index"}
    state["tril"] = torch.ones(N + 2, N + 2).tril()
    torch.save(state, tmp_path / "x.pt")
    report = mha_inspect.params(tmp_path / "x.pt", x, like=model)
    assert [(missing.name, missing.buffer) for missing in report.like.missing] == [("index", True)]
    assert [(row.name, row.buffer) for row in report.like.wrong_shape] == [("tril", True)]


def test_a_module_that_does_not_run_without_memory_still_tells_how_a_file_fits(invoke, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Mine(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.q_proj = nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        return self.q_proj(x) * torch.ones(4)\n"
    )
    torch.save({"q_proj.weight": torch.zeros(4, 4), "q_proj.bias": torch.zeros(4)}, tmp_path / "x.pt")
    code, out, err = invoke("params", str(tmp_path / "x.pt"), "--like", f"{tmp_path / 'mine.py'}:Mine")
    assert (code, err) == (0, "")
    assert "2 with the same name and shape" in out
    assert "Mine could not be run without memory" in out
    assert "a run of Mine" not in out
