"""A module of one's own on the command line: what comes out, and what is said where it cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from ..schemas import load_schema
from ..warm import Answer

STYLES = str(Path(__file__).parents[1] / "call" / "styles.py")
SIZES = ("--embed-dim", "14", "--num-heads", "2", "--batch", "3", "--seq-len", "5")
Program = Callable[..., Answer]


def words(line: str) -> list[str]:
    """Return the words of a line in which `mine:` is the file of modules."""
    return line.replace("mine:", f"{STYLES}:").split()


def data_of(invoke: Program, line: str, *more: str) -> dict[str, Any]:
    answer = invoke(*words(line), *more, "--json")
    assert answer.code == 0, answer.err
    data: dict[str, Any] = json.loads(answer.out, parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(load_schema(data["command"])).validate(data)
    return data


def assert_refused(answer: Answer, said: str, code: int = 2) -> None:
    assert answer.code == code, answer.err
    assert answer.out == ""
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert 1 <= answer.err.removeprefix("styles is being imported\n").count("\n") <= 3


# -- trace and params --------------------------------------------------------------------------------------------------


def test_json_of_a_model_has_every_attention(invoke: Program) -> None:
    line = "trace mine:GPT --set n_layer=3 --seed 7"
    data = data_of(invoke, line, *SIZES)
    assert [attention["module"] for attention in data["attentions"]] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {(attention["num_heads"], attention["head_dim"]) for attention in data["attentions"]} == {(2, 7)}
    assert data["layer"]["spec"]["config.n_embd"] == 14
    assert data["environment"]["seed"] == 7
    assert "chosen" not in data
    assert data == data_of(invoke, line, *SIZES)
    assert data_of(invoke, line, *SIZES, "--attention", "3")["chosen"] == [3]
    for chosen, said in (("9", "1 to 3"), ("blocks.7", "Did you mean")):
        assert_refused(invoke(*words(line), *SIZES, "--attention", chosen), said)


def test_a_page_shows_each_form_once_and_any_on_request(invoke: Program) -> None:
    line = (*words("trace mine:GPT --set n_layer=4"), *SIZES)

    def shown(*more: str) -> list[str]:
        return re.findall(r"^attention (\d+) in", invoke(*line, *more).out, re.MULTILINE)

    assert shown() == ["1"]
    assert shown("--attention", "3") == ["3"]
    assert shown("--attention", "blocks.3") == ["4"]
    assert shown("--stats") == ["1", "2", "3", "4"]


def test_params_sets_head_counts_of_a_target_side_by_side(invoke: Program) -> None:
    data = data_of(invoke, "params torch.nn:MultiheadAttention --embed-dim 14 --num-heads 1,2,7")
    for column, heads in zip(data["side_by_side"], (1, 2, 7), strict=True):
        assert (column["num_heads"], column["head_dim"], column["numel"]) == (heads, 14 // heads, 4 * 14 * 14 + 4 * 14)
        rows = [piece["rows"] for piece in column["first_head"]["in_proj_weight"]]
        assert rows == [[start, start + 14 // heads] for start in (0, 14, 28)]


@pytest.mark.parametrize("target", ["Needy", "Failing"])
def test_params_without_a_run_has_the_table_and_says_why(invoke: Program, target: str) -> None:
    line = (*words(f"params mine:{target}"), *SIZES)
    code, out, err = invoke(*line)
    assert code == 0, err
    assert "qkv.weight" in out
    assert "Needy.forward needs angles" in out if target == "Needy" else "Failing failed on x float32 [3, 5, 14]" in out
    assert_refused(invoke(*line, "--input-shape", "y=2x3"), "names y")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trace mine:Stepping", "--set start_pos=VALUE"),
        ("trace mine:Matrices --padding 2", "takes no mask: its arguments are data. Drop --padding"),
        ("trace torch.nn:ModuleList", "ModuleList has no forward"),
        ("params mine:Refusing --embed-dim 5 --num-heads 2", "AssertionError: assert dim % heads == 0"),
        ("params torch.nn:Linear --embed-dim 14 --num-heads 1,2", "Linear takes no number of heads"),
        (
            "params torch.nn:MultiheadAttention --num-heads 1,5 --embed-dim 14",
            "embed_dim must be divisible by num_heads",
        ),
    ],
)
def test_what_cannot_be_called_so(invoke: Program, line: str, said: str) -> None:
    assert_refused(invoke(*words(line)), said)


@pytest.mark.parametrize(("line", "where"), [("trace Leaves", "leaves.py:5"), ("diff Later torch", "leaves.py:10")])
def test_a_target_that_ends_the_program(
    invoke: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaves.py").write_text(
        "import sys\nfrom torch import nn\nclass Leaves(nn.Linear):\n    def __init__(self):\n        sys.exit(0)\n"
        "class Later(nn.Linear):\n    def __init__(self):\n        super().__init__(7, 7)\n"
        "    def forward(self, x):\n        sys.exit()\n"
    )
    command, target, *more = line.split()
    answer = invoke(command, f"leaves.py:{target}", *more)
    assert_refused(answer, "it ends the program")
    assert where in answer.err


def test_through_the_installed_program(program: Program, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom torch import nn\nprint('hello')\nos.system('echo from a child')\n"
        "Layer = nn.MultiheadAttention\n"
    )
    code, out, err = program("trace", "mine:Layer", *SIZES, "--json", cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["layer"]["spec"] == {"embed_dim": 14, "num_heads": 2}
    assert "hello" in err
    assert "from a child" in err


def test_a_step_that_differs_or_raises_ends_with_1(invoke: Program, tmp_path: Path) -> None:
    (tmp_path / "cached.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Cached(nn.Linear):\n"
        "    def __init__(self, dim=8, limit=9):\n"
        "        super().__init__(dim, dim)\n"
        "        self.limit = limit\n"
        "    def forward(self, x, past=None):\n"
        "        q, k = super().forward(x + torch.arange(x.shape[1])[:, None]), super().forward(x)\n"
        "        k = k if past is None else torch.cat([past, k], 1)\n"
        "        if past is not None and k.shape[1] > self.limit:\n"
        "            raise RuntimeError('full')\n"
        "        mask = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]) == 0\n"
        "        return (q @ k.mT).masked_fill(mask, -torch.inf).softmax(-1) @ k, k\n",
    )
    line = ("trace", f"{tmp_path}/cached.py:Cached", "--embed-dim", "8", "--seq-len", "5", "--decode", "2")
    code, out, _ = invoke(*line)
    assert (code, "The last position of a call DIFFERS from" in out) == (1, True)
    code, out, _ = invoke(*line, "--set", "limit=4")
    assert (code, "note  Step 2 of 2 raised: 1 token after 4." in out, "RuntimeError" in out) == (1, True, True)


# -- a forward that raises, and one that does not fit ------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "diff", "compare-heads"])
def test_every_command_says_the_cause_that_trace_says(invoke: Program, command: str) -> None:
    target = f"{STYLES}:Failing"
    traced = json.loads(invoke("trace", target, "--seq-len", "5", "--json").out)["failure"]
    more = {"diff": (target,), "compare-heads": ("--heads", "1,2")}.get(command, ())
    code, out, err = invoke(command, target, *more, "--seq-len", "5", "--json")
    failure = json.loads(out)["failure"]
    assert code == 1
    assert failure["cause"] == traced["cause"] is not None
    assert failure["source"] == traced["source"]
    assert "failed on x float32" in err


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands find 100 MiB that are free."""
    monkeypatch.setattr("mha_inspect.files.memory.free_memory", lambda: 100 << 20)


@pytest.mark.usefixtures("free")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        *(
            (line, "smaller --batch or --seq-len")
            for line in (
                "trace mine:Attention --seq-len 9000",
                "diff mine:Attention torch --embed-dim 6 --num-heads 2 --seq-len 9000",
                "compare-heads mine:Attention --heads 1,2 --seq-len 9000",
                "check mine:Attention --seq-len 9000",
            )
        ),
        ("trace --embed-dim 10000000", "--device meta for shapes"),
        ("diff torch bert --embed-dim 10000000", "--device meta for shapes"),
        ("params mine:Attention --embed-dim 10000000", "has parameters of 1.4 PiB"),
    ],
)
def test_more_than_is_free_is_refused_with_3(invoke: Program, line: str, said: str) -> None:
    assert_refused(invoke(*words(line)), said, code=3)


# -- compare-heads -----------------------------------------------------------------------------------------------------


def test_head_counts_are_those_that_divide_the_width_and_each_runs_once(
    invoke: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once to see what it takes, each head count once, and in float64."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counting.py").write_text(
        "from tests.call.styles import Counting as Base\n"
        "class Counting(Base):\n"
        "    def forward(self, x):\n"
        "        batch, length, _ = x.shape\n"
        "        print(self.num_heads, x.dtype, length, file=open('runs', 'a'))\n"
        "        return super().forward(x)\n"
    )
    data = data_of(invoke, "compare-heads counting.py:Counting --embed-dim 12 --batch 2 --seq-len 5")
    assert [row["num_heads"] for row in data["counts"]] == [1, 2, 4]
    runs = sorted(Path("runs").read_text().splitlines())
    of_each = ["1 torch.float32 5", "1 torch.float32 5", "1 torch.float64 5", "2 torch.float32 5", "4 torch.float32 5"]
    assert runs == of_each
    data = data_of(invoke, "compare-heads counting.py:Counting --embed-dim 12 --heads 1,2 --steps 2 --time --seq-len 5")
    assert data["outcome"] == "differs"  # what counts on from run to run begins where it did


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("mine:Matrices --heads 1,2", 2, "Matrices takes no number of heads (its arguments: size)"),
        ("mine:ready --heads 1,2", 2, "its arguments: none"),
        ("mine:TwoHeads --embed-dim 22 --heads 2,11", 2, "its attention has 2"),
        ("mine:Tutorial --embed-dim 22 --heads 1,3", 1, "Tutorial with num_heads 3 failed on "),
        ("mine:Attention --heads 1,2 --set num_heads=2", 2, "--set num_heads fixes the number of heads"),
        ("mine:Dropping --heads 1,2 --train", 2, "Use eval mode (--eval"),
        ("mine:Attention --heads 1,2 --device meta", 2, "no numbers"),
        ("mine:Silent --heads 1,2", 2, "returned None, which contains no tensor"),
    ],
)
def test_head_counts_that_cannot_be_compared(invoke: Program, line: str, code: int, said: str) -> None:
    answer = invoke("compare-heads", *words(line))
    # A forward that raised is shown as trace shows it.
    assert ("\nfailed: " in answer.out) == (code == 1)
    assert_refused(answer if code == 2 else answer._replace(out=""), said, code)


# -- diff --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "layers"),
    [
        ("", ("torch", "per-head")),
        ("per-head", ("per-head", "torch")),
        ("--layer bert --left-set dtype=float64", ("bert", "bert")),
    ],
)
def test_which_two_are_compared(invoke: Program, line: str, layers: tuple[str, str]) -> None:
    data = data_of(invoke, f"diff {line}", *SIZES)
    assert (data["left"]["layer"]["name"], data["right"]["layer"]["name"]) == layers


def test_fail_if_tells_a_script(invoke: Program) -> None:
    same, unlike = ("diff", "torch", "fold-heads", *SIZES), ("diff", "torch", "narrow", *SIZES)
    assert [invoke(*same, "--fail-if", verdict).code for verdict in ("same", "differs")] == [1, 0]
    assert [invoke(*unlike, "--fail-if", verdict).code for verdict in ("same", "differs")] == [0, 1]


@pytest.mark.parametrize(
    "line",
    [
        "mine:Attention torch",
        "mine:Tutorial torch",
        "torch.nn:MultiheadAttention mine:Attention --left-set batch_first=true",
        "torch.nn:TransformerEncoderLayer mine:Attention --batch-first --left-module self_attn",
    ],
)
def test_ways_to_write_the_same_attention_are_the_same(invoke: Program, line: str) -> None:
    data = data_of(invoke, f"diff {line}", *SIZES)
    assert (data["outcome"], data["weights"]["whole"], data["first_differing_stage"]) == ("same", True, None)
    verdicts = {row["name"]: row["verdict"] for row in data["stages"]}
    assert {verdicts[stage] for stage in ("query", "q_heads", "k_heads", "v_heads", "scores", "weights")} == {"same"}


def test_the_arguments_of_a_part_are_those_of_its_first_call() -> None:
    from mha_inspect.call.call import Call
    from mha_inspect.call.part import part_of
    from mha_inspect.making.target import Target

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(14, 2, 7, batch_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(), torch.randn(2, 5, 14)
    for dropout in model.modules():
        if isinstance(dropout, torch.nn.Dropout):
            dropout.p = 0.0
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
    part, call = part_of(Target(model, "mine", {}), Call((), {"src": x, "mask": mask}, ""), "layers.1.self_attn")
    assert part.module is model.layers[1].self_attn
    assert torch.equal(call.kwargs["attn_mask"], mask)
    query = (*call.args, *call.kwargs.values())[0]
    torch.testing.assert_close(query, model.layers[0](x, src_mask=mask))
    assert not part.module._forward_pre_hooks


def dtypes(data: dict[str, Any]) -> list[str]:
    return [data[side]["environment"]["dtype"] for side in ("left", "right")]


def test_how_a_side_is_run_is_its_own_setting_whatever_its_arguments_are(invoke: Program) -> None:
    data = data_of(invoke, "diff mine:Attention mine:Attention --left-set dtype=bfloat16", *SIZES)
    assert dtypes(data) == ["bfloat16", "float32"]
    assert (data["outcome"], data["noise"]) == ("same", {"dtype": "bfloat16", "sides": ["left"]})
    both = "diff torch.nn:MultiheadAttention torch.nn:MultiheadAttention"
    data = data_of(invoke, f"{both} --left-set causal=true", *SIZES)
    assert (data["outcome"], data["first_differing_stage"]) == ("differs", "weights")
    # What torch's layer takes as an argument of its own is its own: a dtype is one of torch's.
    assert dtypes(data_of(invoke, f"{both} --left-set dtype=bfloat16", *SIZES)) == ["bfloat16", "float32"]
    # The fast path asks for no gradients.
    data = data_of(invoke, f"{both} --batch-first --left-set grad=true", *SIZES)
    is_fast = ["_native_multi_head_attention" in data[side]["path"]["plain"] for side in ("left", "right")]
    assert is_fast == [False, True]


def test_of_the_coarser_side_what_comes_in_is_rounded_too(invoke: Program) -> None:
    """The oracle: the cast of the input."""
    rounded = data_of(invoke, "diff mine:Attention torch --right-set dtype=bfloat16", *SIZES)
    query = rounded["stages"][0]
    assert (rounded["outcome"], rounded["first_differing_stage"]) == ("same", None)
    assert (query["name"], query["times_noise"]) == ("query", 1.0)
    assert 2**-9 < query["max_abs_difference"] < 2**-6


def test_nothing_is_concluded_from_unrelated_weights(invoke: Program) -> None:
    line = "diff torch.nn:Identity torch --input-shape input=3x5x24"
    assert invoke(*words(line), "--fail-if", "differs").code == 0
    data = data_of(invoke, line)
    assert (data["outcome"], data["first_differing_stage"], data["output"]["verdict"]) == ("inconclusive", None, None)
    assert {row["verdict"] for row in data["stages"]} == {None}
    assert data["answer"][0].startswith("Not comparable: the weights could not be copied.")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("torch narow", "Did you mean narrow?"),
        ("torch bert --layer narrow", "layer narrow is a third layer beside torch and bert"),
        ("torch split-heads --set kdim=7", "layer split-heads does not take kdim 7"),
        ("torch wide", "Try --set head_dim=7."),
        ("torch --left-set seq_len=7", "--left-set seq_len affects both sides"),
        ("torch --right-set dtyp=float16", "Did you mean dtype?"),
        ("torch --device meta", "device meta has shapes and no numbers"),
        ("mine:Attention torch --causal", "For the other side only: --right-set causal=true."),
        (
            "torch mine:Attention --left-set embed_dim=44",
            "takes query [3, 5, 44] and Attention.forward takes x [3, 5, 14]",
        ),
        ("torch.nn:TransformerEncoderLayer torch --left-module self_atn", "Did you mean self_attn?"),
        ("mine:Attention torch --right-module qkv", "side is a layer"),
        ("mine:GPT torch", "GPT.forward takes idx [3, 5]"),
    ],
)
def test_what_cannot_be_compared_is_answered_with_a_way_out(invoke: Program, line: str, said: str) -> None:
    assert_refused(invoke("diff", *words(line), *SIZES), said)
