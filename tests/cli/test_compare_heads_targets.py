"""`mha-inspect compare-heads` of a module of one's own: built once for each head count, with the same weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import jsonschema
import pytest

from ..schemas import load_schema

SIZES = ("--batch", "3", "--seq-len", "5")

CODE = '''
import math

import torch
from torch import nn


class Tutorial(nn.Module):
    def __init__(self, d_model, nhead=2, scaled=True):
        super().__init__()
        self.heads, self.scaled = nhead, scaled
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class PerHead(nn.Module):
    """A scale for each head: its parameters change with the head count."""

    def __init__(self, dim, heads=1):
        super().__init__()
        self.heads = heads
        self.qkv, self.scale = nn.Linear(dim, 3 * dim), nn.Parameter(torch.rand(heads, 1, 1))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Headless(nn.Module):
    def __init__(self, size=6):
        super().__init__()
        self.q = nn.Linear(size, size)

    def forward(self, x):
        return (self.q(x) @ x.mT).softmax(-1) @ x


class Mixing(Tutorial):
    """Heads by a view without a transpose: with more than one of them positions are mixed."""

    def forward(self, x):
        q, k, v = (linear(x).view(len(x), self.heads, x.shape[1], -1) for linear in (self.q, self.k, self.v))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Widening(Tutorial):
    """Every head as wide as the whole: another output for each head count."""

    def __init__(self, head_size, n_head):
        super().__init__(head_size * n_head, n_head)

    def forward(self, x):
        return super().forward(x.repeat(1, 1, self.heads))


class Deaf(Tutorial):
    """Takes a number of heads, and has two all the same."""

    def __init__(self, dim, heads=2):
        super().__init__(dim, 2)


class Blind(Tutorial):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Counting(Tutorial):
    """Writes down each of its runs, and counts on from run to run, where a second one would fail."""

    def forward(self, x):
        batch, length, embed = x.shape  # so that nobody has to run it to see which is which
        assert not getattr(self, "position", 0)
        self.position = length
        with open(__file__ + ".runs", "a") as file:
            print(self.heads, x.dtype, length, file=file)
        return super().forward(x)


class Dropping(Tutorial):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), training=self.training)


ready = Tutorial(6)
'''


def report_of(invoke, target: str, *line: str) -> dict:
    code, out, err = invoke("compare-heads", target, *line, *SIZES, "--json")
    assert code == 0, err
    data = json.loads(out, parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(load_schema("compare-heads")).validate(data)
    return data


def test_parameters_of_another_shape_are_named(invoke, mine):
    data = report_of(invoke, f"{mine}:PerHead", "--embed-dim", "22", "--heads", "1,2")
    assert [row["same_parameters"] for row in data["counts"]] == [True, False]
    assert "scale [1, 1, 1] becomes [2, 1, 1]" in data["answer"][1]
    assert data["counts"][1]["numel"] - data["counts"][0]["numel"] == 1


def test_each_head_count_runs_once_from_the_state_that_came_in(invoke, mine):
    """Once to see what it takes, each head count once, and in float64."""
    asked = ["--embed-dim", "48", "--heads", "1,2,4,8,16", "--batch", "2", "--seq-len", "5"]
    code, _, err = invoke("compare-heads", f"{mine}:Counting", *asked)
    assert code == 0, err
    assert Counter(Path(mine + ".runs").read_text().splitlines()) == {
        "1 torch.float32 5": 2,
        "1 torch.float64 5": 1,
        **{f"{count} torch.float32 5": 1 for count in (2, 4, 8, 16)},
    }


@pytest.mark.parametrize("asked", ["--steps 3", "--time"])
def test_what_counts_on_from_run_to_run_is_compared_in_every_way(invoke, mine, asked):
    code, out, err = invoke(
        "compare-heads", f"{mine}:Counting", "--embed-dim", "22", "--heads", "1,2", *asked.split(), *SIZES
    )
    assert code == 0, err
    assert "Yes: with the same weights" in out


def test_gradients_are_compared_where_a_view_gives_heads_no_part_of_a_matrix(invoke, mine):
    line = ("compare-heads", f"{mine}:Mixing", *["--embed-dim", "12", "--heads", "1,3", "--steps", "1"], *SIZES)
    code, out, _ = invoke(*line, "--json")
    assert code == 0
    data = json.loads(out)
    assert data["training"]["counts"][1]["verdict"] == "differs"
    parts = {part["part"]: part for part in data["training"]["counts"][1]["parts"]}
    assert sorted(parts) == sorted(f"{name}.{kind}" for name in "qkvo" for kind in ("weight", "bias"))
    # With one head a bias of the keys adds one number to all scores of a query: what it gets is rounding.
    assert parts["k.bias"]["relative_difference"] == "Infinity"
    assert parts["k.bias"]["verdict"] == "differs"
    page = invoke(*line).out
    assert "q_heads differ: 3 heads of 4 features instead of 1 of 12." in page
    assert "The first step gives different weights" in page
    assert next(row for row in page.splitlines() if row.startswith("k.bias")).split() == ["k.bias", "from", "0"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("mine:Headless --heads 1,2", 2, "Headless takes no number of heads (its arguments: size)"),
        ("mine:ready --heads 1,2", 2, "its arguments: none"),
        ("mine:Deaf --embed-dim 22 --heads 2,11", 2, "its attention has 2"),
        ("mine:Widening --set head_size=6 --heads 1,2 --input-shape x=3x5x6", 2, "[3, 5, 12]"),
        ("mine:Tutorial --embed-dim 22 --heads 1,3", 1, "Tutorial with num_heads 3 failed on x float32 [1, 12, 22]"),
        ("mine:ready", 2, "takes no number of heads (its arguments: none)"),
        ("mine:Tutorial --heads 1,2 --set nhead=2", 2, "--set nhead fixes the number of heads"),
        ("mine:Tutorial --heads 1,2 --steps 0", 2, "steps 0 trains nothing"),
        ("mine:Blind --embed-dim 22 --heads 1,2 --steps 1", 2, "Remove --steps"),
        ("mine:Dropping --embed-dim 22 --heads 1,2 --train", 2, "Use eval mode (--eval"),
        ("mine:Tutorial --heads 1,2 --device meta", 2, "no numbers"),
    ],
)
def test_bad_input(invoke, mine, line, code, said):
    answer = invoke("compare-heads", *line.replace("mine:", f"{mine}:").split())
    assert answer.code == code
    # A forward that raised is shown as trace shows it.
    assert ("\nfailed: " in answer.out) if code == 1 else answer.out == ""
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert answer.err.count("\n") <= 2


def test_params_says_in_words_that_no_head_has_a_part_of_its_own(invoke, mine):
    code, out, _ = invoke("params", f"{mine}:Mixing", "--embed-dim", "12", "--num-heads", "3", "--per-head")
    assert code == 0
    assert "by head\nNo parameter has a part that belongs to one head only." in out


def test_the_head_counts_are_those_that_divide_the_width_which_a_target_has(invoke, mine):
    code, out, _ = invoke("compare-heads", f"{mine}:Tutorial", "--set", "d_model=12", *SIZES, "--json")
    assert code == 0
    assert [row["num_heads"] for row in json.loads(out)["counts"]] == [1, 2, 4]
