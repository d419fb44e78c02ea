"""diff: its numbers against torch's own, computed here on the same weights, and cases worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mha_inspect
from mha_inspect.call.load import layer_called
from mha_inspect.cli.sides import planned_layer, runs
from mha_inspect.compare.diff import diff as diff_of_sides
from mha_inspect.compare.shared_weights import share
from mha_inspect.layers.catalog import LAYERS, find_layer
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.naming.pattern import STAGES
from mha_inspect.reports.diff import DiffReport, StageRow

from ..built import built_layer, planned, two_layers
from ..layers.declared import canonical_weights, load_weights

# Distinct primes wherever sizes are independent; embed_dim is heads times a prime.
HEADS, HEAD_DIM, BATCH, QUERY = 3, 11, 2, 7
EMBED = HEADS * HEAD_DIM
SPEC = AttentionSpec(embed_dim=EMBED, num_heads=HEADS)
INPUTS = InputSpec(batch=BATCH, seq_len=QUERY)


def diff(left: str, right: str, inputs: InputSpec = INPUTS, **settings: Any) -> DiffReport:
    sets = [settings.pop(name, {}) for name in ("left_set", "right_set")]
    return diff_of_sides(*two_layers(left, right, replace(SPEC, **settings), inputs, RunSpec(), *sets))


def stage(report: DiffReport, name: str) -> StageRow:
    return next(row for row in report.stages if row.name == name)


def run(layer: str, weights=None, inputs: InputSpec = INPUTS, run: RunSpec | None = None, **settings: Any):
    """The output of a layer that was loaded here by hand."""
    spec, run = replace(SPEC, **settings), run or RunSpec()
    code = find_layer(layer)
    module = code.build(spec)
    load_weights(module, canonical_weights(spec) if weights is None else weights)
    with torch.no_grad():
        return layer_called(module, spec, inputs, run, layer).plain()[0]


SAME = ("split-heads", "fold-heads", "per-head", "grouped-query")


@pytest.mark.parametrize("right", SAME)
def test_layers_with_one_mathematics_are_the_same_at_every_stage(right):
    report = diff("torch", right, replace(INPUTS, causal=True, padding=(1, 3)))
    assert (report.outcome, report.first_differing_stage) == ("same", None)
    assert {row.verdict for row in report.stages} <= {"same", None}
    assert report.weights.whole
    compared = [row.name for row in report.stages if row.verdict]
    assert compared[:3] == ["query", "key", "value"]
    assert {"q_proj", "k_heads", "weights", "context", "concat", "output"} <= set(compared)
    assert report.answer[0].startswith("The same: ")


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_are_those_that_were_drawn_bit_for_bit(layer):
    """The oracle: the places that each layer declares, into which the same numbers are put."""
    left = "wide" if layer == "wide" else "torch"
    options, *asked = planned(left, layer, SPEC, INPUTS, RunSpec(), {}, {"bias": False})
    sides = [planned_layer(options, side) for side in asked]
    built = runs(options, *asked)
    share(*built)
    weights = canonical_weights(sides[0].spec)
    for run_of, side in zip(built, sides, strict=True):
        expected = side.kind.build(side.spec)
        fitting = weights
        if layer == "narrow" and side.kind.name == layer:
            blocks = torch.block_diag(*[torch.ones(HEAD_DIM, HEAD_DIM)] * HEADS).view(HEADS, HEAD_DIM, EMBED)
            fitting = replace(fitting, **{name: getattr(weights, name) * blocks for name in ("w_q", "w_k", "w_v")})
        if not side.spec.bias:
            fitting = replace(fitting, b_q=None, b_k=None, b_v=None, b_o=None)
        if side.kind.name == "bert":
            fitting = replace(fitting, w_o=None, b_o=None)
        load_weights(expected, fitting)
        assert all(map(torch.equal, run_of.subject.module.parameters(), expected.parameters()))


def test_narrow_is_as_far_from_torch_as_torch_says():
    report = diff("torch", "narrow")
    weights = canonical_weights(SPEC)
    # Of head h only columns 11h to 11h+10.
    blocks = torch.block_diag(*[torch.ones(HEAD_DIM, HEAD_DIM)] * HEADS).view(HEADS, HEAD_DIM, EMBED)
    kept = replace(weights, **{name: getattr(weights, name) * blocks for name in ("w_q", "w_k", "w_v")})
    whole, cut = run("torch", weights), run("torch", kept)
    assert report.outcome == "differs"
    assert report.output.max_abs_difference == pytest.approx(float((whole - cut).abs().max()), rel=1e-5)
    assert report.output.relative_difference == pytest.approx(float((whole - cut).norm() / whole.norm()), rel=1e-5)
    query = built_layer(SPEC, INPUTS, RunSpec()).tensors[0]
    projected = [query @ w.w_q.reshape(EMBED, EMBED).T for w in (weights, kept)]
    row = stage(report, "q_proj")
    assert report.first_differing_stage == "q_proj"
    assert row.max_abs_difference == pytest.approx(float((projected[0] - projected[1]).abs().max()), rel=1e-5)


def test_a_fully_masked_row_is_nan_in_torch_and_a_mean_in_split_heads():
    inputs = replace(INPUTS, padding=(QUERY, 2))
    report = diff("torch", "split-heads", inputs)
    # By hand: −1e9 swallows every score in float32, all weights are 1/7, and the context is the mean of the values.
    spec, weights = SPEC, canonical_weights(SPEC)
    value = built_layer(spec, inputs, RunSpec()).tensors[2][0]
    mean = (value @ weights.w_v.reshape(EMBED, EMBED).T + weights.b_v.flatten()).mean(dim=0)
    expected = weights.w_o.reshape(EMBED, EMBED) @ mean + weights.b_o
    torch.testing.assert_close(run("split-heads", inputs=inputs)[0, 0], expected)
    assert run("torch", inputs=inputs)[0].isnan().all()
    assert report.outcome == "differs"
    assert report.first_differing_stage == "weights"
    before = STAGES[: STAGES.index("weights")]
    assert {row.verdict for row in report.stages if row.name in before} <= {"same", "inconclusive"}
    said = f"{QUERY} queries have every key masked out (first: query 0 of batch item 0): "
    assert report.answer[-1] == f"{said}their weights are NaN in torch and uniform in split-heads."
    # In float64 −1e9 swallows less of a score: that is no rounding of the other rows.
    assert report.right.rounding_error < 1e-5


def test_appended_keys_leave_nothing_to_subtract_and_say_so():
    report = diff("torch", "per-head", left_set={"add_bias_kv": True})
    row = stage(report, "k_heads")
    assert (row.verdict, row.max_abs_difference) == ("differs", None)
    assert "[2, 3, 8, 11] and [2, 3, 7, 11]" in row.note
    assert "appends no learned key and value" in report.weights.left_out[0]


def test_a_bias_that_one_side_lacks():
    report = diff("torch", "torch", right_set={"bias": False})
    assert report.first_differing_stage == "q_proj"
    # Without b_q what is left of the difference is b_q itself.
    biggest = float(canonical_weights(SPEC).b_q.abs().max())
    assert stage(report, "q_proj").max_abs_difference == pytest.approx(biggest, rel=1e-5)


def test_dropout_is_named_and_not_called_rounding():
    report = diff("torch", "torch", dropout=0.5, left_set={"training": True})
    assert report.left.rounding_error is None
    assert report.first_differing_stage == "context"
    assert any("Dropout is on" in note for note in report.notes)
    assert not any("Accuracy by" in sentence for sentence in report.answer)


def test_a_dtype_costs_what_it_is_off_the_exact_result():
    report = diff("torch", "torch", left_set={"dtype": "bfloat16"})
    weights = canonical_weights(SPEC)
    exact = run("torch", weights, dtype="float64")
    rough, fine = run("torch", weights, dtype="bfloat16").double(), run("torch", weights).double()
    assert report.left.rounding_error == pytest.approx(float((rough - exact).abs().max()))
    assert report.right.rounding_error == pytest.approx(float((fine - exact).abs().max()))
    assert report.output.max_abs_difference == pytest.approx(float((rough - fine).abs().max()))
    assert (report.noise.dtype, report.noise.sides) == ("bfloat16", ("left",))
    assert report.outcome == "same"
    assert stage(report, "query").max_abs_difference > 0
    assert any("Accuracy by dtype (bfloat16, float32)" in sentence for sentence in report.answer)


class WithBias(torch.nn.Module):
    """A layer whose bias is zero before training, and that may leave it out."""

    def __init__(self, is_added: bool) -> None:
        super().__init__()
        self.qkv, self.bias, self.is_added = torch.nn.Linear(8, 24), torch.nn.Parameter(torch.zeros(8)), is_added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        result = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return result + self.bias if self.is_added else result + 0 * self.bias


def test_a_bias_of_zeros_hides_no_difference() -> None:
    left, right, twin = WithBias(True), WithBias(False), WithBias(True)
    x = torch.randn(2, 5, 8)
    assert mha_inspect.diff(left, twin, x).outcome == "same"
    assert mha_inspect.diff(left, right, x).outcome == "differs"
    assert not left.bias.any()
    assert not right.bias.any()
