"""`mha-inspect diff`: its arguments, its exit codes, its formats, and every way in which it can be asked wrongly."""

from __future__ import annotations

import json

import pytest

SIZES = ("--embed-dim", "22", "--num-heads", "2", "--batch", "3", "--seq-len", "5")


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        ("", ("torch", "per-head")),
        ("per-head", ("per-head", "torch")),
        ("--layer bert --left-set dtype=float64", ("bert", "bert")),
    ],
)
def test_which_two_are_compared(invoke, line, layers):
    data = json.loads(invoke("diff", *line.split(), *SIZES, "--json").out)
    assert (data["left"]["layer"]["name"], data["right"]["layer"]["name"]) == layers


def test_fail_if_tells_a_script(invoke):
    same, unlike = ("diff", "torch", "fold-heads", *SIZES), ("diff", "torch", "narrow", *SIZES)
    assert [invoke(*same, "--fail-if", verdict).code for verdict in ("same", "differs")] == [1, 0]
    assert [invoke(*unlike, "--fail-if", verdict).code for verdict in ("same", "differs")] == [0, 1]


def test_the_page_names_the_stage_and_both_lines(invoke):
    out = invoke("diff", "torch", "narrow", *SIZES, "--plain").out
    first = out.partition("first stage that differs\n")[2].splitlines()
    assert first[0].startswith("stage  q_proj, ")
    assert "activation.py:" in first[1]
    assert "narrow.py:" in first[2]
    assert "First different stage: q_proj" in out.partition("\n")[0]
    assert "[3, 5, 22]" in out
    assert "2 × [3, 5, 11]" in out


def test_the_table_keeps_to_the_width(invoke, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("mha_inspect.cli.output.is_terminal", lambda stream: True)
    out = invoke("diff", "torch", "split-heads", "--padding", "1,2,5", *SIZES).out
    assert max(map(len, out.splitlines())) <= 80
    assert "masked_scores" in out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch narow", ["layer 'narow'", "Did you mean narrow?"]),
        ("torch bert --layer narrow", ["layer narrow is a third layer beside torch and bert"]),
        ("split-heads bert --set kdim=7", ["does not take kdim 7", "Layers that do: torch, fold-heads, per-head"]),
        (
            "torch split-heads --set kdim=7",
            ["takes k [3, 5, 22] and Multi", "key [3, 5, 7]", "the same sizes"],
        ),
        ("torch wide", ["head_dim is 11 on the left", "22 on the right", "Try --set head_dim=11."]),
        ("torch --left-set seq_len=7", ["--left-set seq_len affects both sides", "--seq-len"]),
        ("torch --right-set embed_dim=44", ["takes query [3, 5, 44] and", "query [3, 5, 22]"]),
        ("torch --right-set head_dim=4", ["layer torch does not take head_dim 4", "grouped-query"]),
        (
            "torch --right-set dtyp=float16",
            ["--right-set dtyp is not a setting", "Did you mean dtype?", "need_weights"],
        ),
        ("torch --right-set dtype=fp16", ["dtype=fp16 is invalid", "bfloat16"]),
        ("torch --left-set num_heads=3", ["left side", "embed_dim 22", "1, 2, 11, 22"]),
        ("torch --left-set attn_mask=absent.pt", ["absent.pt was not found"]),
        ("torch --device meta", ["device meta has shapes and no numbers", "trace --device meta"]),
        ("grouped-query --num-kv-heads 1 --left-set num_heads=11", ["num_kv_heads 1 is below num_heads"]),
        ("torch bert --set depth=2", ["--set depth=2 is not an argument"]),
        ("torch --num-heads 1,2", ["num_heads 1,2 is a list"]),
    ],
)
def test_what_cannot_be_compared_is_answered_with_a_way_out(invoke, line, said):
    sizes = SIZES if "--num-heads" not in line else (*SIZES[:2], *SIZES[4:])
    code, out, err = invoke("diff", *sizes, *line.split())
    assert (code, out) == (2, "")
    assert err.startswith("mha-inspect: ")
    assert err.count("\n") <= 2
    assert [part for part in said if part not in err] == []
