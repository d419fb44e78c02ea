"""A config without an annotation is what the file has for it: a class, an object or a dictionary, and this is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from mha_inspect.__main__ import run

_LAYER = """
class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x)[0]
"""
_BY_ATTRIBUTE = _LAYER.replace("WIDTH", "config.n_embd").replace("HEADS", "config.n_head")
_BY_KEY = _LAYER.replace("WIDTH", 'config["n_embd"]').replace("HEADS", 'config["n_head"]')
_CLASS = "class {}:\n    def __init__(self):\n        self.n_embd, self.n_head = 24, 3\n"

_FILES = {
    "a class": (_CLASS.format("GPTConfig") + _BY_ATTRIBUTE, "GPTConfig"),
    "a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass Sizes:\n    n_embd: int = 24\n    n_head: int = 3\n"
        + _BY_ATTRIBUTE,
        "Sizes",
    ),
    "a dataclass without defaults": (
        "from dataclasses import dataclass\n@dataclass\nclass Sizes:\n    n_embd: int\n    n_head: int\n"
        + _BY_ATTRIBUTE,
        "Sizes",
    ),
    "a dictionary of which some is read by get": (
        'GPT_SMALL = {"n_embd": 24, "n_head": 3}\n'
        + _BY_KEY.replace("batch_first", 'config.get("bias", True), batch_first'),
        "GPT_SMALL",
    ),
    "an object": (
        "from types import SimpleNamespace\nsmall = SimpleNamespace(n_embd=24, n_head=3)\n" + _BY_ATTRIBUTE,
        "small",
    ),
    "a dictionary": ('GPT_SMALL = {"n_embd": 24, "n_head": 3}\nOTHER = {"lr": 1e-3}\n' + _BY_KEY, "GPT_SMALL"),
}


@pytest.mark.parametrize("kind", _FILES)
def test_what_the_file_has_for_a_config_is_used(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, name = _FILES[kind]
    (tmp_path / "model.py").write_text(f"from torch import nn\n{code}", encoding="utf-8")
    sizes = ["--embed-dim", "24", "--num-heads", "3"] if "without" in kind else []
    assert run(["trace", f"{tmp_path / 'model.py'}:Attention", *sizes]) == 0
    page = capsys.readouterr().out
    assert "3 heads of 8" in page
    assert f"config is made of {name}" in page


@pytest.mark.parametrize(
    "code",
    [
        _CLASS.format("BaseConfig") + _CLASS.format("LargeConfig") + _BY_ATTRIBUTE,
        "class GPTConfig:\n    n_embd = 24\n" + _BY_ATTRIBUTE,
        _CLASS.format("Model") + _BY_ATTRIBUTE,
    ],
    ids=["two fit", "it lacks what is read", "it is called otherwise"],
)
def test_what_may_be_another_is_not_used(code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(f"from torch import nn\n{code}", encoding="utf-8")
    assert run(["trace", f"{tmp_path / 'model.py'}:Attention"]) == 2
    assert "Attention needs config" in capsys.readouterr().err
