"""What a file, a class or a layer alone means: it is traced, and a file's outermost module that attends is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ..warm import Answer
from .code import ATTENTION

Program = Callable[..., Answer]

MLP = """
class MLP(nn.Linear):
    def __init__(self, embed_dim=16):
        super().__init__(embed_dim, embed_dim)
"""
BLOCK = """
class Block(nn.Sequential):
    def __init__(self, embed_dim=16, num_heads=2):
        super().__init__(Attention(embed_dim, num_heads), MLP(embed_dim))
"""
NEEDY = """
class Model(nn.Sequential):
    def __init__(self, vocabulary):
        super().__init__(Attention())
"""
FAILING = """
class Failing(Attention):
    def forward(self, x):
        return (self.q(x) @ self.k(x)).softmax(-1) @ x
"""
FILES = {
    "whole.py": ATTENTION + MLP + BLOCK,
    "pair.py": ATTENTION + MLP,
    "failing.py": ATTENTION + FAILING,
    "needy.py": ATTENTION + NEEDY,
    "built.py": ATTENTION + "\nmodel = Attention(8, 4)\n",
    "nothing.py": "number = 1\n",
    "syntax.py": "def f(:\n",
    "raising.py": "raise ValueError('on import')\n",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(invoke: Program, line: str) -> dict[str, Any]:
    answer = invoke(*line.split(), "--json")
    assert answer.code in (0, 1), answer.err
    data: dict[str, Any] = json.loads(answer.out)
    return data


@pytest.mark.parametrize(
    ("typed", "name", "attentions"),
    [
        ("whole.py", "Block", 1),
        ("failing.py:Failing", "Failing", 0),
        ("needy.py", "Attention", 1),
        ("built.py", "Attention", 1),
        ("bert", "bert", 1),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_target_alone_is_traced(invoke: Program, typed: str, name: str, attentions: int) -> None:
    data = report(invoke, typed)
    assert data["command"] == "trace"
    assert data["layer"]["name"] == name
    assert len(data["attentions"]) == attentions


@pytest.mark.usefixtures("here")
def test_a_module_that_the_file_built_is_taken_as_it_is(invoke: Program) -> None:
    (attention,) = report(invoke, "built.py")["attentions"]
    assert (attention["num_heads"], attention["head_dim"]) == (4, 2)


@pytest.mark.parametrize(
    "line", ["params whole.py", "check whole", "compare-heads whole.py --heads 2,4", "diff pair.py bert --embed-dim 16"]
)
@pytest.mark.usefixtures("here")
def test_every_command_takes_a_file_alone(invoke: Program, line: str) -> None:
    answer = invoke(*line.split())
    assert answer.code in (0, 1), answer.err


@pytest.mark.usefixtures("here")
def test_a_checkpoint_alone_is_its_parameters(invoke: Program) -> None:
    torch.save({"q_proj.weight": torch.ones(8, 8), "k_proj.weight": torch.ones(8, 8)}, "weights.pt")
    assert report(invoke, "weights.pt")["command"] == "params"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("Attention", "is defined in 5 files here"),
        ("nothing.py", "defines neither a torch.nn.Module"),
        ("nobody", "no such command, file"),
        ("syntax.py", "syntax.py cannot be imported: SyntaxError"),
        ("check raising.py", "raising.py cannot be imported: ValueError: on import"),
        ("trace splitheads", "Did you mean split-heads?"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_cannot_be_meant_is_refused_with_a_way(invoke: Program, typed: str, said: str) -> None:
    answer = invoke(*typed.split())
    assert answer.code == 2
    assert said in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    "line",
    [
        "torch.nn.MultiheadAttention --num-heads 4",
        "nn.MultiheadAttention --num_heads 4",
        "MultiheadAttention --num_heads=4",
        "--num_heads 4",
        "--num-heads 4 --embed_dim 512",
    ],
)
def test_a_name_as_python_has_it_or_options_alone_are_traced(here: Path, invoke: Program, line: str) -> None:
    (attention,) = report(invoke, line)["attentions"]
    assert (attention["num_heads"], attention["head_dim"]) == (4, 128)


def test_a_class_of_a_file_here_goes_before_one_of_torch(here: Path, invoke: Program) -> None:
    (here / "mine.py").write_text(ATTENTION.replace("Attention", "MultiheadAttention"))
    (attention,) = report(invoke, "MultiheadAttention --embed-dim 16")["attentions"]
    assert attention["num_heads"] == 2


def test_a_notebook_is_told_how_it_is_done_in_one(here: Path, invoke: Program) -> None:
    answer = invoke("model.ipynb")
    assert answer.code == 2
    assert "mha_inspect.trace(module, x)" in answer.err


def test_what_scores_take_is_said_before_anything_runs(here: Path, invoke: Program) -> None:
    answer = invoke("torch", "--seq-len", "1000000", "--embed-dim", "8", "--num-heads", "1")
    assert answer.code == 3
    first, second = (line for line in answer.err.splitlines() if "seconds so far" not in line)
    assert "those of one head, 1000000 × 1000000, take 3.6 TiB" in first
    assert "--device meta" in first
    assert "out of memory" in second


@pytest.mark.parametrize(("name", "typed"), [("bert.py", "bert.py"), ("torch", "./torch")])
def test_a_layer_wins_over_a_path_of_its_name_and_it_is_said(invoke, tmp_path, monkeypatch, name, typed):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    if path.suffix:
        path.write_text(ATTENTION, encoding="utf-8")
    else:
        path.mkdir()
        torch.save({"q_proj.weight": torch.zeros(8, 8)}, path / "model.pt")
    layer = path.stem
    code, out, err = invoke("params", layer)
    assert (code, out) == invoke("params", layer, "-q")[:2]
    assert out.startswith(f"layer {layer}")
    assert err == f"mha-inspect: {layer} is the built-in layer. For the path of this name, type {typed}.\n"
    assert invoke("params", typed, "-q").out.startswith("checkpoint torch" if layer == "torch" else "layer Attention")
