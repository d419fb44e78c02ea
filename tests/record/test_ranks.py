"""Attention on several ranks: real processes with gloo on the CPU; `rank_worker` is one of them."""

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

from mha_inspect.record.ranks import local, piece_of, wraps

from . import rank_worker

WORKER = Path(rank_worker.__file__)
HEADS = {"q_heads": 1, "k_heads": 1, "v_heads": 1, "scores": 1, "weights": 1, "context": 1}
"""The stages of which a rank has its own heads, and the dimension of the heads."""
FEATURES = {"q_proj": 2, "k_proj": 2, "v_proj": 2, "concat": 2}
Answers = dict[str, Any]


def launch(folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(WORKER), str(folder)],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            _, errors = started.communicate(timeout=120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    assert started.returncode == 0, errors


@pytest.fixture(scope="module")
def two_ranks(once: Callable[[str, Callable[[Path], None]], Path]) -> list[Answers]:
    """The answers of 2 ranks, from processes that have ended."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = once("ranks_of_records", launch)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@dataclass(frozen=True)
class ShardedRun:
    """The answers of one rank about one sharded model, or about `by hand`, which is one attention."""

    name: str
    rank: int
    answers: Answers
    unsharded: Answers

    @property
    def has_all_heads(self) -> bool:
        return self.name in ("fsdp", "ddp")

    @property
    def attentions(self) -> int:
        return 1 if self.name == "by hand" else 2


@pytest.fixture
def sharded_runs(two_ranks: list[Answers]) -> list[ShardedRun]:
    runs = []
    for rank, of_rank in enumerate(two_ranks):
        for name, answers in of_rank.items():
            if "traced" in answers:
                unsharded = of_rank["unsharded by hand" if name == "by hand" else "unsharded"]
                runs.append(ShardedRun(name, rank, answers, unsharded))
    return runs


def test_a_recorded_rank_computes_the_same_bits_with_the_same_collectives(sharded_runs: list[ShardedRun]) -> None:
    assert len(sharded_runs) == 2 * 5
    for run in sharded_runs:
        assert run.answers["same output"], run.name
        assert run.answers["same gradients"], run.name
        plain, recorded = run.answers["collectives"]
        assert plain == recorded > 0, run.name
        assert run.answers["recording is proved"], run.name
        assert run.answers["trace is proved"], run.name


def test_a_trace_exchanges_nothing_of_its_own(sharded_runs: list[ShardedRun]) -> None:
    """A size of one, which a second run would resolve on one rank, adds no collective either."""
    for run in sharded_runs:
        traced, of_one_item, listed = run.answers["forward collectives"]
        assert traced == of_one_item == listed, run.name


def test_the_stages_are_the_ranks_own_with_their_projections(sharded_runs: list[ShardedRun]) -> None:
    all_stages = {"query", "key", "value", *FEATURES, *HEADS, "output"}
    for run in sharded_runs:
        heads = 4 if run.has_all_heads else 2
        assert len(run.answers["recorded"]) == len(run.answers["traced"]) == run.attentions, run.name
        for stages in (*run.answers["recorded"], *run.answers["traced"]):
            assert set(stages) == all_stages, run.name
            assert stages["q_heads"] == [2, heads, 5, 8]
            assert stages["q_proj"] == stages["concat"] == [2, 5, 8 * heads]
            assert stages["output"] == [2, 5, 32]
        is_cut = not run.has_all_heads and run.name != "by hand"
        assert run.answers["whole"]["q_heads"] == ([2, 4, 5, 8] if is_cut else None), run.name
        assert run.answers["whole"]["output"] is None, run.name


def test_every_stage_is_the_slice_of_the_unsharded_run(sharded_runs: list[ShardedRun]) -> None:
    for run in sharded_runs:
        for stage, numbers in run.answers["numbers"].items():
            expected = torch.tensor(run.unsharded[stage])
            dim = HEADS.get(stage, FEATURES.get(stage))
            if dim is not None and not run.has_all_heads:
                expected = expected.chunk(2, dim)[run.rank]
            torch.testing.assert_close(torch.tensor(numbers), expected, msg=f"{stage} of {run.name}")


def test_collectives_have_their_bytes_and_the_stage_that_they_make(two_ranks: list[Answers]) -> None:
    for answers in two_ranks:
        whole = ["all_reduce", "output", 4 * 2 * 5 * 32]
        with_stage = [exchange for exchange in answers["tensor parallel"]["between ranks"] if exchange[1]]
        assert with_stage == [whole, whole]
        assert answers["by hand"]["between ranks"] == [["allreduce", "output", 4 * 2 * 5 * 32]]
        assert {name for name, *_ in answers["fsdp"]["between ranks"]} == {"allgather_base"}
        assert answers["ddp"]["between ranks"] == []


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_output_is_added_up_over_ranks_before_each_may_keep_a_piece(two_ranks: list[Answers], is_cut: bool) -> None:
    for rank, answers in enumerate(two_ranks):
        expected = torch.tensor(answers["unsharded in parts"])
        name, numbers, whole, flops, between = answers["in parts"][str(is_cut)]
        mine = expected.chunk(2, 1)[rank] if is_cut else expected
        torch.testing.assert_close(torch.tensor(numbers), mine, msg=f"output of rank {rank}")
        assert (name, whole) == ("output", list(expected.shape) if is_cut else None)
        assert flops == 2 * 2 * 4 * 32 * 16
        assert between == [["reduce_scatter_tensor" if is_cut else "all_reduce", "output"]]


_OF_POSITIONS = ("query", "key", "value", "q_proj", "k_proj", "v_proj", "concat", "output")
WAYS: dict[str, dict[str, int]] = {
    "flat parameters": {},
    "heads for positions": HEADS | dict.fromkeys(_OF_POSITIONS, 1),
    "gathered for each side": HEADS | FEATURES | {"output": 1},
}
"""How ranks divide one attention, to the dimension of each stage that is divided."""


@pytest.mark.parametrize("way", WAYS)
def test_stages_are_found_on_both_sides_of_collectives(two_ranks: list[Answers], way: str) -> None:
    for rank, answers in enumerate(two_ranks):
        divided = answers["other ways"][way]
        whole = answers["other ways"]["unsharded"]
        assert divided["kind"] == whole["kind"] == ["self"]
        assert divided["stages"].keys() == whole["stages"].keys()
        for stage, numbers in divided["stages"].items():
            expected = torch.tensor(whole["stages"][stage])
            if stage in WAYS[way]:
                expected = expected.chunk(2, WAYS[way][stage])[rank]
            torch.testing.assert_close(torch.tensor(numbers), expected, msg=f"{stage} on rank {rank}")
        if way == "heads for positions":
            exchanged = ["q_heads", "k_heads", "v_heads", "concat"]
            assert divided["between ranks"] == [["alltoall_base", stage] for stage in exchanged]


def test_parameters_say_which_part_of_the_whole_they_are(two_ranks: list[Answers]) -> None:
    for rank, answers in enumerate(two_ranks):
        place = f"{16 * rank}–{16 * rank + 15} of 32: heads {2 * rank}–{2 * rank + 1}"
        for case in ("tensor parallel", "tensor parallel, fused", "fsdp"):
            shape, whole, start, role = answers[case]["parameters"]["first.q.weight"]
            assert (shape, whole, start) == ([16, 32], [32, 32], [16 * rank, 0]), case
            assert role.startswith("W_q"), case
            assert role.endswith(f"; rows {place}"), case
        shape, whole, start, role = answers["tensor parallel"]["parameters"]["first.o.weight"]
        assert (shape, whole, start) == ([32, 16], [32, 32], [0, 16 * rank])
        assert role.startswith("W_o")
        assert f"; columns {place}" in role
        assert answers["ddp"]["parameters"]["module.first.q.weight"][:3] == [[32, 32], None, None]


def test_a_rank_says_its_heads_and_their_place_in_the_whole(sharded_runs: list[ShardedRun]) -> None:
    for run in sharded_runs:
        of_rank = run.answers["rank"]
        heads = 4 if run.has_all_heads else 2
        rows, first = 8 * heads, 0 if run.has_all_heads else 16 * (run.rank)
        assert (of_rank["rank"], of_rank["heads"], of_rank["kv_heads"]) == (run.rank, heads, heads), run.name
        if run.name == "by hand":
            assert of_rank["rows"] == {}
        else:
            assert of_rank["rows"] == {f"W_{letter}": [first, first + rows] for letter in "qkvo"}, run.name
        assert of_rank["bytes"] == run.answers["parameter bytes"], run.name
        # Four projections and two products, of 2 items and 5 positions.
        assert of_rank["flops"] == run.attentions * 2 * (4 * 2 * 5 * 32 * rows + 2 * 2 * 5 * 5 * rows), run.name
        assert of_rank["exchanged"] == sum(nbytes for *_, nbytes in run.answers["between ranks"])


def test_a_rank_that_raises_says_why_without_a_second_run(two_ranks: list[Answers]) -> None:
    assert "rank_worker.py" in two_ranks[0]["raising"]
    assert "RuntimeError" in two_ranks[0]["raising"]


def test_the_origin_of_nan_is_not_looked_for_in_a_second_run(two_ranks: list[Answers]) -> None:
    for answers in two_ranks:
        assert not any("second run" in note for note in answers["with nan"])
        assert any("The output has NaN" in note for note in answers["with nan"])


def test_a_plain_tensor_is_its_own_and_whole() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert local(parameter) is parameter
    assert piece_of(parameter) is None
    assert not wraps([torch.Tensor, torch.nn.Parameter])
