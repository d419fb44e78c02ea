"""Each command once through the installed program, and its formats inside this process."""

from __future__ import annotations

import json
import os
import re

import pytest

from mha_inspect.cli.help import COMMANDS

SMALL = {
    "trace": ["--embed-dim", "14", "--num-heads", "2", "--seq-len", "5"],
    "params": ["--embed-dim", "14", "--num-heads", "2"],
    "compare-heads": ["--embed-dim", "14", "--heads", "1,2,7", "--seq-len", "5"],
    "diff": ["--embed-dim", "14", "--num-heads", "2", "--seq-len", "5"],
    "check": ["--embed-dim", "14", "--num-heads", "2", "--seq-len", "5"],
}
each_command = pytest.mark.parametrize(
    "command", [command for command in COMMANDS if command not in ("layers", "help")]
)


@each_command
def test_the_bare_command_answers_in_plain_text(program, command):
    code, out, err = program(command)
    assert (code, err) == (0, "")
    assert "embed_dim 512" in out
    assert not re.search("[─-╿\x1b]", out)
    assert out.endswith("\n")


@each_command
def test_a_reader_that_is_gone_ends_it_quietly(program, command):
    read, write = os.pipe()
    os.close(read)
    code, _, err = program(command, *SMALL[command], stdout=write)
    os.close(write)
    assert (code, err) == (141, "")


@each_command
def test_table_has_color_and_the_width_that_were_asked_for(invoke, monkeypatch, command):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    out = invoke(command, *SMALL[command]).out
    assert "\x1b[" in out
    assert max(len(re.sub("\x1b\\[[0-9;]*m", "", line)) for line in out.splitlines()) <= 100
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in invoke(command, *SMALL[command]).out


@each_command
@pytest.mark.parametrize("ending", ["txt", "json", "html"])
def test_export_prints_as_well(invoke, tmp_path, command, ending):
    target = tmp_path / f"report.{ending}"
    code, out, err = invoke(command, *SMALL[command], "--json", "--export", str(target))
    assert (code, err) == (0, "")
    written = target.read_text(encoding="utf-8")
    begins = {"txt": "", "json": "{", "html": "<!DOCTYPE html>"}[ending]
    assert written.startswith(begins)
    assert ending != "txt" or "\nlayer torch" in f"\n{written}"
    assert json.loads(out)["command"] == command
    assert ending != "json" or written == out


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_export_that_fails_leaves_the_answer_on_stdout(invoke, tmp_path):
    link = tmp_path / "report.txt"
    link.symlink_to("/dev/full")
    code, out, err = invoke("params", *SMALL["params"], "--export", str(link))
    assert code == 2
    assert out == invoke("params", *SMALL["params"]).out
    assert "No space left on device" in err


@each_command
def test_every_shared_option_is_taken_by_every_command_that_has_it(invoke, command):
    sizes = SMALL[command][:4]
    flags = "--batch-first --batch 2 --seq-len 5 --key-len 3 --seed 3 --dtype float64 --device cpu"
    flags += " --color never" if command == "params" else " --causal --padding 1 -q"
    flags += "" if command == "check" else " --eval"
    flags += {"trace": " --no-grad --ops --need-weights --per-head-weights", "diff": " --grad"}.get(command, "")
    flags += " --stats --values" if command in ("trace", "params") else ""
    code, _, err = invoke(command, *sizes, *flags.split())
    assert (code, err) == (0, "")


def test_fail_if_tells_a_script(invoke):
    line = ["compare-heads", *SMALL["compare-heads"]]
    assert invoke(*line, "--fail-if", "differs").code == 1
    assert invoke(*line, "--fail-if", "same").code == 0
    # With one key every weight is 1, so no head count can change anything.
    assert invoke(*line, "--key-len", "1", "--fail-if", "differs").code == 0
    assert invoke(*line, "--key-len", "1", "--fail-if", "same").code == 1


def test_params_sets_head_counts_side_by_side(invoke):
    columns = json.loads(invoke("params", "--embed-dim", "14", "--num-heads", "1,2,2,7", "--json").out)
    assert [column["num_heads"] for column in columns["side_by_side"]] == [1, 2, 7]
    assert "side_by_side" not in json.loads(invoke("params", "--embed-dim", "14", "--num-heads", "2", "--json").out)


def test_compare_heads_takes_the_first_for_the_baseline(invoke):
    report = json.loads(invoke("compare-heads", "--embed-dim", "14", "--heads", "7,1,2", "--json").out)
    assert report["baseline"] == 7
    assert [count["num_heads"] for count in report["counts"]] == [7, 1, 2]
