from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.layers.catalog import find_layer
from mha_inspect.layers.spec import AttentionSpec
from mha_inspect.testing import (
    assert_attention_is_right,
    assert_same_attention,
    assert_stage_shapes,
    assert_stages_match,
)

from .layers.declared import canonical_weights, load_weights

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 7, 3, 5
SPEC = AttentionSpec(embed_dim=HEADS * HEAD_DIM, num_heads=HEADS)


def layer(name: str) -> nn.Module:
    module = find_layer(name).build(SPEC)
    load_weights(module, canonical_weights(SPEC))
    return module


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1))


def test_shapes_that_hold(x):
    assert_stage_shapes(layer("torch"), x, x, x, scores="bh q q", weights="6 7 _", context="bh q d", output="b q e")


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ({"scores": "bh q 5"}, "scores: expected 5 (bh q 5), got 7: [6, 7, 7]"),
        ({"scores": "b h q k"}, "scores: expected 4 dimensions (b h q k), got 3: [6, 7, 7]"),
        ({"scores": "a q k", "context": "a d q"}, "context: expected q = 7 as in scores (a d q), got 5: [6, 7, 5]"),
        ({"masked_scores": "bh q k"}, "the attention has no masked_scores. Its stages: query"),
    ],
)
def test_shapes_that_do_not(x, patterns, said):
    with pytest.raises(AssertionError, match="scores") as raised:
        assert_stage_shapes(layer("torch"), x, x, x, **patterns)
    assert said in str(raised.value)
    assert "context [6, 7, 5]" in str(raised.value)


@pytest.mark.parametrize("other", ["per-head"])
def test_the_same_attention_written_otherwise(x, other):
    left, right = layer("torch"), layer(other)
    ours, theirs = left(x, x, x)[0], find_and_call(right, x)
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert_same_attention(Self(left), Self(right), x)


class Self(nn.Sequential):
    """Query, key and value are one tensor: the three signatures become one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return find_and_call(self[0], x)


def find_and_call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = module(x, x, x)
    return output[0] if isinstance(output, tuple) else output


def test_another_weight_is_found_where_it_stands(x):
    left, right = layer("torch"), layer("torch")
    with torch.no_grad():
        right.in_proj_weight[2 * SPEC.embed_dim] += 0.01  # the first row of W_v
    with pytest.raises(AssertionError) as raised:
        assert_same_attention(left, right, x, x, x)
    text = str(raised.value)
    assert text.splitlines()[0] == "attention 1 differs, starting at v_proj"
    verdicts = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line}
    assert (verdicts["v_proj"], verdicts["v_heads"]) == ("differs", "differs")
    (same,) = [line for line in text.splitlines() if line.startswith("the same")]
    assert "weights" in same


class MergedWithoutTranspose(nn.Sequential):
    """Heads are merged by a reshape alone, a mistake that no shape shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self[0](x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for part in parts)
        return self[1](((q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v).reshape(x.shape))


def failing(x):
    left, right = Self(layer("torch")), Self(layer("torch"))
    with torch.no_grad():
        right[0].in_proj_weight[0] += 1
    merged = MergedWithoutTranspose(nn.Linear(15, 45), nn.Linear(15, 15))
    yield "scores: expected 5", lambda: assert_stage_shapes(left, x, scores="bh q 5")
    yield "attention 1 0 differs, starting at q_proj", lambda: assert_same_attention(left, right, x)
    yield "1 attention on the left", lambda: assert_same_attention(left, nn.Sequential(left, right), x)
    yield "1 problem: ", lambda: assert_attention_is_right(merged, x)


def test_a_failure_begins_with_the_finding_and_ends_in_the_line_of_the_test(x):
    for first, fails in failing(x):
        with pytest.raises(AssertionError) as raised:
            fails()
        assert str(raised.value).startswith(first)
        last = raised.traceback.filter(raised)[-1]
        assert last.path == Path(__file__), first


def test_a_call_without_a_pattern_and_a_module_without_attention(x):
    with pytest.raises(ValueError, match="no stage was given"):
        assert_stage_shapes(layer("torch"), x, x, x)
    with pytest.raises(AssertionError, match="Linear has no softmax attention"):
        assert_stage_shapes(nn.Linear(15, 15), x, scores="b q k")


def test_stages_are_those_of_a_snapshot(x):
    trace = mha_inspect.trace(layer("torch"), x, x, x)
    lines = [f"1 {stage.name} {list(stage.shape)} {stage.axes}" for stage in trace.attentions[0].stages]
    assert "1 scores [6, 7, 7] (batch heads) query key" in lines
    assert_stages_match(trace, "\n".join(lines))
    with pytest.raises(AssertionError):
        assert_stages_match(trace, "\n".join(lines[:-1]))


def test_strict_fails_for_a_check_that_was_not_run(x):
    module = layer("torch")
    assert_attention_is_right(module, x, x, x)
    with pytest.raises(AssertionError, match="not run"):
        assert_attention_is_right(module, x, x, x, strict=True)


class NotTransposed(nn.Module):
    """Queries have heads before positions, keys after them."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM) for _ in range(2))

    def forward(self, x):
        q = self.q(x).view(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k(x).view(BATCH, LENGTH, HEADS, HEAD_DIM)
        return (q @ k.transpose(-2, -1)).softmax(-1)


def test_an_error_gets_its_cause_as_a_note(x):
    module = NotTransposed()
    with pytest.raises(RuntimeError) as caught, mha_inspect.explain():
        module(x)
    (note,) = caught.value.__notes__
    assert note.startswith("mha-inspect: k was split but not transposed")
    with pytest.raises(RuntimeError) as caught, mha_inspect.recording():
        module(x)
    (note,) = caught.value.__notes__
    assert "k [2, 7, 3, 5] is batch sequence heads head_dim." in note
    with mha_inspect.explain():
        x @ x.transpose(1, 2)
    with pytest.raises(KeyError) as other, mha_inspect.explain():
        {}["absent"]
    assert not hasattr(other.value, "__notes__")


def test_a_report_shows_ten_lines_at_most_and_prints_all(x):
    trace = mha_inspect.trace(layer("torch"), x, x, x)
    assert len(repr(trace).splitlines()) == 10
    assert repr(trace).splitlines()[0] == str(trace).splitlines()[0] == trace.verdict
    assert len(repr(list(trace.attentions)).splitlines()) == 1
    assert len(str(trace).splitlines()) > 20
