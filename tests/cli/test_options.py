"""The options: the same words everywhere, defaults that are the specs' own, and a variable for each."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest
from typer.main import get_command

from mha_inspect.cli import check, compare_heads, diff, options, params, trace
from mha_inspect.cli.options import SET_BY_TEXT, Options
from mha_inspect.layers.spec import DTYPES, AttentionSpec, InputSpec, RunSpec, Show

APPS = {
    "trace": trace.trace,
    "params": params.params,
    "compare-heads": compare_heads.compare_heads,
    "diff": diff.diff,
    "check": check.check,
}

SHARED = frozenset(get_type_hints(Options)) - {*SET_BY_TEXT}


def parameters(command: str) -> dict[str, object]:
    return {parameter.name: parameter for parameter in get_command(APPS[command]).params}


def test_bare_options_are_the_specs_defaults():
    bare = Options()
    assert bare.attention_spec(bare.single_head_count("trace")) == AttentionSpec()
    assert bare.input_spec() == InputSpec()
    assert bare.run_spec() == RunSpec()
    assert bare.show() == Show()
    assert options.DTYPES == DTYPES


@pytest.mark.parametrize(
    ("flags", "made", "expected"),
    [
        ("--embed-dim 21 --num-heads 7", "attention_spec", {"embed_dim": 21, "num_heads": 7}),
        ("--set dropout=0.25 --train", "attention_spec", {"dropout": 0.25, "training": True}),
        (
            "--set unbatched=true --causal --padding 3",
            "input_spec",
            {"unbatched": True, "causal": True, "padding": (3,)},
        ),
        ("--device meta --set grad=true", "run_spec", {"device": "meta", "grad": True}),
        ("--values --json", "show", {"values": True, "full_values": True}),
    ],
)
def test_each_flag_reaches_its_spec(flags, made, expected):
    ctx = get_command(trace.trace).make_context("trace", flags.split())
    given = Options(**ctx.params)
    given.take_settings("trace")
    counts = given.head_counts() if made == "attention_spec" else ()
    spec = getattr(given, made)(*counts)
    default = {"attention_spec": AttentionSpec(), "input_spec": InputSpec(), "run_spec": RunSpec(), "show": Show()}[
        made
    ]
    assert {name: getattr(spec, name) for name in expected} == expected
    derived = {"head_dim"} if "embed_dim" in expected else set()
    untouched = {field.name for field in dataclasses.fields(default)} - set(expected) - derived
    assert all(getattr(spec, name) == getattr(default, name) for name in untouched)


def test_the_shared_options_are_the_same_in_every_command():
    everywhere = [parameters(command) for command in APPS]
    for name in SHARED:
        asked = [options[name] for options in everywhere if name in options]
        assert len({(tuple(option.opts), option.default, option.help) for option in asked}) == 1, name


NUMBERS = ["--ops", "--stats", "--values"]


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("trace", []),
        ("params", ["--ops", "--causal", "--padding", "--attn-mask"]),
        ("compare-heads", ["--num-heads", *NUMBERS]),
        ("diff", NUMBERS),
        ("check", [*NUMBERS, "--train", "--attn-mask"]),
    ],
)
def test_a_command_takes_what_it_has_a_use_for(invoke, command, without):
    taken = {parameter.opts[-1] for name, parameter in parameters(command).items() if name in SHARED}
    every = {parameter.opts[-1] for name, parameter in parameters("trace").items() if name in SHARED}
    assert every - taken == set(without)
    page = invoke(command, "--help").out
    for flag in without:
        assert f"{flag} " not in page
        code, out, err = invoke(command, flag)
        assert (code, out) == (2, "")
        assert err.startswith(f"mha-inspect: {command} has no option {flag}: it belongs to `mha-inspect trace`")


def test_quiet_leaves_out_what_was_decided_on_somebodys_behalf(invoke):
    line = ["params", "torch.nn:MultiheadAttention", "--embed-dim", "8", "--num-heads", "2"]
    told, quiet = invoke(*line), invoke(*line, "-q")
    assert told.err.startswith("mha-inspect: Built with embed_dim=8")
    assert quiet == told._replace(err="")
    # What went wrong is said in any case.
    assert "num_heads=3" in invoke(*line, "--num-heads", "3", "-q").err


@pytest.mark.parametrize("command", APPS)
def test_every_option_reads_the_variable_of_its_name(command):
    for parameter in parameters(command).values():
        if parameter.name != "help" and parameter.param_type_name == "option":
            # Where --picture has no value the command reads no variable, which may have one for trace.
            assert parameter.allow_from_autoenv is not (parameter.name == "picture" and parameter.is_flag)
            assert parameter.envvar is None  # Click reads it from the prefix and the name


def test_the_variable_sets_the_option_and_the_flag_wins(monkeypatch):
    monkeypatch.setenv("MHA_INSPECT_EMBED_DIM", "30")
    monkeypatch.setenv("MHA_INSPECT_BATCH_FIRST", "false")
    command = get_command(trace.trace)
    assert command.make_context("trace", []).params["embed_dim"] == 30
    assert command.make_context("trace", []).params["batch_first"] is False
    assert command.make_context("trace", ["--embed-dim", "70"]).params["embed_dim"] == 70
