"""`--ranks` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from ..schemas import load_schema
from .code import ATTENTION

pytest.importorskip("torch.distributed._local_tensor")

SMALL = ("--embed-dim", "24", "--num-heads", "4", "--seq-len", "5")
FORGETS = """

def forgets_the_sum(module, mesh):
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {name: ColwiseParallel() for name in "qkv"}
    styles["o"] = RowwiseParallel(output_layouts=Partial())
    parallelize_module(module, mesh, styles, src_data_rank=None)
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(ATTENTION + FORGETS)
    return str(path)


def test_the_plan_the_ranks_and_the_proof_are_in_json(invoke, mine):
    answer = invoke("trace", f"{mine}:Attention", *SMALL, "--ranks", "2", "--json")
    assert answer.code == 0
    data = json.loads(answer.out)
    jsonschema.Draft202012Validator(load_schema("trace")).validate(data)
    assert data["plan"] == {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    assert [rank["rows"]["W_q"] for rank in data["ranks"]] == [[0, 12], [12, 24]]
    assert data["proof"]["of"] == "ranks"
    out = invoke("params", f"{mine}:Attention", *SMALL, "--ranks", "2").out
    assert "rows 0–11 of 24: heads 0–1" in out


def test_a_missing_sum_is_found_with_exit_code_1(invoke, mine):
    answer = invoke("trace", f"{mine}:Attention", *SMALL, "--ranks", f"2:{mine}:forgets_the_sum")
    assert answer.code == 1
    assert "The first difference is output on rank 0" in answer.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--ranks 3", "4 heads do not divide among 3 ranks. Use --ranks 2 and 4."),
        ("--ranks 2 --decode 1", "--ranks and --decode cannot be combined. Drop one."),
        ("--ranks 2:none.json", "plan none.json cannot be read: No such file or directory."),
    ],
)
def test_what_does_not_fit_is_refused(invoke, mine, line, reason):
    code, out, err = invoke("trace", f"{mine}:Attention", *SMALL, *line.split())
    assert (code, out) == (2, "")
    assert reason in err
