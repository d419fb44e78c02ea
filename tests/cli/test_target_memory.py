"""A target that does not fit in memory: refused with exit code 3 and its way out, whatever notices it."""

from __future__ import annotations

from pathlib import Path

import pytest

CODE = """
import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads=1):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Greedy(Attention):
    # 4 EiB less a little: more than any machine has, and still a number of bytes that torch can ask for.
    def forward(self, x):
        return super().forward(x) + torch.empty(2**60 - 1).sum()


class GreedyInFloat64(Attention):
    def forward(self, x):
        return super().forward(x) + (torch.empty(2**60 - 1).sum() if x.dtype == torch.float64 else 0)


class Wide(nn.Module):
    def __init__(self, dim, heads=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        return x


def by_hand(dim, heads=1):
    raise MemoryError("not that many")
"""


@pytest.fixture
def mine(tmp_path) -> str:
    path = Path(tmp_path) / "mine.py"
    path.write_text(CODE)
    return str(path)


COMMANDS = {"trace": (), "diff": ("torch",), "compare-heads": ("--heads", "1,2")}


def refused(answer, *said: str) -> None:
    assert (answer.code, answer.out) == (3, ""), answer.err
    assert "Traceback" not in answer.err
    last = answer.err.rstrip("\n").splitlines()[-1]
    assert last.startswith("mha-inspect: ")
    for part in said:
        assert part in last


@pytest.mark.parametrize("command", COMMANDS)
def test_a_forward_is_refused_before_it_is_tried(invoke, mine, command):
    line = (command, f"{mine}:Attention", *COMMANDS[command], "--embed-dim", "6", "--seq-len", "3000000")
    refused(
        invoke(*line),
        "Attention with batch 1, seq_len 3000000 needs about ",
        "free on cpu",
        "largest seq_len that fits",
    )


@pytest.mark.parametrize("command", [*COMMANDS, "params"])
def test_a_constructor_is_stopped_before_it_fills_the_memory(invoke, mine, command):
    line = (command, f"{mine}:Wide", *COMMANDS.get(command, ()), "--embed-dim", "10000000")
    refused(invoke(*line), "Wide(dim=10000000", "needs about 1.1 PiB", "Give it smaller sizes.")


@pytest.mark.parametrize("command", COMMANDS)
def test_torchs_own_word_is_told_in_a_line(invoke, mine, command):
    line = (command, f"{mine}:Greedy", *COMMANDS[command], "--embed-dim", "6")
    refused(
        invoke(*line), "out of memory: you tried to allocate 4611686018427387900 bytes", "smaller --batch or --seq-len"
    )


@pytest.mark.parametrize("command", ["diff", "compare-heads"])
def test_so_it_is_where_rounding_is_measured(invoke, mine, command):
    line = (command, f"{mine}:GreedyInFloat64", *COMMANDS[command], "--embed-dim", "6")
    refused(invoke(*line), "out of memory: you tried to allocate")


def test_a_constructor_that_gives_up_by_itself(invoke, mine):
    refused(invoke("trace", f"{mine}:by_hand", "--embed-dim", "6"), "out of memory: not that many")
