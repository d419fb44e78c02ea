"""Every kind of bad input once through the installed program, each in a process of its own.

To import torch takes longer than all that these lines do: one interpreter imports it, and forks for each line into the
script that is installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="a process that has imported torch may be forked on Linux"
)

FORK_FOR_EACH = """
import json, os, runpy, sys
import torch, mha_inspect.answers.trace, mha_inspect.cli.app, mha_inspect.cli.diff, mha_inspect.cli.trace
script, lines = json.load(sys.stdin)
codes = []
for number, (line, before) in enumerate(lines):
    pid = os.fork()
    if pid == 0:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY, 0o600), descriptor)
        exec(before)
        sys.argv = [*script, *line][-len(line) - 1 :]
        code = "the script has not left"
        try:
            if len(script) == 1:
                runpy.run_path(script[0], run_name="__main__")
            else:
                runpy.run_module("mha_inspect", run_name="__main__", alter_sys=True)
        except SystemExit as leaving:
            code = leaving.code
        sys.stdout.flush()
        # To take torch down takes longer than the line.
        os._exit(code if isinstance(code, int) else 99)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""

FILES = {
    "broken.py": "import absent_library\n",
    "typo.py": "class A(nn.Module\n",
    "mine.py": """
from torch import nn

number = 3

class Plain:
    pass

class Needy(nn.Module):
    def forward(self, x, *, freqs_cis):
        return x * freqs_cis.view_as(x)
""",
    "config/config.json": "[1]",
}
TENSORS = {
    "wide_mask.pt": torch.zeros(5, 7, dtype=torch.bool),
    "numbers.pt": torch.ones(5, 5, dtype=torch.int64),
    "flat_mask.npy": np.zeros(5, dtype=bool),
    "list.pt": [1, 2],
    "wide.pt": torch.zeros(3, 5, 13),
}
SIZES = "--embed-dim 22 --num-heads 2 --batch 3 --seq-len 5"
NO_BFLOAT16 = """
def cannot(*_, **__):
    raise RuntimeError("\\"softmax_lastdim_kernel_impl\\" not implemented for 'BFloat16'")
torch.Tensor.softmax = cannot
"""
NO_CUDA = "torch.cuda.is_available = lambda: False"
NO_TRANSFORMERS = """
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "transformers" else found(name, *rest)
"""
LITTLE_ROOM = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))"


class Case(NamedTuple):
    """A line, what its message says, and what is done in the process before it."""

    line: str
    said: tuple[str, ...]
    before: str = ""
    code: int = 2


CASES = {
    # sizes, devices, masks, inputs, dtypes
    "heads that do not divide": Case("trace --embed-dim 10 --num-heads 3", ("divide 10: 1, 2, 5, 10.",)),
    "heads of a list": Case("compare-heads --embed-dim 10 --heads 1,3", ("num_heads 3", "1, 2, 5, 10.")),
    "a size of zero": Case("trace --embed-dim 0", ("embed_dim 0", "1 or more")),
    "a negative size": Case("params --kdim -7", ("kdim -7", "1 or more")),
    "no heads": Case("trace --num-heads 0", ("num_heads 0", "1 or more")),
    "an unknown device": Case("trace --device cdua", ("'cdua'", "cpu", "meta")),
    "an absent device": Case("trace --device cuda", ("'cuda' is not here", "cpu", "meta"), NO_CUDA),
    "a mask of another shape": Case(
        f"trace {SIZES} --attn-mask wide_mask.pt", ("[5, 7]", "`query key` [5, 5]", "[6, 5, 5]")
    ),
    "a mask of one dimension": Case(f"trace {SIZES} --attn-mask flat_mask.npy", ("[5]", "`query key` [5, 5]")),
    "a mask of numbers": Case(f"trace {SIZES} --attn-mask numbers.pt", ("int64", "booleans are meant")),
    "no mask there": Case(f"trace {SIZES} --attn-mask absent.pt", ("absent.pt is not there",)),
    "no input there": Case(f"trace {SIZES} --input absent.npy", ("absent.npy is not there",)),
    "an input that is no tensor": Case(f"trace {SIZES} --input list.pt", ("list.pt is a list and not a tensor",)),
    "an input of another width": Case(f"trace {SIZES} --input wide.pt", ("[3, 5, 13]", "--embed-dim 13")),
    "a dtype that cannot be run": Case("trace --dtype bfloat16", ("cpu", "bfloat16", "float32"), NO_BFLOAT16),
    "an export into no folder": Case("trace --export absent/a.txt", ("the folder ", "absent is not there")),
    "an export of no known ending": Case("trace --export a.pdf", (".txt, .json, .svg, .html",)),
    "more than fits": Case("trace --seq-len 100000000", ("free on cpu", "largest seq_len that fits"), code=3),
    # layers and diff
    "an unknown layer": Case("trace --layer narow", ("--layer narow", "Did you mean narrow?")),
    "an unknown layer in diff": Case("diff torch narow", ("'narow'", "Did you mean narrow?")),
    "a flag without use": Case("trace --layer bert --kdim 3", ("layer bert", "kdim 3", "Layers that have: torch")),
    "shared heads that do not divide": Case(
        "trace --layer grouped-query --num-kv-heads 3", ("num_kv_heads 3", "num_heads 8", "1, 2, 4, 8")
    ),
    "sizes that cannot agree": Case(
        "diff torch wide --embed-dim 22 --num-heads 2", ("11 on the left", "22 on the right")
    ),
    # targets
    "a target that cannot be imported": Case("trace broken.py:A", ("No module named 'absent_library'", "broken.py:1")),
    "a target with a typo": Case("trace typo.py:A", ("SyntaxError", "typo.py:1")),
    "a target that is not there": Case("trace nowhere.py:A", ("nowhere.py is not there",)),
    "a target that is no module": Case("trace mine.py:Plain", ("not a torch.nn.Module",)),
    "a target that is a number": Case("params mine.py:number", ("int", "not a torch.nn.Module")),
    "an argument that was not given": Case("trace mine.py:Needy", ("needs freqs_cis", "--input-shape freqs_cis=")),
    "no transformers": Case("trace hf:bert", ('pip install "mha-inspect[hf]"',), NO_TRANSFORMERS),
}
if importlib.util.find_spec("transformers"):
    CASES |= {
        "a config that is none": Case("trace hf:config", ("not a configuration",)),
        "a network that would be needed": Case("trace hf:meta-llama/Llama-2-7b-hf", ("nothing is downloaded",), code=3),
    }


def run_all(
    cases: dict[str, Case], entry_point: list[str], folder: Path, env: dict[str, str]
) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each line."""
    lines = [(case.line.split(), case.before) for case in cases.values()]
    done = subprocess.run(
        [sys.executable, "-c", FORK_FOR_EACH],
        input=json.dumps([entry_point if len(entry_point) == 1 else [sys.executable, "mha_inspect"], lines]),
        capture_output=True,
        text=True,
        cwd=folder,
        env=env,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts = [
        [(folder / f"{n}.{name}").read_text(encoding="utf-8") for name in ("out", "err")] for n in range(len(lines))
    ]
    return {name: (code, *text) for name, code, text in zip(cases, json.loads(done.stdout), texts, strict=True)}


@pytest.fixture(scope="module")
def answers(
    entry_point: list[str], environment: Callable[..., dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, str]]:
    folder = tmp_path_factory.mktemp("bad_input")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name, tensor in TENSORS.items():
        np.save(folder / name, tensor) if name.endswith("npy") else torch.save(tensor, folder / name)
    return run_all(CASES, entry_point, folder, environment(PYTHONUTF8="1"))


@pytest.mark.parametrize("name", CASES)
def test_each_is_answered_in_a_line_or_two(answers, name):
    code, out, err = answers[name]
    assert (code, out) == (CASES[name].code, ""), err
    assert err.startswith("mha-inspect: ")
    assert err.count("\n") <= 2
    assert "Traceback" not in err
    assert [part for part in CASES[name].said if part not in err] == [], err


def test_a_file_that_was_there_is_kept_when_there_is_no_room(entry_point, environment, tmp_path):
    (tmp_path / "report.json").write_text("before")
    line = "trace --embed-dim 6 --num-heads 2 --seq-len 3 --stats --export report.json"
    ((code, _, err),) = run_all(
        {"full": Case(line, (), LITTLE_ROOM)},
        entry_point,
        tmp_path,
        environment(PYTHONUTF8="1"),
    ).values()
    assert code == 2
    assert "report.json could not be written: File too large. The file that was there is as it was." in err
    assert (tmp_path / "report.json").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "0.out", "0.err"}
