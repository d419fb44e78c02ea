"""`--ranks` and `--plan` on the command line."""

from __future__ import annotations

import json

import jsonschema
import pytest

from ..schemas import load_schema
from .code import ATTENTION

pytest.importorskip("torch.distributed._local_tensor")

SMALL = ("--embed-dim", "24", "--num-heads", "4", "--seq-len", "5")
CODE = (
    ATTENTION
    + """

def forgets_the_sum(module, mesh):
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {name: ColwiseParallel() for name in "qkv"}
    styles["o"] = RowwiseParallel(output_layouts=Partial())
    parallelize_module(module, mesh, styles, src_data_rank=None)
"""
)


def test_the_plan_the_ranks_and_the_proof_are_in_the_page_and_in_json(invoke, mine):
    line = ("trace", f"{mine}:Attention", *SMALL, "--ranks", "2")
    page = invoke(*line)
    assert page.code == 0
    assert "scores   [1, 2, 5, 5] of [1, 4, 5, 5]" in page.out
    assert '    "q": ColwiseParallel(),\n' in page.out
    assert page.out.splitlines()[-1].startswith("The outputs of all ranks agree with the whole module: difference")
    data = json.loads(invoke(*line, "--json").out)
    jsonschema.Draft202012Validator(load_schema("trace")).validate(data)
    assert data["plan"] == {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    assert [rank["rows"]["W_q"] for rank in data["ranks"]] == [[0, 12], [12, 24]]
    assert data["proof"]["of"] == "ranks"


def test_a_missing_sum_is_found_with_exit_code_1(invoke, mine):
    answer = invoke("trace", f"{mine}:Attention", *SMALL, "--ranks", "2", "--plan", f"{mine}:forgets_the_sum")
    assert answer.code == 1
    assert "The first difference is output on rank 0" in answer.out.splitlines()[-1]


def test_parameters_of_rank_0(invoke, mine):
    out = invoke("params", f"{mine}:Attention", *SMALL, "--ranks", "2").out
    assert "q.weight  [12, 24] of [24, 24]" in out
    assert "rows 0–11 of 24: heads 0–1" in out
    assert "0–11, 12–23" in out.partition("2 ranks\n")[2]
    layer = invoke("params", "--layer", "grouped-query", *SMALL, "--ranks", "2")
    assert layer.code == 0
    assert "a bug" not in layer.out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--ranks", "1"), "ranks 1 is too small: it must be 2 or more. Try --ranks 2."),
        (("--ranks", "3"), "4 heads do not divide among 3 ranks. Use --ranks 2 and 4."),
        (("--ranks", "2", "--decode", "1"), "--ranks and --decode cannot be combined. Drop one."),
        (("--plan", "plan.json"), "--plan plan.json needs the number of ranks. Add --ranks 2."),
        (("--ranks", "2", "--plan", "none.json"), "plan none.json cannot be read: No such file or directory."),
    ],
)
def test_what_does_not_fit_is_refused(invoke, mine, words, reason):
    code, out, err = invoke("trace", f"{mine}:Attention", *SMALL, *words)
    assert (code, out) == (2, "")
    assert reason in err
