"""Commands on 2 ranks with gloo: rank 0 answers for both, and a failing rank ends both with its cause."""

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
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mha_inspect.answers.ranks import unlike
from mha_inspect.cli import ranks
from mha_inspect.errors import InputError

TARGETS = "tests.cli.rank_targets"
ROOT = Path(__file__).parents[2]
BREAKS = ("raises", "skips", "sleeps", "receives", "is killed")
COMMANDS = {
    "sharded": ["trace", f"{TARGETS}:sharded", "--json"],
    "own group": ["trace", f"{TARGETS}:in_its_own_group"],
    "given group": ["trace", f"{TARGETS}:in_a_given_group"],
    "forward's group": ["trace", f"{TARGETS}:group_for_its_forward"],
    "copied keys": ["trace", f"{TARGETS}:copied_keys", "--json"],
    "cut key head": ["trace", f"{TARGETS}:cut_key_head", "--json"],
    "drifted": ["trace", f"{TARGETS}:drifted", "--json"],
    "params": ["params", f"{TARGETS}:sharded", "--json", "--export", "FOLDER/params.json"],
    **{how: ["trace", f"{TARGETS}:broken", "--set", f"how={how}"] for how in BREAKS},
    "asleep": ["trace", f"{TARGETS}:asleep"],
    "asleep in its target": ["trace", f"{TARGETS}:asleep_in_its_target"],
    "killed": ["trace", f"{TARGETS}:killed"],
    "unknown": ["trace", f"{TARGETS}:unknown"],
    "no backend": ["trace", f"{TARGETS}:without_backend"],
    "no device": ["trace", f"{TARGETS}:without_device"],
    "no backend, late": ["trace", f"{TARGETS}:late_without_backend"],
    "not built": ["trace", f"{TARGETS}:fails_beside_a_barrier"],
    "other class": ["check", f"{TARGETS}:other_class", "--json"],
    "other code": ["trace", f"{TARGETS}:other_code"],
    "params, raises": ["params", f"{TARGETS}:broken", "--set", "how=raises"],
    "usage": ["trace", f"{TARGETS}:sharded", "--batch", "many"],
    "check": ["check", f"{TARGETS}:sharded", "--json"],
    "check by hand": ["check", f"{TARGETS}:broken", "--set", "how=works", "--json"],
    "check own experts": ["check", f"{TARGETS}:own_experts", "--json"],
    "check built twice": ["check", f"{TARGETS}:in_its_own_group", "--causal", "--seq-len", "5"],
    "check drifted": ["check", f"{TARGETS}:drifted", "--json"],
    "check drifted input": ["check", f"{TARGETS}:drifted_input_under_fsdp", "--json"],
    **{
        f"check stages {who}": ["check", f"{TARGETS}:stage_of", "--set", f"attends={who}", "--json"]
        for who in ("0", "1", "none")
    },
    "diff": ["diff", f"{TARGETS}:sharded", f"{TARGETS}:sharded"],
    "decode": ["trace", f"{TARGETS}:sharded", "--decode", "1"],
}


@dataclass(frozen=True)
class Rank:
    code: int
    seconds: float
    out: str
    err: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both ranks of each command, from processes that have ended; and the ports that are still open."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "commands.json").write_text(json.dumps(COMMANDS).replace("FOLDER", str(folder)))
    # The ranks are forked after torch has read the level, which a rank of torchrun sets itself.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(
        [sys.executable, "-m", TARGETS, str(folder)], cwd=ROOT, env=environment, start_new_session=True
    ) as started:
        try:
            started.wait(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    found = json.loads((folder / "ended.json").read_text())

    def said(name: str, rank: int, ending: str) -> str:
        return (folder / f"{name}.{rank}.{ending}").read_text()

    every = {
        name: [Rank(*found["ended"][name][rank], said(name, rank, "out"), said(name, rank, "err")) for rank in (0, 1)]
        for name in COMMANDS
    }
    return {**every, "ports left": found["ports left"], "exported": (folder / "params.json").read_text()}


def test_rank_0_answers_and_the_other_is_silent(ran: dict[str, Any]) -> None:
    for name in COMMANDS:
        first, other = ran[name]
        assert (other.out, other.err) == ("", ""), name
        assert other.code == (-signal.SIGKILL if name in ("is killed", "killed") else 0), name
        assert first.out or first.err, name
    assert ran["ports left"] == []


def test_a_trace_has_both_ranks_and_the_shapes_over_them(ran: dict[str, Any]) -> None:
    trace = json.loads(ran["sharded"][0].out)
    assert ran["sharded"][0].code == 0
    assert ran["sharded"][0].err == "printed by the target\n"
    for rank, found in enumerate(trace["ranks"]):
        rows = [16 * rank, 16 * rank + 16]
        assert (found["rank"], found["heads"], found["kv_heads"], found["kv_copied"]) == (rank, 2, 2, False)
        assert found["rows"] == {"W_q": rows, "W_k": rows, "W_v": rows, "W_o": rows}
        assert found["bytes"] == 4 * (4 * 32 * 16 + 3 * 16 + 32)
        assert found["exchanged"] == 4 * 2 * 5 * 32
    stages = {stage["name"]: stage for stage in trace["attentions"][0]["stages"]}
    assert (stages["q_heads"]["shape"], stages["q_heads"]["whole"]) == ([2, 2, 5, 8], [2, 4, 5, 8])
    assert (stages["output"]["shape"], stages["output"].get("whole")) == ([2, 5, 32], None)


def test_what_ranks_should_have_alike_is_compared(ran: dict[str, Any]) -> None:
    said = [
        "Every rank has a copy of o.bias, and the copy of rank 1 differs from rank 0.",
        "The ranks compute different heads of one input, and x of rank 1 differs from rank 0.",
    ]
    assert json.loads(ran["drifted"][0].out)["notes"][-2:] == said
    assert not [note for note in json.loads(ran["sharded"][0].out)["notes"] if "differ" in note]
    findings = json.loads(ran["check drifted"][0].out)["findings"]
    assert [(found["check"], found["sentence"]) for found in findings] == [("ranks", sentence) for sentence in said]
    assert ran["check drifted"][0].code == 1
    findings = json.loads(ran["check drifted input"][0].out)["findings"]
    assert [found["sentence"] for found in findings] == said[1:]


def test_a_matrix_of_one_rank_alone_may_be_meant(ran: dict[str, Any]) -> None:
    findings = json.loads(ran["check own experts"][0].out)["findings"]
    assert [(found["sure"], found["sentence"].partition(" rank 1 ")[0]) for found in findings] == [
        (True, "Every rank has a copy of 0.weight, and the copy of"),
        (False, "2.weight, 2.bias of"),
    ]


@pytest.mark.parametrize("name", ["check", "check by hand"])
def test_check_runs_a_module_once_that_is_spread_over_ranks(ran: dict[str, Any], name: str) -> None:
    report = json.loads(ran[name][0].out)
    assert (ran[name][0].code, report["findings"], report["runs"]) == (0, [], 1)
    assert {"heads", "finite", "ranks"} <= {passed["check"] for passed in report["held"]}
    skipped = {each["check"]: each["reason"] for each in report["left_out"]}
    assert skipped["batch"] == "needs more than one run, and the module is spread over ranks"


@pytest.mark.parametrize("who", ["0", "1"])
def test_a_stage_of_a_pipeline_may_have_no_attention(ran: dict[str, Any], who: str) -> None:
    first, _ = ran[f"check stages {who}"]
    report = json.loads(first.out)
    assert [(found["check"], found["sure"]) for found in report["findings"]] == [("ranks", False)]
    skipped = {each["check"]: each["reason"] for each in report["left_out"]}
    assert (skipped.get("heads") == "this rank has no attention") == (who == "1")


def test_key_heads_that_both_ranks_have_are_copies(ran: dict[str, Any]) -> None:
    trace = json.loads(ran["copied keys"][0].out)
    for rank, found in enumerate(trace["ranks"]):
        assert (found["heads"], found["kv_heads"], found["kv_copied"]) == (2, 1, True)
        assert (found["rows"]["W_q"], found["rows"]["W_k"]) == ([16 * rank, 16 * rank + 16], [0, 8])


@pytest.mark.parametrize("name", ["own group", "given group"])
def test_the_target_or_the_command_makes_the_process_group(ran: dict[str, Any], name: str) -> None:
    first, _ = ran[name]
    assert first.code == 0
    assert "q_heads  [2, 2, 5, 8] of [2, 4, 5, 8]" in first.out
    assert "0–15, 16–31" in first.out


def test_a_head_that_is_cut_over_ranks_is_the_cause_of_a_view_that_raises(ran: dict[str, Any]) -> None:
    first, _ = ran["cut key head"]
    failure = json.loads(first.out)["failure"]
    assert (first.code, failure["call"], failure["cause"]["name"]) == (1, "Tensor.unflatten", "cut_over_ranks")
    # The key head has 8 features: 4 on each of 2 ranks.
    said = "has 4 of 8 features: its layer is cut over ranks, inside of a head of 8."
    assert failure["cause"]["explanation"].endswith(said)


def test_a_forward_alone_may_need_the_process_group(ran: dict[str, Any]) -> None:
    first, _ = ran["forward's group"]
    assert (first.code, "1 allreduce" in first.out) == (0, True)


def test_another_command_answers_once(ran: dict[str, Any]) -> None:
    report = json.loads(ran["params"][0].out)
    assert (report["parameters"][0]["shape"], report["parameters"][0]["whole"]) == ([16, 32], [32, 32])
    assert report["parameters"][0]["start"] == [0, 0]
    assert report["ranks"] == json.loads(ran["sharded"][0].out)["ranks"]
    assert ran["exported"] == ran["params"][0].out


def test_a_rank_that_raises_is_reported_by_rank_0(ran: dict[str, Any]) -> None:
    first, _ = ran["raises"]
    assert first.code == 1
    assert "x.view(3, 7)" in first.out
    assert "shape '[3, 7]' is invalid for input of size 320" in first.out
    assert first.err.splitlines()[-1] == "mha-inspect: rank 1 of 2 failed: see above."


@pytest.mark.parametrize(
    ("how", "first_waits", "other"),
    [
        ("skips", "at {rank 0 waits here}", "has finished"),
        ("sleeps", "at {rank 0 waits here}", "stands still at {rank 1 sleeps in its forward}"),
        ("receives", "at {rank 0 waits here}", "waits at {rank 1 receives here}"),
        ("asleep in its target", "at {rank 0 waits in its target}", "stands still at {rank 1 sleeps in its target}"),
        ("asleep", "for the result of its forward", "stands still at {rank 1 sleeps in a hook}"),
    ],
)
def test_a_collective_that_never_comes_is_reported_with_the_lines(
    ran: dict[str, Any], how: str, first_waits: str, other: str
) -> None:
    first, _ = ran[how]
    source = "tests/cli/rank_targets.py"
    lines = {text.partition("  # ")[2]: n for n, text in enumerate((ROOT / source).read_text().splitlines(), 1)}
    places = {comment: f"{source}:{number}" for comment, number in lines.items()}
    both = f"rank 0 waits {first_waits} and rank 1 {other}.".format(**places)
    said = f"{both} Every rank must run the same collectives in one order."
    assert (first.code, first.out, first.err.splitlines()[-1]) == (1, "", f"mha-inspect: {said}")


def test_a_rank_that_is_killed_ends_the_other_with_its_name(ran: dict[str, Any]) -> None:
    for name in ("is killed", "killed"):  # the second while rank 0 waits for the result of its forward
        first, _ = ran[name]
        assert first.code == 1
        assert first.err.splitlines()[-1] == "mha-inspect: rank 1 of 2 has ended: it was killed, or it crashed."
        assert "Traceback" not in first.err
    assert "dist.all_reduce(x + 0)" in ran["is killed"][0].out


def test_a_rank_that_still_runs_while_another_waits_is_named_once(capfd: pytest.CaptureFixture[str]) -> None:
    """It may loop forever or be slow: nobody can know."""
    held = {"place/0": b'["a.py:7", true, true]', "place/1": b'["a.py:3", false, false]'}
    first = object.__new__(ranks.Member)
    first.rank, first.world, first._err, first._waits, first._done = 0, 2, 2, 0, ["done/0", "done/1"]
    first._store = SimpleNamespace(
        check=lambda keys: held.keys() >= {*keys}, multi_get=lambda keys: [held[key] for key in keys]
    )
    for _ in range(3 * ranks._STALLED):
        first._look_for_stuck_ranks()
    assert capfd.readouterr().err == "mha-inspect: rank 0 waits at a.py:7 and rank 1 is still running at a.py:3.\n"


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("not built", 2, "rank 1 cannot be built"), ("params, raises", 1, "shape '[3, 7]' is invalid")],
)
def test_the_error_of_one_rank_is_named_and_not_what_follows_on_another(
    ran: dict[str, Any], name: str, code: int, said: str
) -> None:
    first, _ = ran[name]
    assert (first.code, first.out) == (code, "")
    assert said in first.err
    assert first.err.splitlines()[-1] == "mha-inspect: rank 1 of 2 failed: see above."


def test_another_class_on_a_rank_may_be_meant(ran: dict[str, Any]) -> None:
    (found,) = json.loads(ran["other class"][0].out)["findings"]
    assert (found["sentence"], found["sure"]) == ("The classes of rank 1 differ from rank 0.", False)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unknown", "has no unknown"),
        (
            "no backend",
            "without_backend() cannot be built: RuntimeError: Distributed package doesn't have NCCL built in",
        ),
        ("check stages none", "Linear has no attention to check: no softmax(QKᵀ)V was found."),
        ("no device", "This machine has no cuda. Give init_device_mesh another device, e.g. cpu."),
        (
            "no backend, late",
            "late_without_backend() cannot be built: RuntimeError: Distributed package doesn't have NCCL built in",
        ),
        ("other code", f"The code of {TARGETS} on rank 1 differs from rank 0. Copy one version to every rank."),
        ("check built twice", "so --seq-len does not apply"),
        ("usage", "--batch many is not a whole number"),
        ("diff", "a comparison runs Attention several times"),
        ("decode", "--decode runs Attention several times"),
    ],
)
def test_bad_input_is_two_lines_on_rank_0_alone(ran: dict[str, Any], name: str, said: str) -> None:
    first, _ = ran[name]
    if name.startswith("no ") and torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    assert (first.code, first.out) == (2, "")
    lines = [line for line in first.err.splitlines() if line.startswith("mha-inspect: ")]
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.parametrize("name", ["in_its_own_group", "in_a_given_group"])
def test_a_target_that_needs_ranks_says_how_to_start_them(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    answer = invoke("trace", f"{TARGETS}:{name}")
    assert (answer.code, answer.out) == (2, "")
    assert "This is one process: start the command with torchrun" in answer.err


def test_every_command_ends_within_seconds_of_its_failure(ran: dict[str, Any]) -> None:
    usual = max(rank.seconds for rank in ran["sharded"])  # all commands run at once
    for name in COMMANDS:
        assert max(rank.seconds for rank in ran[name]) < 2 * usual + 10, name


def test_a_rank_that_is_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_PATIENCE", 1)
    with pytest.raises(InputError, match="RANK is 0 and WORLD_SIZE 2, but not all ranks started within 1 s"):
        ranks.Member().join()


@pytest.mark.parametrize(("rank", "world"), [("0", "1"), ("0", "many"), ("first", "2"), ("", "2")])
def test_a_command_runs_alone_where_the_environment_has_no_ranks(
    monkeypatch: pytest.MonkeyPatch, rank: str, world: str
) -> None:
    given = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert ranks.on_every_rank(lambda: 7) == 7
    assert ranks.member is None


def test_torchrun(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "mha_inspect",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *COMMANDS["sharded"]], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert [rank["rank"] for rank in json.loads(done.stdout)["ranks"]] == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_writes_the_file(
    invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int
) -> None:
    monkeypatch.setattr(ranks, "member", SimpleNamespace(rank=rank, leave=int, join=lambda: None))
    file = tmp_path / "layers.txt"
    assert invoke("layers", "--export", str(file)).code == 0
    assert file.exists() == (rank == 0)


def digests(**given: Any) -> dict[str, Any]:
    kinds = ("code", "names", "weights", "plain", "inputs", "operations")
    return {"heads": None, "shapes": [], **{kind: {} for kind in kinds}, **given}


def test_code_that_a_rank_did_not_load_is_not_other_code() -> None:
    first, other, none = (digests(code=code) for code in ({"model": "1"}, {"model": "2"}, {}))
    assert [*unlike([first, none])] == []
    with pytest.raises(InputError, match="The code of model on rank 1 differs from rank 0"):
        list(unlike([first, other, none]))


@pytest.mark.parametrize(
    ("heads", "inputs", "differ"),
    [
        ("01", "ab", "rank 1 "),
        ("0101", "aaaa", ""),
        ("0101", "aabb", ""),  # two pairs of ranks, each with all heads and a part of the data
        ("0011", "abab", ""),
        ("0101", "abcc", "rank 1 "),
        ("0101", "abcd", "rank 1–3 "),
        ("00", "ab", ""),
        ("0-", "ab", ""),  # a stage of a pipeline without attention
    ],
)
def test_ranks_with_all_heads_among_them_may_have_their_own_input(heads: str, inputs: str, differ: str) -> None:
    pairs = zip(heads, inputs, strict=True)
    every = [digests(heads=None if rank == "-" else rank, inputs={"x": digest}) for rank, digest in pairs]
    said = " ".join(finding.sentence for finding in unlike(every))
    assert (f"x of {differ}differs from rank 0." in said) if differ else not said
