"""What trace says of its one run: right code is not accused, and mistakes that one run shows are problems."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect.errors

from ..corpus.every import ENTRIES
from ..corpus.mutants import MUTANTS
from ..corpus.test_mutants import mutated


def test_what_one_run_shows_is_found_as_often_as_it_was(tmp_path: Path) -> None:
    """Of one-line mistakes: the others change what other inputs do, and are for check."""
    problems = silent = 0
    for name, mistake, right, wrong, *_ in MUTANTS[::3]:
        module = mutated(name, right, wrong, tmp_path / f"{name}_{mistake}.py")
        try:
            with torch.no_grad():
                trace = mha_inspect.trace(module, **ENTRIES[name].arguments()[1])
        except mha_inspect.errors.ForwardError:
            continue
        problems += any(finding.sure for finding in trace.findings)
        silent += not trace.findings
    assert problems >= 11
    assert silent <= 17


FILE = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, embed_dim=16, num_heads=2, over=-1, scale=None):
        super().__init__()
        self.heads, self.over, self.scale = num_heads, over, scale
        self.qkv, self.out = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)
    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return self.out(((q @ k.mT * scale).softmax(self.over) @ v).transpose(1, 2).flatten(2))
"""


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ((), "nothing wrong in this run: 1 attention, 2 heads of 8"),
        (("over=-2",), "1 problem: The softmax runs over the queries"),
        (("scale=1.0",), "1 suspicion: "),
    ],
)
def test_exit_codes(
    invoke: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: tuple[str, ...],
    begins: str,
) -> None:
    (tmp_path / "model.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    words = [word for setting in settings for word in ("--set", setting)]
    answer = invoke("model.py", *words)
    assert answer.code == 0, answer.err
    assert answer.out.startswith(begins)


def test_a_suspicion_names_the_option_of_check_that_settles_it(
    invoke: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    (finding,) = json.loads(invoke("model.py", "--set", "scale=1.0", "--json").out)["findings"]
    assert finding["confirm"] == "--scale sqrt_head_dim"
    assert invoke("check", "model.py", "--set", "scale=1.0").code == 0
    assert invoke("check", "model.py", "--set", "scale=1.0", "--strict").code == 1
    assert invoke("check", "model.py", "--set", "scale=1.0", *finding["confirm"].split()).code == 1


def test_a_run_that_needs_much_memory_is_not_judged_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mha_inspect.questions.trace.ROOM", 1000)
    layer, x = nn.MultiheadAttention(24, 2, batch_first=True).eval(), torch.randn(2, 5, 24)
    trace = mha_inspect.trace(layer, x, x, x)
    assert trace.findings == ()
    assert trace.unjudged is not None
    assert trace.verdict.startswith("ran, not judged: 1 attention")


def test_a_run_of_the_size_of_gpt2_small_is_judged() -> None:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    stack = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(64)
    trace = mha_inspect.trace(stack, torch.randn(2, 64, 768), mask)
    assert (trace.unjudged, trace.findings) == (None, ())


def test_weights_that_are_too_large_to_keep_are_said_to_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fused(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    monkeypatch.setattr("mha_inspect.questions.trace.ROOM", 2**19)
    trace = mha_inspect.trace(Fused(), torch.randn(1, 2, 256, 8))
    assert trace.unjudged is None
    assert any("too large to be judged" in note for note in trace.notes)


WITH_HEADS = """
from torch import nn

class Attention(nn.Module):
    def __init__(self, embed_dim=64, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (y.view(b, n, self.num_heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))
"""


@pytest.mark.parametrize(
    ("right", "wrong", "check"),
    [
        (".view(b, n, self.num_heads, -1).transpose(1, 2)", ".reshape(b, self.num_heads, n, -1)", "heads"),
        (" / q.shape[-1] ** 0.5", "", "scale"),
        ("", "", ""),
    ],
)
def test_a_comparison_of_head_counts_says_what_trace_finds(
    tmp_path: Path, invoke: Callable[..., Any], right: str, wrong: str, check: str
) -> None:
    path = tmp_path / f"heads_{check}.py"
    path.write_text(WITH_HEADS.replace(right, wrong), encoding="utf-8")
    found = json.loads(invoke("compare-heads", str(path), "--heads", "1,2,4", "--json").out)["findings"]
    traced = json.loads(invoke("trace", str(path), "--num-heads", "2", "--json").out)["findings"]
    assert [(finding["check"], finding["source"]) for finding in found] == [
        (finding["check"], finding["source"]) for finding in traced
    ]
    assert check in [finding["check"] for finding in found] or not check
    said = "See mha-inspect trace TARGET --num-heads 2." in invoke("compare-heads", str(path), "--heads", "1,2,4").out
    assert said == bool(check)
