"""`trace` on 2 ranks with gloo: every rank runs, rank 0 answers for both, and a rank that raises prints its failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mha_inspect.cli import ranks

TARGETS = "tests.cli.rank_targets"
ROOT = Path(__file__).parents[2]
COMMANDS = {
    "sharded": ["trace", f"{TARGETS}:sharded", "--json", "--export", "FOLDER/trace.json"],
    "cut key head": ["trace", f"{TARGETS}:cut_key_head", "--json"],
    "one raises": ["trace", f"{TARGETS}:one_raises"],
    "not built": ["trace", f"{TARGETS}:fails_beside_a_barrier"],
    "check": ["check", f"{TARGETS}:sharded"],
}


@dataclass(frozen=True)
class Rank:
    code: int
    out: str
    err: str


def launch(folder: Path) -> None:
    (folder / "commands.json").write_text(json.dumps(COMMANDS).replace("FOLDER", str(folder)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(
        [sys.executable, "-m", TARGETS, str(folder)], cwd=ROOT, env=environment, start_new_session=True
    ) as started:
        try:
            started.wait(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def ran(once: Callable[[str, Callable[[Path], None]], Path]) -> dict[str, Any]:
    """Both ranks of each command, from processes that have ended."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = once("ranks_of_commands", launch)
    codes = json.loads((folder / "codes.json").read_text())

    def said(name: str, rank: int, ending: str) -> str:
        return (folder / f"{name}.{rank}.{ending}").read_text()

    every = {
        name: [Rank(codes[name][rank], said(name, rank, "out"), said(name, rank, "err")) for rank in (0, 1)]
        for name in COMMANDS
    }
    return {**every, "exported": (folder / "trace.json").read_text()}


def test_rank_0_answers_and_the_other_is_silent(ran: dict[str, Any]) -> None:
    first, second = ran["sharded"]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out
    assert second.out == ""
    assert "mha-inspect" not in second.err


def test_a_trace_has_both_ranks_and_the_shapes_over_them(ran: dict[str, Any]) -> None:
    trace = json.loads(ran["sharded"][0].out)
    for rank, part in enumerate(trace["ranks"]):
        rows = [16 * rank, 16 * rank + 16]
        assert (part["rank"], part["heads"], part["kv_heads"], part["kv_copied"]) == (rank, 2, 2, False)
        assert part["rows"] == {"W_q": rows, "W_k": rows, "W_v": rows, "W_o": rows}
        assert part["bytes"] == 4 * (4 * 32 * 16 + 3 * 16 + 32)
        assert part["exchanged"] == 4 * 2 * 5 * 32
    stages = {stage["name"]: stage for stage in trace["attentions"][0]["stages"]}
    assert (stages["q_heads"]["shape"], stages["q_heads"]["whole"]) == ([2, 2, 5, 8], [2, 4, 5, 8])
    assert (stages["output"]["shape"], stages["output"].get("whole")) == ([2, 5, 32], None)
    assert ran["exported"] == ran["sharded"][0].out


def test_a_head_that_is_cut_over_ranks_is_the_cause_of_a_view_that_raises(ran: dict[str, Any]) -> None:
    for rank, answer in enumerate(ran["cut key head"]):
        trace = json.loads(answer.out)
        assert (answer.code, trace["failure"]["call"]) == (1, "Tensor.unflatten")
        assert trace["failure"]["cause"]["name"] == "cut_over_ranks"
        # The key head has 8 features: 4 on each of 2 ranks.
        said = "has 4 of 8 features: its layer is sharded over ranks, which cuts through a head of 8."
        assert trace["failure"]["cause"]["explanation"].endswith(said)
        assert f"The stages are those of rank {rank} of 2." in trace["notes"]


def test_a_rank_that_raises_prints_its_own_failure(ran: dict[str, Any]) -> None:
    first, second = ran["one raises"]
    assert first.code != 0  # ended by the launcher, or by the connection that broke
    assert second.code == 1
    assert "x.view(3, 7)" in second.out
    assert "shape '[3, 7]' is invalid for input of size 320" in second.out
    assert "The stages are those of rank 1 of 2." in second.out


def test_a_rank_that_cannot_be_built_says_so(ran: dict[str, Any]) -> None:
    first, second = ran["not built"]
    assert first.code != 0
    assert (second.code, second.out) == (2, "")
    assert second.err.startswith("mha-inspect: rank 1 of 2: ")
    assert "rank 1 cannot be built" in second.err


def test_bad_input_is_a_line_of_each_rank(ran: dict[str, Any]) -> None:
    for rank, answer in enumerate(ran["check"]):
        assert (answer.code, answer.out) == (2, "")
        (line,) = [line for line in answer.err.splitlines() if line.startswith("mha-inspect: ")]
        assert line.startswith(f"mha-inspect: rank {rank} of 2: ")
        assert "check runs in one process. Start it without torchrun, or use trace." in line


@pytest.mark.parametrize(("rank", "world"), [("0", "1"), ("0", "many"), ("first", "2"), ("", "2")])
def test_a_command_runs_alone_where_the_environment_has_no_ranks(
    monkeypatch: pytest.MonkeyPatch, rank: str, world: str
) -> None:
    given = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert ranks.place() is None
