"""The pages of the manual: their command lines run, their Python is tried, and each is shown by `help`."""

from __future__ import annotations

import doctest
import re
import shlex
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from mha_inspect.cli.help import TOPICS

FOLDER = files("mha_inspect").joinpath("manual")
COMMANDS = re.compile(r"(?<=^```sh\n).*?(?=^```$)", re.M | re.S)
MODULES = """
import torch
from torch import nn


class Causal(nn.Module):
    def __init__(self, embed_dim=16, num_heads=2):
        super().__init__()
        self.heads = num_heads
        self.qkv, self.out = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def seen(self, queries, keys):
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def split(self, x):
        return (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))

    def attend(self, q, k, v, seen):
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(*self.split(x), self.seen(x.shape[1], x.shape[1]))


class Windowed(Causal):
    def seen(self, queries, keys):
        return super().seen(queries, keys).triu(-3)


class Padded(Causal):
    def forward(self, x, mask):
        return self.attend(*self.split(x), mask.bool()[:, None, None])


class Cached(Causal):
    def forward(self, x, cache=None):
        q, k, v = self.split(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        return self.attend(q, k, v, self.seen(q.shape[2], k.shape[2])), (k, v)
"""


def page(topic: str) -> str:
    return FOLDER.joinpath(f"{topic}.md").read_text(encoding="utf-8")


def lines() -> list[str]:
    return [line for topic in TOPICS for block in COMMANDS.findall(page(topic)) for line in block.splitlines()]


@pytest.fixture
def files_of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_model.py").write_text(MODULES, encoding="utf-8")
    weights = {"qkv.weight": torch.randn(48, 16), "qkv.bias": torch.randn(48)}
    weights |= {"out.weight": torch.randn(16, 16), "out.bias": torch.randn(16)}
    for name in ("weights.pt", "other.pt"):
        torch.save(weights, tmp_path / name)
    monkeypatch.chdir(tmp_path)


def test_the_topics_are_the_files() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {f"{topic}.md" for topic in TOPICS}


@pytest.mark.parametrize("line", lines())
@pytest.mark.usefixtures("files_of_a_reader")
def test_a_command_line_of_the_manual_runs(invoke: Callable[..., Any], line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    assert program == "mha-inspect"
    code, out, err = invoke(*words)
    assert code == 0, err or out
    assert out


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if ">>> " in page(topic)])
def test_python_in_the_manual(topic: str, tmp_path: Path) -> None:
    path = tmp_path / f"{topic}.md"
    path.write_text(page(topic).replace("```", ""), encoding="utf-8")
    failed, tried = doctest.testfile(str(path), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried >= 2
    assert failed == 0


@pytest.mark.parametrize("topic", TOPICS)
def test_help_shows_the_page(invoke: Callable[..., Any], topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("help", topic).out == page(topic)
    monkeypatch.setattr("mha_inspect.render.screen.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke("help", topic).out
    assert page(topic).splitlines()[0].removeprefix("# ") in shown
    plain = re.sub("\x1b\\[[0-9;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= 80


def test_an_unknown_page_is_refused_with_the_pages(invoke: Callable[..., Any]) -> None:
    code, out, err = invoke("help", "mask")
    assert (code, out) == (2, "")
    assert "Did you mean masks?" in err


@pytest.mark.parametrize("topic", TOPICS)
def test_a_line_to_copy_is_one_line_on_a_small_terminal(topic: str) -> None:
    """Rich indents a block of code by one, and breaks it at the width of the page."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", page(topic), re.M | re.S)
    assert [line for block in blocks for line in block.splitlines() if len(line) > 78] == []
