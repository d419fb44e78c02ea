"""Attention that is written in few people's way comes out right: against float64, worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from . import unusual
from .styles import D, E, H
from .truth import Shown, assert_close, assert_true, attentions
from .unusual import by_hand

B, N = 7, 11
LOOPS = (
    "Loop",
    "NarrowLoop",
    "NarrowHeadsOfOne",
    "BufferOfFeatures",
    "BufferLikeHeads",
)


def find(name: str) -> tuple[unusual.Base, Tensor, list[Shown]]:
    torch.manual_seed(0)
    module, x = getattr(unusual, name)().eval(), torch.randn(B, N, E)
    return module, x, attentions(module, x)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_heads_is_one_attention_wherever_it_puts_them(name: str) -> None:
    module, x, (attention,) = find(name)
    assert_true(attention)
    found, names = attention.found, attention.names
    width = getattr(module, "width", D)
    assert (names.num_heads, names.head_dim, len(found.branches)) == (H, width, H)
    weights, context = by_hand(module, x)
    for branch, own, head in zip(found.branches, weights.unbind(1), context.unbind(1), strict=True):
        assert_close(attention.recording.values[branch.stages["weights"].id].double(), own)
        assert_close(attention.recording.values[branch.stages["context"].id].double(), head)
    assert_close(attention.value("concat").double(), context.transpose(1, 2).flatten(2))
    assert found.stages["output"].shape == (B, N, E)
    features = "heads" if width == 1 else "(heads head_dim)"
    assert [names.of_stage(f"{side}_proj") for side in "qkv"] == [
        f"batch query {features}",
        *[f"batch key {features}"] * 2,
    ]
    assert names.of_stage("concat") in (f"batch query {features}", "batch query (heads head_dim)")


BROADCAST = (
    "Broadcast",
    "BroadcastKeyFirst",
    "BroadcastBeforeHeads",
    "BroadcastCausal",
)


@pytest.mark.parametrize("name", BROADCAST)
def test_products_may_be_multiplications_and_sums(name: str) -> None:
    module, x, (attention,) = find(name)
    assert_true(attention)
    names = attention.names
    assert (names.num_heads, names.head_dim, attention.found.scale) == (H, D, pytest.approx(D**-0.5))
    weights, context = by_hand(module, x, causal=name == "BroadcastCausal")
    assert_close(attention.canonical("weights", "batch heads query key"), weights)
    assert_close(attention.canonical("context", "batch heads query head_dim"), context)
    own = {"BroadcastBeforeHeads": "batch query key heads", "BroadcastKeyFirst": "batch heads key query"}.get(
        name, "batch heads query key"
    )
    assert names.of_stage("scores") == names.of_stage("weights") == own
    assert attention.found.stages["q_heads"].shape == attention.found.stages["v_heads"].shape
    assert len(attention.found.stages["q_heads"].shape) == 4


def test_windows_that_are_multiplied_have_queries_with_keys_of_their_own() -> None:
    (attention,) = find("BroadcastWindows")[2]
    assert attention.names.of_stage("scores") == attention.names.of_stage("weights") == "batch heads query key"
    assert attention.found.stages["scores"].shape == (B, H, N, 5)
    assert attention.names.of_stage("k_heads") == "batch heads query head_dim key"
    assert attention.names.of_stage("context") == "batch heads query head_dim"


@pytest.mark.parametrize("name", ["Late", "LateCausal"])
def test_weights_that_are_never_formed_are_no_stage(name: str) -> None:
    module, x, (attention,) = find(name)
    assert_true(attention)
    stages, names = attention.found.stages, attention.names
    assert {"q_heads", "k_heads", "v_heads", "scores", "context", "concat", "output"} <= set(stages)
    assert "weights" not in stages
    assert (names.num_heads, names.head_dim, attention.found.scale) == (H, D, pytest.approx(D**-0.5))
    weights, context = by_hand(module, x, causal=name == "LateCausal")
    last = "masked_scores" if name == "LateCausal" else "scores"
    assert_close(attention.canonical(last, "batch heads query key").softmax(-1), weights)
    assert_close(attention.canonical("context", "batch heads query head_dim"), context)
    (shown,) = mha_inspect.trace(module, x).attentions
    formula = next(stage.formula for stage in shown.stages if stage.name == "context")
    assert formula == f"exp({last}) · v_heads / Σ exp({last})"
    assert [note for note in shown.notes if note.startswith("The weights are never formed")]
    assert shown.kind == (("self", "causal") if name == "LateCausal" else ("self",))


class ExponentialFeatures(unusual.Base):
    """Linear attention: queries and keys are exponentials one by one, and nothing is a softmax."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = q.exp(), k.exp()
        return (q @ (k.mT @ v)) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)


class OtherExponentials(unusual.Base):
    """What is divided is no average: the values meet the scores themselves."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return (scores @ v) / scores.exp().sum(-1, keepdim=True)


@pytest.mark.parametrize("style", [ExponentialFeatures, OtherExponentials])
def test_a_division_by_exponentials_is_not_always_a_softmax(style: type[unusual.Base]) -> None:
    assert attentions(style(), torch.randn(B, N, E)) == []


TALKING = sorted(name for name in vars(unusual) if name.startswith("Talking"))


@pytest.mark.parametrize("name", TALKING)
def test_talking_heads(name: str) -> None:
    module, x, (attention,) = find(name)
    assert isinstance(module, unusual.Talking)
    found, names = attention.found, attention.names
    assert_true(attention, dropped=True)
    weights, context = by_hand(module, x, causal=module.causal)
    assert_close(attention.canonical("weights", "batch heads query key"), weights)
    assert_close(attention.canonical("context", "batch heads query head_dim"), context)
    assert (names.num_heads, names.head_dim, found.scale) == (H, D, pytest.approx(D**-0.5))
    assert names.of_stage("scores") == names.of_stage("weights") == "batch heads query key"
    assert names.of_stage("concat") == "batch query (heads head_dim)"
    assert found.stages["scores"].shape == (B, H, N, N)
    assert len(found.mixed_scores) == (name != "TalkingAfter")
    assert len(found.mixed_weights) == (name != "TalkingBefore")
    (shown,) = mha_inspect.trace(module, x).attentions
    assert [note for note in shown.notes if "(talking heads)" in note]
    assert ("causal" in shown.kind) == module.causal
    formulas = {stage.name: stage.formula for stage in shown.stages}
    mixed = "weights" if name == "TalkingBefore" else "mix(weights)"
    assert formulas["context"] == f"{mixed} · v_heads"
    assert ("masked_scores" in formulas) == (name != "TalkingAfter")


def test_weights_are_dropped_before_they_are_mixed() -> None:
    torch.manual_seed(0)
    (shown,) = mha_inspect.trace(unusual.TalkingAfter().train(), torch.randn(B, N, E)).attentions
    assert "Weights are shown as softmax gives them, before dropout." in shown.notes


ALIKE = [
    *(
        (name, "Loop")
        for name in ("NarrowLoop", "BufferOfFeatures", "BufferLikeHeads", "Broadcast", "BroadcastKeyFirst")
    ),
    *(("Loop", "Late"), ("Talking", "TalkingEinsum")),
    ("OneQueryAtATime", "OneQueryAtATime"),
]


@pytest.mark.parametrize(("left", "right"), ALIKE)
def test_stages_are_compared_whatever_way_they_are_written(left: str, right: str) -> None:
    module, x, _ = find(left)
    report = mha_inspect.diff(module, getattr(unusual, right)().eval(), x, same_weights=True)
    assert report.outcome == "same"
    missing = {"weights"} if (left, right) == ("Loop", "Late") else set()
    assert {stage.name for stage in report.stages if stage.verdict != "same"} == missing
    assert {"q_proj", "k_heads", "scores", "context", "concat"} <= {stage.name for stage in report.stages}


class AttendThenPool(nn.Module):
    """A softmax over the positions of what a matrix makes of an attention's result: the matrix mixes no heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.score = unusual.Broadcast(), nn.Linear(E, 1)

    def forward(self, x: Tensor) -> Tensor:
        for y in (self.attend(x), x + self.attend(x), self.attend.attend(x[:, None], x[:, None], x[:, None])[:, 0]):
            pooled = self.score(y).softmax(1).mT @ y
        return pooled


def test_pooling_over_positions_is_no_attention_with_talking_heads() -> None:
    found = attentions(AttendThenPool(), torch.randn(B, N, E))
    assert [len(attention.found.mixed_scores) for attention in found] == [0, 0, 0]
    assert all(attention.found.stages["scores"].shape[-2:] == (N, N) for attention in found)


def test_a_loop_over_queries_is_an_attention_for_each_query() -> None:
    module, x, found = find("OneQueryAtATime")
    weights, context = by_hand(module, x, causal=True)
    assert len(found) == N
    for t, attention in enumerate(found):
        assert (attention.names.num_heads, attention.names.head_dim) == (H, D)
        assert not attention.found.branches
        assert attention.names.of_stage("scores") == "batch heads query key"
        assert_close(attention.value("weights").double(), weights[:, :, t : t + 1, : t + 1])
        assert_close(attention.value("context").double(), context[:, :, t : t + 1])


class OneGain(unusual.Base):
    """A single number, without a dimension, scales what the heads give."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().attend(q, k, v) * self.gain


def test_a_number_without_a_dimension_belongs_to_no_head() -> None:
    module, x = OneGain().eval(), torch.randn(B, N, E)
    told = {own.name: own for own in mha_inspect.params(module, x, per_head=True).parameters}
    assert "W_" not in told["gain"].role
    assert not told["gain"].heads
    assert [(piece.part, piece.head) for piece in told["o.weight"].heads or ()] == [("W_o", head) for head in range(H)]


class TwoValues(unusual.Base):
    """The same queries and keys, cut from their slots and repeated anew, for two values that lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(2 * H * D, E)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots, contexts = nn.functional.pad(k[:, :1], (0, 0, 0, 2)), []
        for value in (v, v[:, :1].expand_as(v)):
            keys = slots[:, :, : k.shape[2]].expand_as(k).clone()
            contexts.append(nn.functional.scaled_dot_product_attention(q, keys, value))
        return torch.cat(contexts, -1)


def test_two_kernels_with_the_same_scores_are_no_loop_over_heads() -> None:
    found = attentions(TwoValues(), torch.randn(B, N, E))
    assert [(attention.names.num_heads, attention.found.branches) for attention in found] == [(H, ())] * 2
