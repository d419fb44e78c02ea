"""A target that does not fit in memory: refused with exit code 3 and its way out, whatever notices it."""

from __future__ import annotations

import sys

import pytest

from mha_inspect.files import memory

from .code import ATTENTION

CODE = (
    ATTENTION
    + """

class GreedyInFloat64(Attention):
    # 4 EiB less a little: more than any machine has, and still a number of bytes that torch can ask for.
    def forward(self, x):
        return super().forward(x) + (torch.empty(2**60 - 1).sum() if x.dtype == torch.float64 else 0)


class Piecewise(Attention):
    def forward(self, x):
        pieces = [torch.ones(10**7) for _ in range(10)]
        return super().forward(x) + pieces[0][0]


class Wide(nn.Module):
    def __init__(self, dim, heads=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        return x


def by_hand(dim, heads=1):
    raise MemoryError("not that many")
"""
)


COMMANDS = {"trace": (), "diff": ("torch",), "compare-heads": ("--heads", "1,2")}


def refused(answer, *said: str) -> None:
    assert (answer.code, answer.out) == (3, ""), answer.err
    assert "Traceback" not in answer.err
    last = answer.err.rstrip("\n").splitlines()[-1]
    assert last.startswith("mha-inspect: ")
    for part in said:
        assert part in last


@pytest.fixture
def free(monkeypatch):
    """Let commands find 100 MiB that are free."""
    monkeypatch.setattr(memory, "free_memory", lambda: 100 << 20)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    ("command", "line"),
    [
        *((command, "Attention --embed-dim 6 --seq-len 9000") for command in (*COMMANDS, "check")),
        ("compare-heads", "Piecewise --embed-dim 6"),
    ],
)
def test_a_forward_that_takes_more_than_is_free(invoke, mine, free, command, line):
    name, *options = line.split()
    answer = invoke(command, f"{mine}:{name}", *COMMANDS.get(command, ()), *options)
    refused(answer, "out of memory: you tried to allocate ", "smaller --batch or --seq-len")


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("line", ["--embed-dim 10000000", "--embed-dim 8 --seq-len 9000"])
def test_a_layer_that_takes_more_than_is_free(invoke, free, command, line):
    sides = {"compare-heads": ("--heads", "1,2"), "diff": ("torch", "bert")}.get(command, ())
    refused(invoke(command, *sides, *line.split()), "out of memory: you tried to allocate ", "--device meta for shapes")


@pytest.mark.parametrize("command", ["compare-heads", "params"])
def test_a_constructor_is_refused(invoke, mine, command):
    line = (command, f"{mine}:Wide", *COMMANDS.get(command, ()), "--embed-dim", "10000000")
    refused(invoke(*line), "has parameters of 1.1 PiB")


@pytest.mark.parametrize("command", ["diff", "compare-heads"])
def test_so_it_is_where_rounding_is_measured(invoke, mine, command):
    line = (command, f"{mine}:GreedyInFloat64", *COMMANDS[command], "--embed-dim", "6")
    refused(invoke(*line), "out of memory: you tried to allocate")


def test_a_constructor_that_gives_up_by_itself(invoke, mine):
    refused(invoke("trace", f"{mine}:by_hand", "--embed-dim", "6"), "out of memory: not that many")
