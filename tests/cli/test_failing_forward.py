"""A forward that raises, in the commands other than trace: the same cause, and a document in --json."""

from __future__ import annotations

import json

import pytest

MODULE = """
from torch import nn


class Unsplit(nn.Module):
    def __init__(self, embed_dim=24, num_heads=4):
        super().__init__()
        self.query, self.key = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k = self.query(x), self.key(x)
        return (q @ k).softmax(-1)


class Grouped(nn.Module):
    def __init__(self, embed_dim=24, num_heads=4, num_kv_heads=2):
        super().__init__()
        self.heads, self.shared, width = num_heads, num_kv_heads, embed_dim // num_heads
        self.query, self.out = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.key, self.value = nn.Linear(embed_dim, num_kv_heads * width), nn.Linear(embed_dim, num_kv_heads * width)

    def split(self, x, heads):
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def forward(self, x):
        q = self.split(self.query(x), self.heads)
        k, v = (self.split(project(x), self.shared) for project in (self.key, self.value))
        k, v = (side.repeat_interleave(self.heads // self.shared, 1) for side in (k, v))
        context = (q @ k.mT / k.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out(context.transpose(1, 2).flatten(2))
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "raising.py"
    path.write_text(MODULE, encoding="utf-8")
    return path


LINES = [("check",), ("diff", "torch"), ("compare-heads", "--heads", "1,2")]


def line_of(command, target):
    name, *more = command
    return (name, target, *more) if name != "diff" else (name, target, target)


@pytest.mark.parametrize("command", LINES, ids=lambda command: command[0])
def test_every_command_says_the_cause_that_trace_says(invoke, module, command):
    traced = json.loads(invoke("trace", f"{module}:Unsplit", "--json").out)["failure"]
    code, out, err = invoke(*line_of(command, f"{module}:Unsplit"), "--json")
    failure = json.loads(out)["failure"]
    assert code == 1
    assert failure["cause"] == traced["cause"]
    assert failure["cause"] is not None
    assert failure["source"] == traced["source"]
    assert "failed on x float32" in err
    assert traced["cause"]["name"] == "key_not_transposed"


def test_compare_heads_says_which_head_counts_run(invoke, module):
    code, _, err = invoke("compare-heads", f"{module}:Grouped", "--heads", "1,2,4,8")
    assert code == 1
    assert err.endswith(
        "1 head, 2 key heads: the key heads must divide the heads. "
        "The target runs with 2, 4 and 8 heads: --heads 2,4,8.\n"
    )
    assert invoke("compare-heads", f"{module}:Grouped", "--heads", "2,4,8").code == 0


def test_the_way_out_does_not_repeat_the_input_that_failed(invoke, module, tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(
        "from torch import nn\n\n\n"
        "class Odd(nn.Module):\n    def forward(self, x):\n        return x.view(7, 5, -1, 11)\n"
    )
    err = invoke("check", f"{path}:Odd").err
    given = err.partition("float32 [")[2].partition("]")[0].replace(", ", "x")
    assert given.startswith("2x")
    assert f"x={given}" not in err
    assert "--input-shape x=SIZES:float32" in err
