from __future__ import annotations

import copy
import json
import pickle
from collections import OrderedDict
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import ForwardError, InputError, SpecError
from mha_inspect.testing import assert_same_attention, assert_stage_shapes

from .call.styles import Attention, Lazy

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 7, 3, 5


@pytest.fixture
def layer() -> nn.MultiheadAttention:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.MultiheadAttention(HEADS * HEAD_DIM, HEADS, batch_first=True).eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1))


def test_kept_tensors_are_what_torch_returns(layer, x):
    trace = mha_inspect.trace(layer, x, x, x, keep=True)
    attention = trace.attentions[0]
    with torch.no_grad():
        output, weights = layer(x, x, x, average_attn_weights=False)
    assert torch.allclose(attention.weights.tensor.view(BATCH, HEADS, LENGTH, LENGTH), weights, atol=1e-6)
    assert torch.allclose(attention.output.tensor, output, atol=1e-6)
    assert attention.head_dim == HEAD_DIM
    assert attention.call is None
    assert attention.scores.axes == "(batch heads) query key"


def test_tensors_are_kept_only_when_asked_for(layer, x):
    with pytest.raises(ValueError, match=r"was not kept\. Trace with keep=True"):
        _ = mha_inspect.trace(layer, x, x, x).attentions[0].scores.tensor
    with pytest.raises(AttributeError, match=r"has no masked_scores\. Its stages: query, key, value, q_proj"):
        _ = mha_inspect.trace(layer, x, x, x).attentions[0].masked_scores


@pytest.mark.parametrize("again", [copy.deepcopy, lambda trace: pickle.loads(pickle.dumps(trace))])
def test_copies_are_what_they_were(layer, x, again):
    trace = mha_inspect.trace(layer, x, x, x, keep=True)
    same = again(trace)
    assert same == trace
    assert str(same) == str(trace)
    assert str(same.attentions[0].weights) == str(trace.attentions[0].weights)
    assert same.attentions[0].weights.tensor.equal(trace.attentions[0].weights.tensor)
    assert not hasattr(same.attentions[0], "absent")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (lambda x: mha_inspect.trace(torch.relu, x), r"trace expects a torch\.nn\.Module.*mha_inspect\.recording\("),
        (lambda x: mha_inspect.params(x), "params expects"),
        (lambda x: mha_inspect.diff(nn.Identity(), "torch", x), "diff expects a torch.nn.Module, got 'torch'"),
    ],
)
def test_what_is_no_module_is_answered_with_what_to_do(x, asked, said):
    with pytest.raises(TypeError, match=said):
        asked(x)


def test_it_prints_itself_and_its_parts(layer, x):
    trace = mha_inspect.trace(layer, x, x, x)
    assert "q_heads" in str(trace)
    assert str(trace.attentions[0].context) == "context [6, 7, 5] (batch heads) query head_dim: weights · v_heads"
    assert "scores" in dir(trace.attentions[0])
    assert str(trace.attentions[0].context) in str(trace.attentions[0])


def test_a_notebook_shows_it_and_nothing_beside_it_changes(layer, x):
    trace = mha_inspect.trace(layer, x, x, x)
    cell = trace._repr_html_()
    # Well-formed, and without rules that would hold for the page or for the cell above.
    root = ElementTree.fromstring(cell)
    assert root.get("class") == "mha-inspect"
    (style,) = root.iter("style")
    for rule in (style.text or "").strip().splitlines():
        selectors = rule.partition("{")[0].split(",")
        assert all(selector.strip().startswith(".mha-inspect") for selector in selectors)
    assert not {element.tag for element in root.iter()} & {"script", "link", "body", "meta"}
    rows = [["".join(field.itertext()) for field in row] for row in root.iter("tr")]
    assert [row[1] for row in rows if row[0].startswith("scores")] == ["[6, 7, 7]"]


def test_saved_it_is_what_to_dict_gives(layer, x, tmp_path):
    show = mha_inspect.Show(ops=True, stats=True, values=True)
    trace = mha_inspect.trace(layer, x, x, x, show=show)
    trace.save(tmp_path / "trace.json")
    assert trace.to_dict() == json.loads((tmp_path / "trace.json").read_text())
    trace.save(tmp_path / "trace.txt")
    assert (tmp_path / "trace.txt").read_text() == str(trace) + "\n"


def test_a_block_hides_nothing(layer, x):
    with torch.no_grad(), mha_inspect.recording() as seen:
        layer(x, x, x, need_weights=False)
        layer(x, x[:, :5], x[:, :5])
    assert [attention.scores.shape for attention in seen.trace.attentions] == [(2, 3, 7, 7), (6, 7, 5)]
    assert [attention.call for attention in seen.trace.attentions] == [1, 2]
    assert "call 2" in str(seen.trace)
    assert seen.trace.proof.agrees


def test_a_block_that_raises_lets_the_error_through_and_keeps_what_ran(layer, x):
    seen = mha_inspect.recording()

    def train() -> None:
        with seen:
            layer(x, x[:, :5], x[:, :5])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert [attention.scores.shape for attention in seen.trace.attentions] == [(6, 7, 5)]


def test_a_trace_inside_its_block_is_refused():
    with mha_inspect.recording() as seen, pytest.raises(ValueError, match="still running"):
        _ = seen.trace


def test_diff_compares_modules_as_they_are_and_changes_neither(layer, x):
    same, other = layer, copy.deepcopy(layer)
    with torch.no_grad():
        other.out_proj.weight[0, 0] += 1
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    assert mha_inspect.diff(same, same, x, x, x).outcome == "same"
    found = mha_inspect.diff(same, other, x, x, x, same_weights=False)
    with torch.no_grad():
        expected = (same(x, x, x)[0] - other(x, x, x)[0]).abs().max().item()
    assert found.outcome == "differs"
    assert found.first_differing_stage == "output"
    assert found.output.max_abs_difference == pytest.approx(expected, rel=1e-5)
    assert "output" in str(found)
    shared = mha_inspect.diff(same, other, x, x, x)
    assert shared.outcome == "same"
    assert shared.weights.sentence.startswith("Copied by name from left to right: names and shapes agree.")
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


@pytest.mark.parametrize(
    ("heads", "settings", "said"),
    [
        (8, {}, "heads 8 are not whole numbers"),
        ((1, 2), {"steps": "many"}, "steps 'many' is not a whole number"),
        ((1, 2), {"embed_dmi": 8}, "embed_dmi is not a setting of a layer: .* Did you mean embed_dim?"),
    ],
)
def test_what_compare_heads_cannot_take_is_named(heads, settings, said):
    with pytest.raises(SpecError, match=said):
        mha_inspect.compare_heads(heads, **settings)


def test_the_trace_of_a_forward_that_raised_prints_itself_and_accuses_no_weight():
    module = nn.Sequential(nn.Linear(6, 18))
    with pytest.raises(ForwardError, match=r"must be Tensor, not numpy\.ndarray$") as failed:
        mha_inspect.trace(module, torch.randn(2, 6).numpy())
    assert "No cause found" in str(failed.value.trace)
    with pytest.raises(ForwardError, match=r"\(2x5 and 6x18\)\. input has 5 features; 0\.weight expects 6\.$"):
        mha_inspect.trace(module, torch.randn(2, 5))


def test_a_report_says_whether_the_answer_is_good(tmp_path) -> None:
    torch.manual_seed(0)
    x, layer = torch.randn(2, 5, 12), nn.MultiheadAttention(12, 3, batch_first=True).eval()
    other = nn.MultiheadAttention(12, 3, batch_first=True).eval()
    right = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()
    causal = mha_inspect.Intent(causal=True)
    good = [mha_inspect.trace(layer, x, x, x), mha_inspect.params(layer, x, x, x), mha_inspect.check(right, x)]
    bad = [mha_inspect.check(right, x, intent=causal)]
    bad.append(mha_inspect.diff(layer, other, x, x, x, same_weights=False))
    assert all(report.ok and bool(report) for report in [*good, mha_inspect.diff(layer, layer, x, x, x)])
    assert not any(report.ok or bool(report) for report in bad)


@pytest.mark.parametrize("names", ["heads", ("heads",)])
def test_one_check_is_chosen_by_its_name(names) -> None:
    x, layer = torch.randn(2, 5, 12), nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()
    report = mha_inspect.check(layer, x, only=names)
    assert [passed.check for passed in report.passed] == ["heads"]
    report = mha_inspect.check(layer, x, skip=names)
    assert "heads" not in [passed.check for passed in report.passed]
    with pytest.raises(SpecError, match=r"Unknown check haeds.*Did you mean heads"):
        mha_inspect.check(layer, x, only="haeds")


@pytest.mark.parametrize(
    ("given", "way"),
    [
        ({"causal": True}, r"forward takes no causal: use intent=mha_inspect\.Intent\(causal=True\)"),
        (
            {"window": 4, "scale": "sqrt_head_dim"},
            r"no window and no scale: .*\(window=4, scale='sqrt_head_dim'\)",
        ),
    ],
)
def test_intent_among_the_arguments_is_answered_with_where_it_goes(given, way) -> None:
    with pytest.raises(TypeError, match=way) as refused:
        mha_inspect.check(
            nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval(), torch.randn(2, 5, 12), **given
        )
    assert len(str(refused.value).splitlines()) == 1


def test_a_stage_goes_by_its_name_and_a_slip_gets_the_nearest() -> None:
    x = torch.randn(2, 5, 12)
    attention = mha_inspect.trace(nn.MultiheadAttention(12, 3, batch_first=True).eval(), x, x, x).attentions[0]
    assert attention.stages["weights"] is attention.weights
    assert attention.stages[0] is attention.query
    with pytest.raises(AttributeError, match=r"has no wieghts\. Its stages: query, .*Did you mean weights\?"):
        _ = attention.wieghts  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="Did you mean weights"):
        _ = attention.stages["wieghts"]
    assert copy.deepcopy(attention) == attention == pickle.loads(pickle.dumps(attention))


def test_the_first_run_of_a_lazy_module_has_the_stages_of_the_second(x: torch.Tensor) -> None:
    module = Lazy()
    first, second = mha_inspect.trace(module, x).attentions[0], mha_inspect.trace(module, x).attentions[0]
    stages = [{stage.name: (stage.formula, stage.axes) for stage in found.stages} for found in (first, second)]
    assert stages[0] == stages[1]
    assert "W_q" in stages[0]["q_proj"][0]
    fresh = Lazy()
    with mha_inspect.recording() as seen:
        fresh(x)
    assert [stage.name for stage in seen.trace.attentions[0].stages] == list(stages[0])
    assert mha_inspect.diff(module, module, x).outcome == "same"
    with pytest.raises(InputError, match=r"'q.weight' is lazy: .* Run the module once"):
        mha_inspect.diff(module, Lazy(), x)


def block(deep: bool = True) -> nn.Module:
    """Attention, and layers around it: some of other names or shapes than in a block of another depth."""
    width = HEADS * HEAD_DIM
    layers = {"norm": nn.LayerNorm(width), "attn": Attention(width, HEADS), "last": nn.Linear(width, width, bias=deep)}
    if deep:
        layers["mlp"] = nn.Linear(width, width)
    nn.init.normal_(layers["norm"].weight)
    return nn.Sequential(OrderedDict(layers))


def test_weights_around_an_attention_are_copied_too_where_name_and_shape_agree(x: torch.Tensor) -> None:
    report = mha_inspect.diff(block(), block(deep=False), x, same_weights=True)
    assert {row.verdict for row in report.stages} == {"same"}  # the queries come from the norm
    assert report.outcome == "differs"
    assert not report.weights.whole
    assert "and 3 other tensors by name and shape" in report.weights.sentence
    assert any("last.bias and 2 more" in line for line in report.weights.left_out)
    assert "norm" not in str(report.weights.left_out)


def test_a_block_beside_an_attention_alone_is_told_how_to_compare_its_attention(x: torch.Tensor) -> None:
    alone = Attention(HEADS * HEAD_DIM, HEADS)
    notes = mha_inspect.diff(alone, block(), x, same_weights=True).notes
    assert [note for note in notes if note.endswith("--right-module attn.")]
    for left, right in ((block(), block(deep=False)), (alone, nn.Sequential(alone))):
        assert "-module" not in str(mha_inspect.diff(left, right, x, same_weights=True).notes)


def test_an_assertion_says_what_it_cannot_take(layer, x):
    with pytest.raises(ValueError, match=r"no stage was given\. .* Did you mean scores\?"):
        assert_stage_shapes(layer, x, x, x, scors="bh q k")
    with pytest.raises(TypeError, match=r"expects a torch\.nn\.Module, got None"):
        assert_same_attention(layer, None, x)


def test_a_trace_that_is_not_judged_says_so_and_has_the_same_stages() -> None:
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 3, 8)
    judged, plain = mha_inspect.trace(layer, x, x, x), mha_inspect.trace(layer, x, x, x, judge=False)
    assert judged.verdict.startswith("nothing wrong in this run")
    assert plain.unjudged == "judging was not requested"
    assert plain.findings == ()
    assert list(plain.attentions[0].stages) == list(judged.attentions[0].stages)
