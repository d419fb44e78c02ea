"""Command lines that people type, mistype, and would never type: an answer, or a line that says what is wrong."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import strategies as st
from typer.main import get_command

from mha_inspect.cli.app import COMMANDS, app
from mha_inspect.files import memory
from mha_inspect.layers.catalog import LAYERS

from .contract import in_time, require_answer
from .files import WHOLE

SMALL = ["1", "2", "3", "4", "6", "8", "12"]
STRANGE = st.one_of(
    st.sampled_from(["0", "-1", "1e3", "nan", "inf", "", " ", "1,2", "1,,2", ",", "0x10", "٣", "1_0", "true", "None"]),
    st.sampled_from(["2147483648", "4294967296", "9223372036854775808", "1099511627776", "9" * 400, "a" * 5000]),
    st.sampled_from(["\x1b[31m", "\u202e", "é" * 300, "e" + "\u0301" * 3000, "a\nb", "--", "-", "=", "torch"]),
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=8),
)
WORDS = {
    "--layer": [*LAYERS, "tensor", ""],
    "--dtype": ["float64", "bfloat16", "float16", "int8"],
    "--device": ["cpu", "meta", "cuda", "mps", "cuda:9", "xla"],
    "--set": ["x=1", "=", "depth", "a.b=2", "dim_feedforward=7", "dropout=2", "batch_first=True", "dtype=int8"],
    "--input-shape": ["x=2x3", "x=", "2x3:float32", "x=1x99999999999999999999", "src=3x2x12", "query=2x3x12:float64"],
    "--attention": ["1", "layers.0", "self_attn", "99"],
    "--picture": ["weights", "scores:0", "q_heads:0,9", "output:1-0"],
    "--ranks": ["1", "2", "2:plan.json", ":"],
    "--tokens": ["a,b,c", "nothing.txt", ","],
    "--like": ["torch", "torch.nn:MultiheadAttention", "hf:", "x.pt"],
    "--left-set": ["bias=False", "dtype=bfloat16", "=", "num_heads=2", "seed=1"],
    "--right-set": ["bias=False", "dtype=bfloat16", "=", "num_heads=2", "seed=1"],
    "--left-module": ["", "self_attn"],
    "--right-module": ["", "self_attn"],
    "--reference": ["torch.nn:Linear", "torch.nn:MultiheadAttention", ""],
    "--mask": ["key_padding_mask=ignore", "src_key_padding_mask=keep", "attn_mask", "x=keep", "=keep", "query"],
    "--cache": ["query", "key", "memory", "x"],
    "--only": ["heads", "causal", "batch", "x"],
    "--skip": ["heads", "causal", "batch", "x"],
    "--padding": ["1", "1,2", "3"],
    "--heads": ["1,2", "1,2,3,4", "2"],
}
"""Values for the options whose help has no list of them."""
FILES = ["/dev/null", "/dev/zero", "/", ".", "nothing.pt", "x" * 300 + ".pt", "/" + "y/" * 3000 + "a.pt", "a.txt"]
FILES += ["", "/proc/self/mem", "\x1b[0m.pt", "/etc/shadow/x.json"]
TARGETS = [
    *("torch.nn:MultiheadAttention", "torch.nn:TransformerEncoderLayer", "torch.nn:TransformerDecoderLayer") * 3,
    *("torch.nn:Transformer", "torch.nn:Linear", "torch.nn:Module", "torch.nn:LazyLinear", "torch.nn:GRU", "torch"),
    *("torch:zzz", "no.such:Thing", "x.py", "x.py:A", ":", "a:b:c", "/dev/zero.py:X", "x" * 4000 + ":Y", "os:_exit"),
    *("hf:", "hf:/", "a" * 300 + ".py:X", "sys:exit"),
    *("whole.pt", "whole.safetensors", ".", "/dev/zero.pt", "x" * 300 + ".bin", "nothing.safetensors.index.json"),
]


@cache
def options_of(command: str) -> list[tuple[list[str], list[str] | None]]:
    """The spellings of each option of a command, and values that it knows; None where it takes none."""
    program: Any = get_command(app)
    spelled: list[tuple[list[str], list[str] | None]] = [(["--help", "-h"], None)]
    for parameter in program.get_command(None, command).params:
        if parameter.param_type_name != "option":
            continue
        names = [*parameter.opts, *parameter.secondary_opts]
        spelled.append((names, None if parameter.is_flag else values_of(names, parameter.metavar or "")))
    return spelled


def values_of(names: list[str], metavar: str) -> list[str]:
    """Return values of an option: ours, or those that its help lists as `a|b`."""
    for name in names:
        if name in WORDS:
            return WORDS[name]
    return {"N": SMALL, "FILE": FILES}.get(metavar, metavar.split("|"))


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """The arguments of one command line."""
    command = draw(st.sampled_from([*COMMANDS, *COMMANDS, "trce", ""]))
    line = [command]
    if command != "layers" and draw(st.integers(0, 9)):
        line += ["--embed-dim", "12", "--num-heads", "2", "--seq-len", "3"]
        line += ["--heads", "1,2"] if command == "compare-heads" else []
    for _ in range(draw(st.sampled_from([0, 0, 1, 2] if command == "diff" else [0, 0, 0, 1, 1, 2]))):
        line.append(draw(st.sampled_from(TARGETS)))
    for _ in range(draw(st.integers(0, 6))):
        line += draw(words_for(command))
    return line


@st.composite
def words_for(draw: st.DrawFn, command: str) -> list[str]:
    """An option of a command with its value, now and then one of another command, or a strange word."""
    if not draw(st.integers(0, 15)):
        return [draw(STRANGE)]
    if command not in COMMANDS or not draw(st.integers(0, 9)):
        command = draw(st.sampled_from(list(COMMANDS)))
    names, values = draw(st.sampled_from(options_of(command)))
    name = draw(st.sampled_from(names))
    if values is None:
        return [name]
    is_strange = name != "--steps" and not draw(st.integers(0, 4))  # a billion steps take their time
    return [name, draw(STRANGE if is_strange else st.sampled_from(values))]


def test_command_lines(try_all, invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "free_memory", lambda: 1 << 30)  # sizes that take longer to fill are refused
    for suffix in (".pt", ".safetensors"):
        (tmp_path / f"whole{suffix}").write_bytes(WHOLE[suffix][0])

    def check(line):
        with in_time():
            code, out, err = invoke(*line)
        require_answer(code, out, err, in_color="always" in line)
        if "--json" in line and code == 0 and not {"--help", "-h", "--version"} & set(line):
            json.loads(out, parse_constant=lambda name: pytest_fail(name))

    try_all(check, lines(), 24)


def pytest_fail(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
