"""compare-heads against torch's own layer run by hand, in float64 where it counts."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from mha_inspect import compare_heads
from mha_inspect.errors import SpecError
from mha_inspect.layers.catalog import LayerKind
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec

from ..built import built_layer

EMBED = 30
SIZES = {"embed_dim": EMBED, "batch": 3, "seq_len": 7}


def by_hand(heads: int, dtype: torch.dtype = torch.float32, **inputs) -> torch.Tensor:
    """torch's layer with this head count and the weights and inputs of the seed."""
    name = str(dtype).removeprefix("torch.")
    spec = AttentionSpec(embed_dim=EMBED, num_heads=heads, dtype=name)
    forward = built_layer(spec, InputSpec(**{"batch": 3, "seq_len": 7, **inputs}), RunSpec())
    with torch.no_grad():
        return forward.module(*forward.args, **forward.kwargs)[0]


def changed_layer(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """Every torch layer is changed after it was drawn."""
    honest = LayerKind.build

    def build(*args):
        module = honest(*args)
        with torch.no_grad():
            change(module)
        return module

    monkeypatch.setattr(LayerKind, "build", build)


def test_differences_are_those_of_torchs_layer_run_by_hand():
    report = compare_heads((2, 5, 15), **SIZES)
    outputs = {heads: by_hand(heads).double() for heads in (2, 5, 15)}
    for count in report.counts[1:]:
        apart = outputs[count.num_heads] - outputs[2]
        assert count.max_abs_difference == pytest.approx(apart.abs().max().item(), rel=1e-6)
        assert count.relative_difference == pytest.approx((apart.norm() / outputs[2].norm()).item(), rel=1e-6)
        assert (count.verdict, count.first_differing_stage) == ("differs", "scores")
        assert count.times_noise == pytest.approx(count.max_abs_difference / count.noise_floor)
    assert report.outcome == "differs"
    assert report.baseline == 2
    assert report.counts[0].reason == "The baseline."


def test_the_reason_says_what_was_found_with_its_numbers():
    first, second = compare_heads((1, 5), **SIZES).counts
    assert second.reason == (
        "q_proj, k_proj and v_proj are identical, and are cut into other heads; "
        "scores differ: 5 heads use 6 features each; 1 head uses all 30."
    )
    assert first.first_differing_stage is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_noise_floor_is_the_distance_from_the_same_run_in_float64(dtype):
    name = str(dtype).removeprefix("torch.")
    report = compare_heads((5, 3), **SIZES, dtype=name)
    forward = built_layer(
        AttentionSpec(embed_dim=EMBED, num_heads=5, dtype=name), InputSpec(batch=3, seq_len=7), RunSpec()
    )
    exact = copy.deepcopy(forward.module).double()
    x = forward.tensors[0].double()
    with torch.no_grad():
        expected = (by_hand(5, dtype).double() - exact(x, x, x)[0]).abs().max().item()
    assert expected > 0
    assert {count.noise_floor for count in report.counts} == {expected}
    assert report.outcome == "differs"
    assert 1e-18 < compare_heads((5, 3), **SIZES, dtype="float64").counts[0].noise_floor < 1e-14


def test_zero_projections_make_every_head_count_the_same(monkeypatch):
    changed_layer(monkeypatch, lambda module: module.in_proj_weight.zero_())
    report = compare_heads((1, 2, 3), **{**SIZES, "batch": 1})
    assert report.outcome == "same"
    assert [count.max_abs_difference for count in report.counts] == [0, 0, 0]
    assert report.counts[1].reason == "Every stage is identical."


def test_small_outputs_that_are_far_apart_differ(monkeypatch):
    changed_layer(monkeypatch, lambda module: module.out_proj.weight.mul_(1e-8))
    report = compare_heads((1, 5), **SIZES)
    torch.testing.assert_close(by_hand(5), by_hand(1))
    assert report.counts[1].relative_difference > 0.2
    assert report.counts[1].verdict == "differs"


@pytest.mark.parametrize("inputs", [{"key_len": 1}, {"padding": (6,), "causal": True}])
def test_one_key_makes_every_head_count_the_same_and_it_says_why(inputs):
    report = compare_heads((1, 2, 5), **{**SIZES, **inputs})
    assert report.outcome == "same"
    for count in report.counts[1:]:
        assert count.first_differing_stage in ("scores", "masked_scores")
        assert count.reason.endswith("from weights on, the numbers are the same again.")
    assert report.answer[0].startswith("No: ")


def test_nan_beside_nan_is_no_difference_and_is_said():
    report = compare_heads((1, 2), **SIZES, padding=(7, 0, 0))
    assert report.counts[1].verdict == "differs"
    assert math.isfinite(report.counts[1].max_abs_difference)
    assert any("7 queries have every key masked out" in said and "NaN" in said for said in report.answer)
    nothing = compare_heads((1, 2), **SIZES, padding=(7,))
    assert nothing.answer[0].startswith("Undecided: with this input, the output of every head count is NaN throughout")


@pytest.mark.parametrize(
    ("heads", "settings", "message"),
    [
        ((1, 4), {"embed_dim": 10}, "Head counts that divide 10: 1, 2, 5, 10"),
        ((1, 2), {"device": "meta"}, "no numbers"),
        ((1, 2), {"training": True, "dropout": 0.1}, "dropout alone makes the outputs of all head counts differ"),
        ((), {}, "no head counts"),
        ((1, 2), {"layer": "tensorflow"}, "was not found"),
        ((1, 2), {"layer": "bert", "kdim": 3}, "does not take kdim"),
    ],
)
def test_what_cannot_be_compared_is_refused(heads, settings, message):
    with pytest.raises(SpecError, match=message):
        compare_heads(heads, **{**SIZES, **settings})


@pytest.mark.parametrize(
    ("layer", "settings", "first"),
    [
        ("wide", {}, "q_proj"),
        ("grouped-query", {"num_kv_heads": 1}, "k_proj"),
        ("grouped-query", {"embed_dim": 60, "rope": True}, "q_heads"),
    ],
)
def test_layers_whose_parameters_change_say_what_changes(layer, settings, first):
    report = compare_heads((2, 5) if layer != "wide" else (2, 3), **{**SIZES, **settings}, layer=layer)
    count = report.counts[1]
    assert (count.verdict, count.first_differing_stage) == ("differs", first)
    assert count.same_parameters == ("rope" in settings)
    assert ("same in number" in report.answer[1]) == ("rope" in settings)
    assert ("The head count changes" in report.answer[1]) == ("rope" not in settings)


def test_stages_have_a_shape_for_each_head_count_and_equal_ones_are_marked():
    report = compare_heads((1, 2, 5), **SIZES)
    shapes = {stage.name: stage.shapes for stage in report.stages}
    assert {stage.name: stage.axes for stage in report.stages}["k_proj"] == "batch key (heads head_dim)"
    batch, queries, keys = 3, 7, 7
    assert shapes["weights"] == tuple((batch, heads, queries, keys) for heads in (1, 2, 5))
    width = EMBED
    assert shapes["q_heads"] == tuple((batch, heads, queries, width // heads) for heads in (1, 2, 5))
    assert {stage.name for stage in report.stages if stage.same} >= {"query", "q_proj", "concat", "output"}
    assert not {stage.name for stage in report.stages if stage.same} & {"q_heads", "scores", "weights", "context"}


def test_a_count_given_twice_is_run_once_and_one_alone_tells_nothing():
    report = compare_heads((2, 2, 5, 2), **SIZES)
    assert [count.num_heads for count in report.counts] == [2, 5]
    alone = compare_heads((2, 2), **SIZES)
    assert [count.num_heads for count in alone.counts] == [2]
    assert alone.answer[0].startswith("Undecided: only one head count was given")


def test_the_answer_says_what_a_head_has_for_itself():
    report = compare_heads((1, 2, 3), **SIZES)
    own, shown, *_ = report.answer[1:]
    assert own.startswith("The rows of W_q, W_k and W_v of a head are that head's own projection.")
    assert f"{report.counts[0].numel:,}" in own
    assert "diff torch per-head" in shown


def test_heads_that_see_alike_are_not_said_to_differ(monkeypatch):
    changed_layer(monkeypatch, lambda module: module.in_proj_weight.zero_())
    assert "own projection" not in " ".join(compare_heads((1, 2, 3), **SIZES).answer)
