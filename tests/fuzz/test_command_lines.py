"""Command lines that people type, mistype, and would never type: an answer, or a line that says what is wrong."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from mha_inspect.cli.app import COMMANDS
from mha_inspect.layers.catalog import LAYERS

from .contract import in_time, require_answer

SMALL = st.sampled_from(["1", "2", "3", "4", "6", "8", "12"])
STRANGE = st.one_of(
    st.sampled_from(["0", "-1", "1e3", "nan", "inf", "", " ", "1,2", "1,,2", ",", "0x10", "٣", "1_0", "true", "None"]),
    st.sampled_from(["2147483648", "4294967296", "9223372036854775808", "1099511627776", "9" * 400, "a" * 5000]),
    st.sampled_from(["\x1b[31m", "\u202e", "é" * 300, "e" + "\u0301" * 3000, "a\nb", "--", "-", "=", "torch"]),
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=8),
)
SIZES = ["--embed-dim", "--num-heads", "--num-kv-heads", "--head-dim", "--kdim", "--vdim", "--batch", "--seq-len"]
SIZES += ["--key-len", "--padding", "--dropout", "--seed", "--precision", "--edge-items", "--heads"]
SWITCHES = [
    "--rope",
    "--no-bias",
    "--add-bias-kv",
    "--add-zero-attn",
    "--seq-first",
    "--train",
    "--unbatched",
    "--causal",
]
SWITCHES += [
    "--grad",
    "--no-need-weights",
    "--per-head-weights",
    "--ops",
    "--stats",
    "--values",
    "--per-head",
    "--focus",
]
SWITCHES += ["--causal", "--focus", "--pairwise", "--gradients", "--help", "--version", "-h", "-V", "-q", "--json"]
WORDS = {
    "--layer": [*LAYERS, "tensor", ""],
    "--dtype": ["float64", "bfloat16", "float16", "int8"],
    "--device": ["cpu", "meta", "cuda", "mps", "cuda:9", "xla"],
    "--format": ["plain", "table", "json", "svg"],
    "--color": ["auto", "never", "sometimes"],
    "--fail-if": ["differs", "same", "x"],
    "--set": ["x=1", "=", "depth", "a.b=2"],
    "--input-shape": ["x=2x3", "x=", "2x3:float32", "x=1x99999999999999999999"],
    "--module": ["", "layers.0"],
    "--attention": ["0", "9"],
}
FILES = ["/dev/null", "/dev/zero", "/", ".", "nothing.pt", "x" * 300 + ".pt", "/" + "y/" * 3000 + "a.npy", "a.txt"]
FILES += ["", "/proc/self/mem", "\x1b[0m.pt", "/etc/shadow/x.json"]
TARGETS = [
    "torch.nn:MultiheadAttention",
    "torch.nn:Linear",
    "torch:zzz",
    "no.such:Thing",
    "x.py",
    "x.py:A",
    ":",
    "a:b:c",
]
TARGETS += [
    "/dev/zero.py:X",
    "x" * 4000 + ":Y",
    "os:_exit",
    "torch.nn:Module",
    "hf:",
    "hf:/",
    "a" * 300 + ".py:X",
    "sys:exit",
]


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """The arguments of one command line."""
    command = draw(st.sampled_from([*COMMANDS, *COMMANDS, "trce", ""]))
    line = [command]
    if command != "layers" and draw(st.integers(0, 9)):
        line += ["--embed-dim", "12", "--seq-len", "3", *(["--heads", "1,2"] if command == "compare-heads" else [])]
    if draw(st.integers(0, 5)) == 0:
        line.append(draw(st.sampled_from(TARGETS)))
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["size", "size", "size", "switch", "switch", "word", "file", "strange"]))
        if kind == "size" and command == "compare-heads" and draw(st.integers(0, 5)) == 0:
            line += ["--steps", draw(SMALL)]  # a billion of them is no mistake, but takes its time
        elif kind == "size":
            line += [draw(st.sampled_from(SIZES)), draw(st.one_of(SMALL, SMALL, SMALL, STRANGE))]
        elif kind == "switch":
            line.append(draw(st.sampled_from(SWITCHES)))
        elif kind == "word":
            flag = draw(st.sampled_from(sorted(WORDS)))
            line += [flag, draw(st.sampled_from(WORDS[flag]) | STRANGE)]
        elif kind == "file":
            line += [draw(st.sampled_from(["--input", "--attn-mask", "--export"])), draw(st.sampled_from(FILES))]
        else:
            line.append(draw(STRANGE))
    return line


def test_command_lines(try_all, invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def check(line):
        with in_time():
            code, out, err = invoke(*line)
        require_answer(code, out, err)
        if "json" in line and code == 0 and not {"--help", "-h", "--version"} & set(line) and out.startswith("{"):
            json.loads(out, parse_constant=lambda name: pytest_fail(name))

    try_all(check, lines(), 100)


def pytest_fail(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
