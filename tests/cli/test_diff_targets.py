"""`mha-inspect diff` with modules of one's own: the same weights, the same input, and each side as it was set."""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch

from ..schemas import load_schema

SIZES = ("--embed-dim", "22", "--num-heads", "2", "--batch", "3", "--seq-len", "5")

CODE = '''
import math

import torch
from torch import nn


class Packed(nn.Module):
    """One product for query, key and value, cut in one view."""

    def __init__(self, dim, num_heads=2, qkv_bias=True, whole_width=False):
        super().__init__()
        self.heads, self.width = num_heads, dim if whole_width else dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.mT / math.sqrt(self.width)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class Separate(nn.Module):
    """Three arguments, fused attention."""

    def __init__(self, d_model, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value):
        given = zip((self.q, self.k, self.v), (query, key, value))
        q, k, v = (linear(t).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear, t in given)
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Transposed(nn.Module):
    """Matrices of its own, `in out`, as GPT-2 has them."""

    def __init__(self, dim, num_heads=2):
        super().__init__()
        self.heads = num_heads
        self.w = nn.Parameter(torch.randn(4, dim, dim) / dim**0.5)

    def forward(self, x):
        q, k, v = ((x @ self.w[n]).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in range(3))
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ self.w[3]


class Normed(nn.Module):
    """Weights that are no parameter as they stand."""

    def __init__(self, dim, num_heads=1):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dim, dim))

    def forward(self, x):
        q, k, v = (x @ (w * 1.5 + 0.25) for w in self.w)
        return (q @ k.mT / math.sqrt(x.shape[-1])).softmax(-1) @ v


class Stack(nn.Module):
    def __init__(self, dim, depth=2, num_heads=2):
        super().__init__()
        self.blocks = nn.ModuleList(Packed(dim, num_heads) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Ids(nn.Module):
    def __init__(self, dim, num_heads=2, vocab_size=13):
        super().__init__()
        self.table, self.attention = nn.Embedding(vocab_size, dim), Packed(dim)

    def forward(self, input_ids):
        return self.attention(self.table(input_ids))


class Bare(nn.Module):
    """Without an output projection."""

    def __init__(self, dim, num_heads=2):
        super().__init__()
        self.heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return ((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Alone(nn.Module):
    """Attention without any weight."""

    scale = 1.0

    def __init__(self, dim, num_heads=1):
        super().__init__()

    def forward(self, x):
        return (x @ x.mT * self.scale).softmax(-1) @ x


class AloneUnscaled(Alone):
    scale = 3.0


class Fixed(Packed):
    """Of one size."""

    def __init__(self):
        super().__init__(26)


class Broken(nn.Module):
    def __init__(self, dim, num_heads=2):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return self.linear(x) @ self.linear(x)
'''


def report_of(invoke, mine: str, line: str, *more: str) -> dict:
    code, out, err = invoke("diff", *line.replace("mine:", f"{mine}:").split(), *SIZES, "--json", *more)
    assert code == 0, err
    data = json.loads(out, parse_constant=pytest.fail)
    jsonschema.Draft202012Validator(load_schema("diff")).validate(data)
    return data


def verdicts(data: dict) -> dict[str, str | None]:
    return {row["name"]: row["verdict"] for row in data["stages"]}


@pytest.mark.parametrize(
    "line",
    [
        "mine:Packed torch",
        "mine:Separate torch --key-len 7",
        "mine:Transposed per-head",
        "torch.nn:MultiheadAttention mine:Packed --left-set batch_first=true",
    ],
)
def test_ways_to_write_the_same_attention_are_the_same(invoke, mine, line):
    data = report_of(invoke, mine, line)
    assert data["weights"]["whole"] is True
    assert data["outcome"] == "same"
    assert data["first_differing_stage"] is None
    by_stage = verdicts(data)
    assert {by_stage[stage] for stage in ("query", "q_heads", "k_heads", "v_heads", "scores", "weights")} == {"same"}
    # The weights are not all zeros, and the outputs not either.
    assert data["output"]["noise_floor"] is None or data["output"]["noise_floor"] > 0


def test_the_weights_are_those_of_the_left(invoke, mine):
    """The oracle: torch's layer with the target's own numbers, put in by hand."""
    data = report_of(invoke, mine, "mine:Separate torch")
    namespace: dict = {}
    exec(CODE, namespace)
    torch.manual_seed(0)
    separate = namespace["Separate"](22)
    layer = torch.nn.MultiheadAttention(22, 2, batch_first=True).eval()
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.cat([separate.q.weight, separate.k.weight, separate.v.weight]))
        layer.in_proj_bias.copy_(torch.cat([separate.q.bias, separate.k.bias, separate.v.bias]))
        layer.out_proj.load_state_dict(separate.o.state_dict())
        x = torch.randn(3, 5, 22, generator=torch.Generator().manual_seed(2))
        torch.testing.assert_close(separate(x, x, x), layer(x, x, x)[0])
    assert data["output"]["verdict"] == "same"


def test_several_attentions_are_paired_in_order(invoke, mine):
    data = report_of(invoke, mine, "mine:Stack mine:Stack --right-set num_heads=11")
    assert [row["attention"] for row in data["stages"] if row["name"] == "scores"] == [1, 2]
    assert data["weights"]["whole"] is True
    assert {row["verdict"] for row in data["stages"] if row["attention"] == 1 and row["name"] == "v_heads"} == {"same"}
    page = invoke("diff", f"{mine}:Stack", f"{mine}:Stack", "--right-set", "num_heads=11", *SIZES).out
    assert "attention 2" in page
    assert ", in attention 1" in page


def test_other_counts_of_attentions_and_weights_that_stay(invoke, mine):
    data = report_of(invoke, mine, "mine:Stack mine:Stack --right-set depth=3")
    assert any("has 2 attentions and Stack with depth 3 has 3" in note for note in data["notes"])
    last = [row for row in data["stages"] if row["attention"] == 3]
    assert {row["left"] for row in last} == {None}
    assert data["weights"]["whole"] is False
    assert "could not be copied" in data["weights"]["sentence"]
    assert_not_comparable(data)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mine:Normed torch", "to heads: the forward does more than view or copy it"),
        ("mine:Stack torch", "Stack has 2 attentions, but torch has 1"),
    ],
)
def test_weights_that_cannot_be_carried_say_why(invoke, mine, line, said):
    data = report_of(invoke, mine, line)
    assert data["weights"]["sentence"] == "The weights could not be copied; each side keeps its own."
    assert said in data["weights"]["left_out"][0]
    assert_not_comparable(data)
    code, out, _ = invoke("diff", *line.replace("mine:", f"{mine}:").split(), *SIZES, "--fail-if", "differs")
    assert (code, "Not comparable: the weights could not be copied." in out) == (0, True)
    assert "first stage that differs" not in out


def assert_not_comparable(data):
    """Assert that nothing is concluded from unrelated weights, and that shapes and axes are still there."""
    assert (data["outcome"], data["first_differing_stage"], data["output"]["verdict"]) == ("inconclusive", None, None)
    assert {row["verdict"] for row in data["stages"]} == {None}
    scores = next(row for row in data["stages"] if row["name"] == "scores")
    for side in (scores["left"], scores["right"]):
        assert side["axes"].endswith("query key")
        assert side["shape"][-2:] == [5, 5]
    assert data["answer"][0].startswith("Not comparable: the weights could not be copied.")
    assert not any("differ" in sentence or "Not the same" in sentence for sentence in data["answer"])


def test_modules_without_weights_are_compared(invoke, mine):
    data = report_of(invoke, mine, "mine:Alone mine:AloneUnscaled")
    assert (data["weights"]["whole"], data["outcome"]) == (True, "differs")
    assert data["first_differing_stage"] == "scores"


def test_a_bias_on_one_side_goes_as_zeros_into_the_other(invoke, mine):
    data = report_of(invoke, mine, "mine:Packed mine:Packed --right-set qkv_bias=false")
    assert (data["weights"]["whole"], data["outcome"]) == (True, "same")
    assert data["weights"]["sentence"].endswith(", with zeros as biases.")


def dtypes(data: dict) -> list[str]:
    return [data[side]["environment"]["dtype"] for side in ("left", "right")]


def test_how_a_side_is_run_is_its_own_setting_whatever_its_arguments_are(invoke, mine):
    data = report_of(invoke, mine, "mine:Packed mine:Packed --left-set dtype=bfloat16")
    assert dtypes(data) == ["bfloat16", "float32"]
    assert (data["outcome"], data["noise"]) == ("same", {"dtype": "bfloat16", "sides": ["left"]})
    assert data["left"]["settings"] == {"dtype": "bfloat16"}
    data = report_of(invoke, mine, "torch.nn:MultiheadAttention torch.nn:MultiheadAttention --left-set causal=true")
    assert (data["outcome"], data["first_differing_stage"]) == ("differs", "weights")
    # What torch's layer takes as an argument of its own is its own: a dtype is one of torch's.
    data = report_of(invoke, mine, "torch.nn:MultiheadAttention torch.nn:MultiheadAttention --left-set dtype=bfloat16")
    assert dtypes(data) == ["bfloat16", "float32"]


def test_of_the_coarser_side_what_comes_in_is_rounded_too(invoke, mine):
    """The oracle: the cast of the input."""
    rounded = report_of(invoke, mine, "mine:Packed torch --right-set dtype=bfloat16")
    query = rounded["stages"][0]
    assert (rounded["outcome"], rounded["first_differing_stage"]) == ("same", None)
    assert (query["name"], query["times_noise"]) == ("query", 1.0)
    assert 2**-9 < query["max_abs_difference"] < 2**-6


def test_the_fast_path_asks_for_no_gradients(invoke, mine):
    both = "torch.nn:MultiheadAttention torch.nn:MultiheadAttention --batch-first"
    data = report_of(invoke, mine, f"{both} --left-set grad=true")
    is_fast = ["_native_multi_head_attention" in data[side]["path"]["plain"] for side in ("left", "right")]
    assert is_fast == [False, True]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("mine:Packed mine:Packed --left-set device=meta", 2, "no numbers"),
        ("mine:Packed torch --left-set causal=true", 2, "Packed.forward takes no mask"),
        ("mine:Packed torch --causal", 2, "Drop --causal. For the other side only: --right-set causal=true."),
        ("mine:Packed torch --left-set whole=1", 2, "whole_width"),
        ("mine:Packed mine:Packed --right-set dim=44", 2, "takes x [3, 5, 44] and Packed.forward takes x [3, 5, 22]"),
        ("mine:Ids torch", 2, "Ids.forward takes input_ids [3, 5]"),
        ("mine:Broken torch", 1, "Broken failed on x float32 [3, 5, 22]"),
        ("mine:Packed torch --right-set kdim=7", 2, "takes key [3, 5, 7] and Packed.forward takes x [3, 5, 22]"),
        (
            "torch mine:Packed --left-set embed_dim=44",
            2,
            "takes query [3, 5, 44] and Packed.forward takes x [3, 5, 22]",
        ),
        ("mine:Packed torch --right-set seq-len=4", 2, "--right-set seq_len affects both sides"),
        ("mine:Packed torch --right-set seed=4", 2, "Use --seed instead"),
        ("mine:Packed mine:Packed --right-set seq-len=4", 2, "--right-set seq-len is not an argument of Packed"),
        ("mine:Fixed bert --input-shape x=3x5x26", 2, "embed_dim 22 contradicts Fixed, which takes 26 features"),
        ("mine:Fixed mine:Packed", 2, "Fixed has no argument for --embed-dim"),
    ],
)
def test_bad_input(invoke, mine, line, code, said):
    answer = invoke("diff", *line.replace("mine:", f"{mine}:").split(), *SIZES)
    assert answer.code == code
    # A forward that raised is shown as trace shows it.
    assert ("\nfailed: " in answer.out) if code == 1 else answer.out == ""
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert answer.err.count("\n") <= 2


@pytest.mark.parametrize("line", ["mine:Bare mine:Packed", "mine:Packed mine:Bare"])
def test_an_identity_stands_for_an_output_projection_that_is_not_there(invoke, mine, line):
    data = report_of(invoke, mine, line)
    assert (data["outcome"], data["weights"]["whole"]) == ("same", True)
    assert "the identity as W_o" in data["weights"]["sentence"]


def test_shared_key_heads_are_repeated_where_each_head_has_its_own(invoke, mine):
    data = report_of(invoke, mine, "mine:Packed grouped-query --right-set num_kv_heads=1")
    assert data["weights"]["sentence"].startswith("Copied by head from grouped-query with num_kv_heads 1")
    assert data["outcome"] == "same"


def test_no_stage_in_both_is_not_told_as_all_being_the_same(invoke):
    code, out, err = invoke("diff", "torch.nn:Identity", "torch", "--input-shape", "input=3x5x24")
    assert code == 0, err
    assert "Not comparable: the weights could not be copied." in out
    assert "every stage" not in out.lower()
    assert "No attention was found in Identity." in out
