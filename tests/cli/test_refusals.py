"""What cannot be answered: exit code 2 or 3, what was asked with its numbers, the rule, and a way out; no traceback."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mha_inspect.cli.app import COMMANDS
from mha_inspect.cli.options import SET_BY_TEXT

FILES = {
    "model.py": "",
    "mine.py": """
from torch import nn

number = 3

class Plain:
    pass

class Needy(nn.Module):
    def forward(self, x, *, angles):
        return x * angles.view_as(x)
""",
    "config/config.json": "[1]",
    "array.npy": "an array",
    "empty.pt": "",
}
TENSORS = {
    "rows.pt": torch.zeros(5, 7, dtype=torch.bool),
    "heads.pt": torch.zeros(2, 5, 5, dtype=torch.bool),
    "whole.pt": torch.zeros(3, 5, 14, dtype=torch.int32),
    "names.pt": {"q": torch.zeros(3, 5, 14), "k": torch.zeros(3, 5, 14)},
}
# Distinct primes wherever sizes are independent; embed_dim is num_heads times a prime.
SIZES = "--embed-dim 14 --batch 3 --seq-len 5"
LAYER = f"trace {SIZES} --num-heads 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad_input")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name, tensor in TENSORS.items():
        torch.save(tensor, folder / name)
    return folder


LINES: list[tuple[str, ...]] = [
    ("trcae", "trcae was not found", "Did you mean trace?"),
    ("-help", "trace has no option -help. Did you mean --help?"),
    ("--embed-dim 3 trace", "--embed-dim comes before the command", "mha-inspect trace --embed-dim"),
    ("trace --embed-dmi 3", "no option --embed-dmi", "Did you mean --embed-dim?"),
    ("trace --heads 4", "belongs to `mha-inspect compare-heads`. Did you mean --num-heads?"),
    ("trace --embed-dim", "--embed-dim needs a value"),
    ("trace --causal=true", "--causal takes no value: write --causal alone."),
    ("trace a.py:B c", "trace does not take c", "--embed-dim 512"),
    ("trace gpt.py GPT", "trace does not take GPT as a second word. Write gpt.py:GPT"),
    ("compare-heads --heads 1 2 4", "a list with commas, e.g. --heads 1,2,4."),
    ("trace --dtype fp16", "Did you mean float16?"),
    ("trace --embed-dim abc", "--embed-dim abc is not a whole number", "512"),
    ("trace --set dropout=abc", "dropout=abc is invalid: abc is not a number"),
    ("trace --embed-dim 1" + "0" * 30, "is too large: sizes go up to 2**40"),
    ("trace --num-heads 1" + "0" * 5000, "num_heads 1000"),
    ("trace --padding x", "padding x"),
    ("trace --seed -1", "seed -1", "2**64 - 1"),
    ("trace --attention 2 --embed-dim 8", "attention 2", "there is only 1"),
    (
        "check mine.py:Plain --reference torch",
        "a trusted version of mine.py:Plain",
        "`mha-inspect diff mine.py:Plain torch`",
    ),
    (
        "check --reference fused",
        "--reference fused is no target",
        "old_model.py:Attention",
        "`mha-inspect diff torch per-head`",
    ),
    ("check --padding-side left", "needs a padding mask. Add --mask NAME=keep."),
    ("trace --embed-dim 10 --num-heads 3", "divide 10: 1, 2, 5, 10."),
    ("trace --layer grouped-query --num-kv-heads 3", "num_kv_heads 3", "num_heads 8", "1, 2, 4, 8"),
    (f"{LAYER} --padding 6", "padding 6", "0 to 5"),
    (f"{LAYER} --set unbatched=true", "batch 3 contradicts unbatched"),
    ("params --input names.pt", "the parameters of a layer do not depend on them. Drop it."),
    ("params --causal", "params has no option --causal: it belongs to `mha-inspect trace`"),
    *(
        (f"{c} {flag} {size}", f"{flag[2:].replace('-', '_')} {size}", "must be 1 or more")
        for c in ("trace", "diff")
        for flag in ("--embed-dim", "--key-len")
        for size in ("0", "-7")
    ),
    ("trace --set embed_dim=3", "has an option of its own: --embed-dim"),
    ("trace --set depth=3", "is not an argument of a layer", "`mha-inspect layers torch` lists them"),
    ("trace --set bias=perhaps", "bias must be true or false"),
    *(
        (f"{c} --embed-dim 16 --device={device}", "cpu", "meta")
        for c in ("trace", "check")
        for device in ("cdua", "cuda:97", "", "cuda:x")
    ),
    (f"{LAYER} --attn-mask rows.pt", "[5, 7]", "`query key` [5, 5]", "[6, 5, 5]"),
    (f"{LAYER} --attn-mask heads.pt", "[2, 5, 5]", "`(batch heads) query key` [6, 5, 5]"),
    (f"{LAYER} --attn-mask empty.pt", "empty.pt", "empty"),
    (f"{LAYER} --attn-mask absent.pt", "absent.pt was not found"),
    (f"{LAYER} --attn-mask array.npy", "array.npy is an array of numpy", "torch.save(torch.from_numpy(array), FILE)"),
    (f"{LAYER} --input whole.pt", "int32", "floating-point"),
    (f"{LAYER} --input names.pt", "names q, which is not an argument"),
    ("trace --export absent/a.txt", "the folder ", "absent does not exist"),
    *((f"{c} --set d=1", "--set d is not an argument") for c in ("trace", "params", "compare-heads", "diff")),
    ("trace --input-shape x=2x3", "--input-shape x=2x3 needs a TARGET"),
    ("trace mine.py:Needy --num-heads 1,2", "a target takes one number", "mha-inspect params --num-heads 1,2"),
    ("trace bert --layer torch", "two layers"),
    ("trace 512", "512 is not a target", "package.module:Name", "--embed-dim 512"),
    ("trace torch.nn.functional", "is missing the name of a class. Write torch.nn.functional:Name."),
    ("trace model.py::Attention", "Write model.py:Attention."),
    ("trace nosuchpackage.layers:Attention", "install its package, or give the file"),
    ("trace modle.py:Attention", "modle.py does not exist. Did you mean model.py?"),
    ("trace rows.pt", "no forward to run. Use `mha-inspect params rows.pt`."),
    ("check weights.safetensors", "weights.safetensors was not found."),
    ("params mine.py:number", "int", "not a torch.nn.Module"),
    ("trace mine.py:Needy", "needs angles", "--input-shape angles="),
]
if find_spec("transformers"):
    LINES += [
        ("trace hf:config", "not a configuration"),
        ("trace hf:./nodir", "there is no folder ./nodir."),
    ]


@pytest.mark.parametrize("case", LINES, ids=lambda case: case[0][:60])
def test_each_is_answered_in_a_line_or_two(invoke, folder, monkeypatch, case):
    line, *said = case
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["mha-inspect", *line.split()])
    code, out, err = invoke(*line.split())
    assert (code, out) == (2, ""), err
    assert err.startswith("mha-inspect: ")
    assert err.count("\n") <= 2
    assert len(err) < 600
    assert "Traceback" not in err
    told = " ".join(err.split())
    assert [part for part in said if part not in told] == [], err


@pytest.mark.parametrize("setting", SET_BY_TEXT)
def test_a_setting_without_an_option_is_refused_with_the_way_to_give_it(invoke, setting):
    flag = f"--{setting.replace('_', '-')}"
    code, out, err = invoke("trace", flag)
    assert (code, out) == (2, "")
    assert err == f"mha-inspect: trace has no option {flag}: write --set {setting}=VALUE.\n"


NO_BFLOAT16 = """
import torch
def cannot(*_, **__):
    raise RuntimeError("\\"softmax_lastdim_kernel_impl\\" not implemented for 'BFloat16'")
torch.Tensor.softmax = cannot
"""
NO_CUDA = "import torch; torch.cuda.is_available = lambda: False"
NO_TRANSFORMERS = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else found(name, *rest)
"""


@pytest.mark.parametrize(
    ("line", "code", "said", "before"),
    [
        ("trace --device cuda", 2, "'cuda' is not available", NO_CUDA),
        ("trace --dtype bfloat16", 2, "cpu cannot run dtype bfloat16", NO_BFLOAT16),
        ("trace --seq-len 100000000000", 3, "out of memory: you tried to allocate 204800000000000 bytes", ""),
        ("trace hf:bert", 2, 'pip install "mha-inspect[hf]"', NO_TRANSFORMERS),
        ("trace hf:meta-llama/Llama-2-7b-hf", 3, "mha-inspect never downloads", ""),
    ],
)
def test_so_it_is_through_the_installed_program(program, folder, line, code, said, before):
    if code == 3 and "hf:" in line:
        pytest.importorskip("transformers")
    answer = program(*line.split(), cwd=folder, before=before)
    assert (answer.code, answer.out) == (code, ""), answer.err
    assert answer.err.startswith("mha-inspect: ")
    assert answer.err.count("\n") <= 2
    assert said in answer.err


def test_what_was_typed_cannot_move_the_cursor(invoke):
    for line in (["\x1b[2Jx"], ["trace", "--a\x1b[2J\u202e"], ["trace", "--dtype", "\x07\n"], ["trace", "\x1b]0;x"]):
        code, _, err = invoke(*line)
        assert code == 2
        assert all(character.isprintable() for character in err.removesuffix("\n"))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("EMBED_DIM", "wide", "MHA_INSPECT_EMBED_DIM wide is not a whole number"),
        ("BATCH_FIRST", "maybe", "MHA_INSPECT_BATCH_FIRST 'maybe' is not a valid boolean."),
    ],
)
def test_a_bad_variable_is_named_not_the_flag(invoke, monkeypatch, name, value, said):
    monkeypatch.setenv(f"MHA_INSPECT_{name}", value)
    code, _, err = invoke("trace")
    assert code == 2
    assert said in err


def test_no_command_shows_the_help_and_the_version_is_told(invoke, program):
    import mha_inspect

    assert invoke() == invoke("--help")
    assert invoke().code == 0
    assert program("-V") == program("--version") == (0, f"mha-inspect {mha_inspect.__version__}\n", "")
    assert set(COMMANDS) <= set(invoke().out.split())
