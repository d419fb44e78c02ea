"""Every kind of bad input once through the installed program, each in a process of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

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
    "an export of no known ending": Case("trace --export a.pdf", (".txt, .json, .html, .png, .svg",)),
    "more than fits": Case("trace --seq-len 100000000", ("free on cpu",), code=3),
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad_input")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name, tensor in TENSORS.items():
        np.save(folder / name, tensor) if name.endswith("npy") else torch.save(tensor, folder / name)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_each_is_answered_in_a_line_or_two(program, folder, name):
    case = CASES[name]
    code, out, err = program(*case.line.split(), cwd=folder, before=case.before)
    assert (code, out) == (case.code, ""), err
    assert err.startswith("mha-inspect: ")
    assert err.count("\n") <= (5 if "def attention():" in err else 2)  # three lines to paste are an answer of their own
    assert "Traceback" not in err
    assert [part for part in case.said if part not in err] == [], err


def test_a_file_that_was_there_is_kept_when_there_is_no_room(program, tmp_path):
    (tmp_path / "report.json").write_text("before")
    line = "trace --embed-dim 6 --num-heads 2 --seq-len 3 --stats --export report.json"
    code, _, err = program(*line.split(), cwd=tmp_path, before=LITTLE_ROOM)
    assert code == 2
    assert "report.json could not be written: File too large. The file that was there is as it was." in err
    assert (tmp_path / "report.json").read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
