"""A module of one's own on the command line: what comes out, and what is said where it cannot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema
import pytest
import torch

from ..schemas import load_schema

STYLES = str(Path(__file__).parents[1] / "call" / "styles.py")
MASKED = STYLES.replace("styles.py", "masked.py")
SMALL = ("--embed-dim", "14", "--num-heads", "2", "--batch", "3", "--seq-len", "5")


def data_of(answer: tuple[int, str, str]) -> dict:
    code, out, err = answer
    assert code == 0, err
    return json.loads(out, parse_constant=pytest.fail)


def test_json_of_a_model_has_every_attention(invoke):
    line = ("trace", f"{STYLES}:GPT", *SMALL, "--set", "n_layer=3", "--json", "--seed", "7")
    answer = invoke(*line)
    data = data_of(answer)
    jsonschema.Draft202012Validator(load_schema("trace")).validate(data)
    assert [attention["module"] for attention in data["attentions"]] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {tuple(attention["kind"]) for attention in data["attentions"]} == {("self", "causal")}
    assert {(attention["num_heads"], attention["head_dim"]) for attention in data["attentions"]} == {(2, 7)}
    assert data["layer"]["name"] == "GPT"
    assert data["layer"]["spec"]["config.n_embd"] == 14
    assert data["environment"]["seed"] == 7
    assert "stages" in data["attentions"][2]
    assert "chosen" not in data
    assert "styles is being imported" not in answer.out
    assert invoke(*line).out == answer.out


def test_numbers_are_those_of_a_run_by_hand(invoke):
    line = ("trace", f"{STYLES}:Tutorial", *SMALL, "--set", "dropout=0.5", "--values", "--json")
    data = data_of(invoke(*line))
    stages = {stage["name"]: torch.tensor(stage["values"]["data"]) for stage in data["attentions"][0]["stages"]}
    torch.manual_seed(0)
    linears = [torch.nn.Linear(14, 14) for _ in range(4)]
    heads = [linear(stages["query"]).view(3, 5, 2, 7).transpose(1, 2) for linear in linears[:2]]
    expected = (heads[0] @ heads[1].mT / 7**0.5).softmax(-1)
    torch.testing.assert_close(stages["weights"], expected.detach())


def test_a_page_shows_each_form_once_and_any_on_request(invoke):
    line = ("trace", f"{STYLES}:GPT", *SMALL, "--set", "n_layer=4")
    page = invoke(*line).out
    assert re.findall(r"^attention (\d+) in (\S+):", page, re.MULTILINE) == [("1", "blocks.0")]
    assert "Attentions 2–4 have the same shapes" in page
    assert page.index("4 attentions") < page.index("attention 1 in")
    chosen = invoke(*line, "--attention", "3").out
    assert re.findall(r"^attention (\d+) in (\S+):", chosen, re.MULTILINE) == [("3", "blocks.2")]
    inside = invoke(*line, "--attention", "blocks.3").out
    assert re.findall(r"^attention (\d+) in (\S+):", inside, re.MULTILINE) == [("4", "blocks.3")]
    every = invoke(*line, "--stats").out
    assert len(re.findall(r"^attention (\d+) in", every, re.MULTILINE)) == 4
    data = data_of(invoke(*line, "--attention", "3", "--json"))
    assert (data["chosen"], len(data["attentions"])) == ([3], 4)
    jsonschema.Draft202012Validator(load_schema("trace")).validate(data)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--attention", "9"), ["attention 9", "1 to 2"]),
        (("--attention", "blocks.7"), ["module blocks.7", "blocks.0", "Did you mean"]),
    ],
)
def test_an_attention_that_is_not_there(invoke, flags, said):
    code, out, err = invoke("trace", f"{STYLES}:GPT", *SMALL, *flags)
    assert (code, out) == (2, "")
    assert [part for part in said if part not in err] == []


def test_params_sets_head_counts_of_a_target_side_by_side(invoke):
    line = ("params", "torch.nn:MultiheadAttention", "--embed-dim", "14", "--num-heads", "1,2,7", "--json")
    data = data_of(invoke(*line))
    jsonschema.Draft202012Validator(load_schema("params")).validate(data)
    columns = data["side_by_side"]
    assert [(column["num_heads"], column["head_dim"], column["numel"]) for column in columns] == [
        (heads, 14 // heads, 4 * 14 * 14 + 4 * 14) for heads in (1, 2, 7)
    ]
    for column in columns:
        rows = [piece["rows"] for piece in column["first_head"]["in_proj_weight"]]
        assert rows == [[start, start + column["head_dim"]] for start in (0, 14, 28)]
    assert data["changes"].startswith("With 1, 2 and 7 heads, all 4 parameters have the same shapes and values")
    assert data["layer"]["spec"] == {"embed_dim": 14, "num_heads": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch.nn:Linear --embed-dim 14 --num-heads 1,2", "Linear takes no number of heads"),
        ("torch.nn:MultiheadAttention --num-heads 1,2 --set num_heads=2", "--set num_heads fixes the number of heads"),
        ("torch.nn:MultiheadAttention --num-heads 1,0", "heads 0 is not a number of heads"),
        ("torch.nn:MultiheadAttention --num-heads 1,5 --embed-dim 14", "embed_dim must be divisible by num_heads"),
    ],
)
def test_params_refuses_head_counts_that_a_target_cannot_have(invoke, line, said):
    code, out, err = invoke("params", *line.split())
    assert (code, out) == (2, "")
    assert said in err


def test_params_says_with_which_head_count_a_forward_raises(invoke):
    code, out, err = invoke("params", f"{STYLES}:Tutorial", "--embed-dim", "14", "--num-heads", "1,2,5")
    assert code == 1
    assert "layer Tutorial: d_model 14, h 5\n" in out
    assert "Tutorial with d_model 14, h 5 failed on " in err
    assert "--train" not in err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("Needy", "Needy.forward needs angles, which cannot be guessed. Give --input-shape angles="),
        ("Failing", "Failing failed on x float32 [3, 5, 14]"),
    ],
)
def test_params_without_a_run_has_the_table_and_says_why(invoke, target, said):
    line = ("params", f"{STYLES}:{target}", "--embed-dim", "14", "--batch", "3", "--seq-len", "5")
    code, out, err = invoke(*line)
    assert code == 0, err
    assert "linear.weight" in out
    assert said in out
    assert "--input-shape" in out
    assert "recorder.py" not in out
    code, out, err = invoke(*line, "--input-shape", "y=2x3")
    assert (code, out) == (2, "")


def test_params_of_lazy_and_of_meta(invoke):
    lazy = data_of(invoke("params", f"{STYLES}:Lazy", *SMALL, "--json"))
    assert lazy["total"]["numel"] == 3 * (14 * 14 + 14)
    jsonschema.Draft202012Validator(load_schema("params")).validate(lazy)
    line = "params torch.nn:Linear --set in_features=100000 --set out_features=100000 --device meta --json"
    meta = data_of(invoke(*line.split()))
    assert meta["total"]["numel"] == 100000 * 100000 + 100000


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("STYLES:Nope", "has no Nope"),
        ("STYLES:make_nothing", "not a torch.nn.Module"),
        ("STYLES:attention", "takes tensors"),
    ],
)
def test_targets_that_are_none(invoke, target, said):
    code, out, err = invoke("trace", target.replace("STYLES", STYLES), *SMALL)
    assert (code, out) == (2, "")
    assert said.replace("STYLES", STYLES) in err
    assert 1 <= err.removeprefix("styles is being imported\n").count("\n") <= 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("STYLES:Refusing --embed-dim 5 --num-heads 2", "AssertionError: assert dim % heads == 0"),
        ("STYLES:Tutorial --set d_model", "NAME=VALUE"),
        ("STYLES:Tutorial --num-kv-heads 3", "no argument for --num-kv-heads"),
    ],
)
def test_constructors_that_cannot_be_called_so(invoke, line, said):
    for command in ("trace", "params"):
        code, out, err = invoke(command, *line.replace("STYLES", STYLES).split())
        assert (code, out) == (2, ""), err
        assert said in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("STYLES:Needy", ["needs angles", "--input-shape angles=", "--input FILE"]),
        ("STYLES:Stepping", ["needs start_pos", "--set start_pos=VALUE"]),
        ("STYLES:Matrices --input-shape y=3x3", ["names y", "data"]),
        ("STYLES:Matrices --input-shape data=3z3", ["NAME=SIZExSIZE:DTYPE"]),
        ("STYLES:Matrices --padding 2", ["takes no mask: its arguments are data. Drop --padding"]),
        (f"{MASKED}:Deaf --padding 2", ["cannot be applied to Deaf.forward", "(module, args)"]),
        ("torch.nn:ModuleList", ["ModuleList has no forward"]),
    ],
)
def test_forwards_that_cannot_be_called_so(invoke, line, said):
    code, out, err = invoke("trace", *line.replace("STYLES", STYLES).split())
    assert (code, out) == (2, ""), err
    assert [part for part in said if part not in err] == []


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("trace FILE:Leaves", "leaves.py:5"),
        ("params FILE:Later", "leaves.py:10"),
        ("diff FILE:Later torch", "leaves.py:10"),
    ],
)
def test_a_target_that_ends_the_program(invoke, tmp_path, monkeypatch, line, where):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaves.py").write_text(
        "import sys\nfrom torch import nn\nclass Leaves(nn.Module):\n    def __init__(self):\n        sys.exit(0)\n"
        "class Later(nn.Linear):\n    def __init__(self):\n        super().__init__(7, 7)\n"
        "    def forward(self, x):\n        sys.exit()\n"
    )
    code, out, err = invoke(*line.replace("FILE", "leaves.py").split())
    assert (code, out) == (2, ""), err
    assert "it ends the program" in err
    assert where in err
    assert "None" not in err


def test_what_returns_no_tensor_is_not_compared(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "silent.py").write_text(
        "import torch\nfrom dataclasses import dataclass\n"
        "class Silent(torch.nn.Module):\n    def __init__(self, dim=22, num_heads=2):\n        super().__init__()\n"
        "        self.own = torch.nn.MultiheadAttention(dim, num_heads, batch_first=True)\n"
        "    def forward(self, x):\n        self.own(x, x, x)\n"
        "@dataclass\nclass Out:\n    mask: object\n    hidden: torch.Tensor\n"
        "class Wrapped(Silent):\n    def forward(self, x):\n        return Out(None, self.own(x, x, x)[0])\n"
    )
    for line in ("compare-heads silent.py:Silent --heads 1,2", "diff silent.py:Silent torch"):
        code, out, err = invoke(*line.split())
        assert (code, out) == (2, ""), err
        assert "returned None, which contains no tensor" in err
    data = data_of(invoke(*["diff", "silent.py:Wrapped", "torch", "--batch", "3", "--seq-len", "5", "--json"]))
    assert data["outcome"] == "same"
    assert data["left"]["output_shape"] == [3, 5, 22]


def test_through_the_installed_program(program, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\nfrom torch import nn\nprint('hello')\nos.system('echo from a child')\n"
        "Layer = nn.MultiheadAttention\n"
    )
    code, out, err = program("trace", "mine:Layer", *SMALL, "--json", cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["layer"]["spec"] == {"embed_dim": 14, "num_heads": 2}
    assert "hello" in err
    assert "from a child" in err


def test_names_of_a_cache_without_decode_are_refused(invoke):
    code, _, err = invoke("trace", "hf:gpt2", "--cache", "past_key_values")
    assert (code, err) == (2, "mha-inspect: --cache past_key_values only affects --decode. Add --decode 1.\n")
    assert "--positions pos only affects --decode" in invoke("trace", "--positions", "pos").err


def test_a_step_that_differs_or_raises_ends_with_1(invoke, tmp_path):
    (tmp_path / "cached.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Cached(nn.Module):\n"
        "    def __init__(self, dim=8, limit=9):\n"
        "        super().__init__()\n"
        "        self.q, self.k, self.limit = nn.Linear(dim, dim), nn.Linear(dim, dim), limit\n"
        "    def forward(self, x, past=None):\n"
        "        q, k = self.q(x + torch.arange(x.shape[1])[:, None]), self.k(x)\n"
        "        k = k if past is None else torch.cat([past, k], 1)\n"
        "        if past is not None and k.shape[1] > self.limit:\n"
        "            raise RuntimeError('full')\n"
        "        mask = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]) == 0\n"
        "        return (q @ k.mT).masked_fill(mask, -torch.inf).softmax(-1) @ k, k\n",
    )
    target = f"{tmp_path}/cached.py:Cached"
    line = ("trace", target, "--embed-dim", "8", "--seq-len", "5", "--decode", "2")
    code, out, _ = invoke(*line)
    assert (code, "The last position of a call DIFFERS from" in out) == (1, True)
    code, out, _ = invoke(*line, "--set", "limit=4")
    assert (code, "note  Step 2 of 2 raised: 1 token after 4." in out, "RuntimeError" in out) == (1, True, True)
