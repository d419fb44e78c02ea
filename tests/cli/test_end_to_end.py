"""A bare command through the installed program, and the formats and options of each inside this process."""

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
    "command", [command for command in COMMANDS if command not in ("fix", "layers", "help")]
)


def test_a_bare_command_answers_in_plain_text(program):
    code, out, err = program("trace")
    assert (code, err) == (0, "")
    assert "embed_dim 512" in out
    assert not re.search("[─-╿\x1b]", out)
    assert out.endswith("\n")


@each_command
def test_export_prints_as_well(invoke, tmp_path, command):
    target = tmp_path / "report.html"
    code, out, err = invoke(command, *SMALL[command], "--json", "--export", str(target))
    assert (code, err) == (0, f"mha-inspect: wrote {target}\n")
    assert target.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads(out)["command"] == command


def test_an_export_is_what_is_printed(invoke, tmp_path):
    for ending, flags in (("txt", ()), ("json", ("--json",))):
        target = tmp_path / f"report.{ending}"
        answer = invoke("trace", *SMALL["trace"], *flags, "--export", str(target))
        assert target.read_text(encoding="utf-8") == answer.out


@each_command
def test_every_shared_option_is_taken_by_every_command_that_has_it(invoke, command):
    sizes = SMALL[command][:4]
    flags = "--batch-first --batch 2 --seq-len 5 --key-len 3 --seed 3 --dtype float64 --device cpu"
    flags += "" if command == "params" else " --causal --padding 1 -q"
    flags += "" if command == "check" else " --eval"
    flags += " --set grad=true --set average_weights=false" + (" --ops" if command == "trace" else "")
    flags += " --stats --values" if command in ("trace", "params") else ""
    code, _, err = invoke(command, *sizes, *flags.split())
    assert (code, err) == (0, "")


def test_compare_heads_takes_the_first_for_the_baseline(invoke):
    report = json.loads(invoke("compare-heads", "--embed-dim", "14", "--heads", "7,1,2", "--json").out)
    assert report["baseline"] == 7
    assert [count["num_heads"] for count in report["counts"]] == [7, 1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_export_that_fails_leaves_the_answer_on_stdout(invoke, tmp_path):
    link = tmp_path / "report.txt"
    link.symlink_to("/dev/full")
    code, out, err = invoke("params", *SMALL["params"], "--export", str(link))
    assert code == 2
    assert out == invoke("params", *SMALL["params"]).out
    assert "No space left on device" in err
