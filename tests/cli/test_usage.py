"""Command lines that cannot be understood: exit code 2, one line that names the way out, nothing on stdout."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trcae", ["trcae is not a command", "Did you mean trace?"]),
        ("compare", ["Did you mean compare-heads?"]),
        ("trace --embed-dmi 3", ["no option --embed-dmi", "Did you mean --embed-dim?", "mha-inspect trace --help"]),
        ("trace --dtype float23", ["--dtype float23", "float64", "Did you mean float32?"]),
        ("trace --dtype fp16", ["Did you mean float16?"]),
        ("trace --layer trch", ["--layer trch", "Did you mean torch?"]),
        ("trace --format jsn", ["--format jsn", "Did you mean json?"]),
        ("compare-heads --fail-if differ", ["--fail-if differ", "Did you mean differs?"]),
        ("--versoin", ["Did you mean --version?"]),
        ("--embed-dim 3 trace", ["--embed-dim stands before the command", "mha-inspect trace --embed-dim"]),
        ("trace --gradients", ["no option --gradients", "mha-inspect compare-heads"]),
        ("trace --embed-dim abc", ["--embed-dim abc is not a whole number", "512"]),
        ("trace --dropout abc", ["--dropout abc is not a number"]),
        ("trace --embed-dim", ["--embed-dim was given without a value"]),
        ("trace --bias=1", ["--bias takes no value"]),
        ("trace 512", ["512 is not a target", "package.module:Name", "--embed-dim 512"]),
        ("trace --num-heads 1,2", ["num_heads 1,2 is a list", "trace takes one number", "params --num-heads 1,2"]),
        ("params --num-heads 1,x", ["num_heads 1,x", "1,2,4"]),
        ("params --num-heads ,", ["num_heads ,"]),
        ("compare-heads --heads 2;4", ["heads 2;4", "--heads 1,2,4"]),
        ("trace --padding x", ["padding x"]),
        ("trace --seed -1", ["seed -1", "2**64 - 1"]),
        ("trace --precision 99", ["precision 99", "0 to 17"]),
        ("trace --edge-items 0", ["edge_items 0", "1 or more"]),
        ("trace --embed-dim 1" + "0" * 30, ["more than a size can be", "2**40"]),
        ("trace --num-heads 1" + "0" * 5000, ["num_heads 1000"]),
        ("trace a.py:B c", ["trace has no use for c", "--embed-dim 512"]),
        ("layers b", ["layers has no use for b. What it takes: mha-inspect layers --help"]),
        ("trace --left-set dtype=float64", ["no option --left-set", "mha-inspect diff"]),
        ("trace --attention 2 --embed-dim 8", ["attention 2", "there is only 1"]),
        ("trace --module layer --embed-dim 8", ["module layer", "leave --module out"]),
        ("compare-heads --heads 4", ["heads 4", "--heads 4,1"]),
    ],
)
def test_usage_error(invoke, line, said):
    code, out, err = invoke(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith("mha-inspect: ")
    assert err.count("\n") == 1
    assert len(err) < 300
    assert [part for part in said if part not in err] == []


def test_what_was_typed_cannot_move_the_cursor(invoke):
    for line in (["\x1b[2Jx"], ["trace", "--a\x1b[2J\u202e"], ["trace", "--dtype", "\x07\n"], ["trace", "\x1b]0;x"]):
        code, _, err = invoke(*line)
        assert code == 2
        assert all(character.isprintable() for character in err.removesuffix("\n"))


def test_a_bad_variable_is_named_not_the_flag(invoke, monkeypatch):
    monkeypatch.setenv("MHA_INSPECT_EMBED_DIM", "wide")
    code, _, err = invoke("trace")
    assert code == 2
    assert "MHA_INSPECT_EMBED_DIM wide is not a whole number" in err


def test_a_variable_that_is_neither_true_nor_false(invoke, monkeypatch):
    monkeypatch.setenv("MHA_INSPECT_BATCH_FIRST", "maybe")
    code, _, err = invoke("trace")
    assert (code, err) == (
        2,
        "mha-inspect: MHA_INSPECT_BATCH_FIRST 'maybe' is neither true nor false: write one of the two.\n",
    )


def test_no_command_shows_the_help(invoke):
    code, out, err = invoke()
    assert (code, err) == (0, "")
    assert out == invoke("--help").out


def test_version(program):
    import mha_inspect

    assert program("--version") == (0, f"mha-inspect {mha_inspect.__version__}\n", "")
    assert program("-V") == program("--version")


def test_usage_error_through_the_installed_program(program):
    code, out, err = program("trcae")
    assert (code, out) == (2, "")
    assert "Did you mean trace?" in err
