"""Attention on several ranks: real processes with gloo on the CPU; `rank_worker` is one of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
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


@pytest.fixture(scope="module")
def every_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Answers]]:
    """The answers of all ranks of 2 and of 4, from processes that have ended."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = tmp_path_factory.mktemp("ranks")
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
    return {
        world: [json.loads((folder / f"{world}/{rank}.json").read_text()) for rank in range(world)] for world in (2, 4)
    }


@pytest.fixture(params=[2, 4])
def ranks(request: pytest.FixtureRequest, every_rank: dict[int, list[Answers]]) -> list[Answers]:
    return every_rank[request.param]


def cases(ranks: list[Answers]) -> list[tuple[str, int, Answers]]:
    """Name, rank and answers of every sharded run."""
    return [
        (name, rank, found)
        for rank, answers in enumerate(ranks)
        for name, found in answers.items()
        if isinstance(found, dict) and "traced" in found
    ]


def test_a_recorded_rank_computes_the_same_bits_with_the_same_collectives(ranks: list[Answers]) -> None:
    assert len(cases(ranks)) == len(ranks) * (3 if len(ranks) > 2 else 5)
    for name, rank, found in cases(ranks):
        assert found["same output"], (name, rank)
        assert found["same gradients"], (name, rank)
        assert found["collectives"][0] == found["collectives"][1] > 0, (name, rank)
        assert found["proved"], (name, rank)


def test_a_trace_exchanges_nothing_of_its_own(ranks: list[Answers]) -> None:
    """A size of one, which a second run would resolve on one rank, adds no collective either."""
    for name, rank, found in cases(ranks):
        traced, of_one, listed = found["forward collectives"]
        assert traced == of_one == listed, (name, rank)


def test_the_stages_are_the_ranks_own_with_their_projections(ranks: list[Answers]) -> None:
    all_stages = ["query", "key", "value", *FEATURES, *HEADS, "output"]
    for name, rank, found in cases(ranks):
        parallel = {"fsdp": 1, "ddp": 1, "fsdp and tensor parallel": 2}.get(name, len(ranks))
        assert len(found["recorded"]) == len(found["traced"]) == (1 if name == "by hand" else 2), (name, rank)
        for stages in (*found["recorded"], *found["traced"]):
            assert set(stages) == set(all_stages), (name, rank)
            assert stages["q_heads"] == [2, 4 // parallel, 5, 8]
            assert stages["q_proj"] == stages["concat"] == [2, 5, 32 // parallel]
            assert stages["output"] == [2, 5, 32]


def test_every_stage_is_the_slice_of_the_unsharded_run(ranks: list[Answers]) -> None:
    for name, rank, found in cases(ranks):
        whole = ranks[rank]["unsharded by hand" if name == "by hand" else "unsharded"]
        parallel = {"fsdp": 1, "ddp": 1, "fsdp and tensor parallel": 2}.get(name, len(ranks))
        for stage, numbers in found["numbers"].items():
            expected, got = torch.tensor(whole[stage]), torch.tensor(numbers)
            dim = HEADS.get(stage, FEATURES.get(stage))
            if dim is not None:
                expected = expected.chunk(parallel, dim)[rank % parallel]
            torch.testing.assert_close(got, expected, msg=f"{stage} of {name} on rank {rank}")


def test_models_under_fsdp_have_the_stages_and_the_parameters_of_the_unsharded_run(
    every_rank: dict[int, list[Answers]],
) -> None:
    pytest.importorskip("transformers")
    for found in every_rank[2]:
        assert {name: each["attentions"] for name, each in found["models"].items()} == {
            "llama": 2,
            "bert": 2,
            "gpt2": 2,
            "t5": 6,
        }
        assert [each["differ"] for each in found["models"].values()] == [[]] * 4


def test_collectives_have_their_bytes_and_the_stage_that_they_make(ranks: list[Answers]) -> None:
    for rank in ranks:
        whole = ["all_reduce", "output", 4 * 2 * 5 * 32]
        of_first = [exchange for exchange in rank["tensor parallel"]["between ranks"] if exchange[1]]
        assert of_first == [whole, whole]
        assert rank["by hand"]["between ranks"] == [["allreduce", "output", 4 * 2 * 5 * 32]]
        if len(ranks) == 2:
            assert {name for name, *_ in rank["fsdp"]["between ranks"]} == {"allgather_base"}
            assert rank["ddp"]["between ranks"] == []


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_output_is_added_up_over_ranks_before_each_may_keep_a_piece(ranks: list[Answers], is_cut: bool) -> None:
    world = len(ranks)
    for rank, answers in enumerate(ranks):
        expected = torch.tensor(answers["unsharded in parts"])
        name, numbers, whole, flops, between = answers["in parts"][str(is_cut)]
        mine = expected.chunk(world, 1)[rank] if is_cut else expected
        torch.testing.assert_close(torch.tensor(numbers), mine, msg=f"output of rank {rank}")
        assert (name, whole) == ("output", list(expected.shape) if is_cut else None)
        assert flops == 2 * 2 * 4 * 32 * (32 // world)
        assert between == [["reduce_scatter_tensor" if is_cut else "all_reduce", "output"]]


_OF_POSITIONS = ("query", "key", "value", "q_proj", "k_proj", "v_proj", "concat", "output")
WAYS: dict[str, dict[str, int]] = {
    "flat parameters": {},
    "heads for positions": HEADS | dict.fromkeys(_OF_POSITIONS, 1),
    "gathered for each side": HEADS | FEATURES | {"output": 1},
    "gathered contexts": HEADS | {name: 2 for name in FEATURES if name != "concat"} | {"output": 2},
    "uneven": HEADS | FEATURES | {"output": 1},
}
"""How ranks divide one attention, to the dimension of each stage that is divided."""


@pytest.mark.parametrize("way", WAYS)
def test_stages_are_found_on_both_sides_of_collectives(ranks: list[Answers], way: str) -> None:
    for rank, answers in enumerate(ranks):
        found = answers["other ways"]
        whole = found["unsharded, uneven" if way == "uneven" else "unsharded"]
        assert found[way]["kind"] == whole["kind"] == ["self"]
        assert found[way]["stages"].keys() == whole["stages"].keys()
        for stage, numbers in found[way]["stages"].items():
            expected = torch.tensor(whole["stages"][stage])
            if stage in WAYS[way]:
                expected = expected.chunk(len(ranks), WAYS[way][stage])[rank]
            torch.testing.assert_close(torch.tensor(numbers), expected, msg=f"{stage} on rank {rank}")
        if way == "heads for positions":
            exchanged = ["q_heads", "k_heads", "v_heads", "concat"]
            assert found[way]["between ranks"] == [["alltoall_base", stage] for stage in exchanged]


def test_parameters_say_which_part_of_the_whole_they_are(ranks: list[Answers]) -> None:
    world = len(ranks)
    rows = 32 // world
    for rank, answers in enumerate(ranks):
        for case in {"tensor parallel", "tensor parallel, fused", "fsdp"} & answers.keys():
            shape, whole, start, role = answers[case]["parameters"]["first.q.weight"]
            assert (shape, whole, start) == ([rows, 32], [32, 32], [rows * rank, 0]), case
            heads = f"heads {2 * rank}–{2 * rank + 1}" if world == 2 else f"head {rank}"
            place = f"rows {rows * rank}–{rows * rank + rows - 1} of 32: {heads}"
            assert role.startswith("W_q"), case
            assert role.endswith(f"; {place}"), case
        shape, whole, start, role = answers["tensor parallel"]["parameters"]["first.o.weight"]
        assert (shape, whole, start) == ([32, rows], [32, 32], [0, rows * rank])
        assert role.startswith("W_o")
        assert f"; columns {rows * rank}–{rows * rank + rows - 1} of 32: head" in role
        if world == 2:
            assert answers["ddp"]["parameters"]["module.first.q.weight"][:3] == [[32, 32], None, None]


def test_a_rank_says_its_heads_and_their_place_in_the_whole(ranks: list[Answers]) -> None:
    for name, rank, found in cases(ranks):
        parallel = {"fsdp": 1, "ddp": 1, "fsdp and tensor parallel": 2}.get(name, len(ranks))
        heads, rows, place = 4 // parallel, 32 // parallel, rank % parallel
        of = found["rank"]
        assert (of["rank"], of["heads"], of["kv_heads"]) == (rank, heads, heads), name
        known = {} if name == "by hand" else {f"W_{letter}": [rows * place, rows * (place + 1)] for letter in "qkvo"}
        assert of["rows"] == known, (name, rank)
        assert of["bytes"] == found["parameter bytes"], (name, rank)
        # Four projections and two products, of 2 items and 5 positions.
        attentions = 1 if name == "by hand" else 2
        assert of["flops"] == attentions * 2 * (4 * 2 * 5 * 32 * rows + 2 * 2 * 5 * 5 * rows), (name, rank)
        assert of["exchanged"] == sum(nbytes for *_, nbytes in found["between ranks"])


def test_a_parameter_sharded_twice_says_its_own_head(ranks: list[Answers]) -> None:
    for rank, answers in enumerate(ranks if len(ranks) > 2 else ()):
        shape, whole, start, role = answers["fsdp and tensor parallel"]["parameters"]["first.q.weight"]
        head = rank % 2 * 2 + rank // 2
        assert (shape, whole, start) == ([8, 32], [32, 32], [8 * head, 0])
        assert role.endswith(f"rows {8 * head}–{8 * head + 7} of 32: head {head}")


def test_a_rank_that_raises_says_why_without_a_second_run(ranks: list[Answers]) -> None:
    assert "rank_worker.py" in ranks[0]["raising"]
    assert "RuntimeError" in ranks[0]["raising"]


def test_the_origin_of_nan_is_not_looked_for_in_a_second_run(ranks: list[Answers]) -> None:
    for answers in ranks:
        assert not any("second run" in note for note in answers["with nan"])
        assert any("The output has NaN" in note for note in answers["with nan"])


def test_a_plain_tensor_is_its_own_and_whole() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    assert local(parameter) is parameter
    assert piece_of(parameter) is None
    assert not wraps([torch.Tensor, torch.nn.Parameter])


def test_torch_distributed_is_imported_by_nobody_who_did_not_ask_for_it() -> None:
    program = (
        "import sys, torch\n"
        "before = {name for name in sys.modules if name.startswith('torch.distributed')}\n"
        "import mha_inspect\n"
        "layer, x = torch.nn.MultiheadAttention(8, 2), torch.zeros(3, 1, 8)\n"
        "mha_inspect.trace(layer, x, x, x), mha_inspect.params(layer, x, x, x)\n"
        "with mha_inspect.recording() as r:\n"
        "    layer(x, x, x)\n"
        "assert r.trace.attentions\n"
        "print({name for name in sys.modules if name.startswith('torch.distributed')} - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
