"""compare_heads of a class: training and focus, each against the same done by hand."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch

import mha_inspect
from mha_inspect.compare.comparable_run import ComparableRun
from mha_inspect.errors import InputError, RecordingError, SpecError

from .head_counts import BATCH, CAUSAL, DIM, LENGTH, Attention, BestKeys, CausalOfMany, Noisy, Stack, Writing


@pytest.fixture
def x():
    return torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(1))


def made(heads, **settings):
    """The module that compare_heads builds first of a seed: its numbers are carried into the others."""
    torch.manual_seed(0)
    module = Attention(n_head=1, **settings)
    module.heads = heads
    return module


def compared(heads, x, *, asked=None, **settings):
    torch.manual_seed(0)
    return mha_inspect.compare_heads(heads, functools.partial(Attention, **settings), x, **(asked or {}))


def target_of(output):
    """The target that the loss speaks of, drawn for seed 0."""
    generator = torch.Generator("cpu").manual_seed(0x746172676574)
    return torch.randn(output.shape, generator=generator)


def loss_of(module, x):
    output = module(x)
    return (output - target_of(output)).square().mean()


def test_the_first_step_is_the_gradient_of_autograd(x):
    report = compared((1, 3, 5), x, asked={"steps": 1})
    base, modules = made(1), [made(heads) for heads in (3, 5)]
    loss_of(base, x).backward()
    for row, module in zip(report.training.counts[1:], modules, strict=True):
        loss = loss_of(module, x)
        loss.backward()
        assert row.first_loss == pytest.approx(loss.item())
        assert [part.part for part in row.parts] == ["W_q", "W_k", "W_v", "W_o", "b_q", "b_k", "b_v", "b_o"]
        for part in row.parts:
            kind, letter = part.part.split("_")
            name = f"{letter}.{'weight' if kind == 'W' else 'bias'}"
            mine, theirs = (side.get_parameter(name).grad for side in (module, base))
            assert part.moved == pytest.approx(0.1 * mine.norm().item(), rel=1e-3, abs=1e-7)
            # A bias of the keys adds the same number to every score of a query.
            assert part.verdict == ("same" if part.part == "b_k" else "differs")
            if part.verdict == "differs":
                relative = ((mine - theirs).norm() / theirs.norm()).item()
                assert part.relative_difference == pytest.approx(relative, rel=1e-3)
    assert report.training.answer.startswith("The first step gives different weights")


def test_training_is_the_steps_done_by_hand(x):
    report = compared((2, 5), x, asked={"steps": 3})
    ends = []
    for heads in (2, 5):
        module = made(heads)
        before = copy.deepcopy(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(module, x).backward()
            optimizer.step()
        ends.append((before, module))

    def distance(left, right):
        pairs = zip(left.parameters(), right.parameters(), strict=True)
        return math.sqrt(sum(float((a - b).detach().double().square().sum()) for a, b in pairs))

    base, second = report.training.counts
    assert base.moved == pytest.approx(distance(*ends[0]), rel=1e-4)
    assert second.apart == pytest.approx(distance(ends[0][1], ends[1][1]) / distance(*ends[0]), rel=1e-4)
    assert second.last_loss == pytest.approx(loss_of(ends[1][1], x).item())
    assert (second.verdict, report.training.steps) == ("differs", 3)


def test_focus_is_that_of_the_weights(x):
    report = compared((1, 3), x, asked={"focus": True}, mask=CAUSAL)
    with torch.no_grad():
        weights = made(3, mask=CAUSAL).weights(x).double()
    entropy = torch.special.entr(weights).sum(-1)
    away = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    single, three = report.focus.counts
    assert [len(single.by_head), len(three.by_head), three.attention] == [1, 3, None]
    assert [h.effective_keys for h in three.by_head] == pytest.approx(entropy.exp().mean((0, 2)).tolist(), rel=1e-5)
    shares, keys = weights.mean((0, 2)).max(-1)
    assert [h.most_attended_key for h in three.by_head] == keys.tolist()
    assert [h.share for h in three.by_head] == pytest.approx(shares.tolist(), rel=1e-5)
    assert [h.distance for h in three.by_head] == pytest.approx(
        (weights * away).sum(-1).mean((0, 2)).tolist(), rel=1e-5
    )


def test_a_frozen_parameter_does_not_move(x):
    report = compared((1, 3), x, asked={"steps": 1}, frozen=True)
    unmoved = [part.part for part in report.training.counts[1].parts if part.moved == 0]
    # The gradient of k.bias is zero but for rounding: it adds the same to all scores of a query.
    assert {"q.weight", "q.bias"} <= {*unmoved} <= {"q.weight", "q.bias", "k.bias"}
    assert report.training.counts[1].verdict == "differs"


def test_nothing_is_left_changed(x):
    modules = {heads: Attention(n_head=heads) for heads in (1, 3)}
    before, state = copy.deepcopy(modules), torch.get_rng_state()
    mha_inspect.compare_heads((1, 3), modules.__getitem__, x, steps=2)
    for heads, module in modules.items():
        assert all(map(torch.equal, before[heads].state_dict().values(), module.state_dict().values()))
        assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_a_query_without_a_key(x):
    mask = CAUSAL.clone()
    mask[2] = True
    report = compared((1, 3), x, mask=mask)
    assert any("3 queries have every key masked out" in said and "NaN" in said for said in report.answer)
    with pytest.raises(InputError, match="would be NaN: 90 of 630 numbers of the output of Attention are NaN"):
        compared((1, 3), x, asked={"steps": 1}, mask=mask)


def test_weights_without_names_have_no_focus(x, monkeypatch):
    monkeypatch.setattr(ComparableRun, "content", lambda run, place, stage: None)
    with pytest.raises(RecordingError, match="--focus: an axis of the weights of Attention could not be named"):
        compared((1, 3), x, asked={"focus": True})


def test_bad_calls(x):
    for make, said in (
        (Attention(DIM), "is a module with a fixed number of heads"),
        (lambda a, b: None, r"takes no number of heads \(its arguments: a, b\)"),
        (lambda heads: heads, "returned an int for 1 heads"),
    ):
        with pytest.raises(SpecError, match=said):
            mha_inspect.compare_heads((1, 3), make, x)
    with pytest.raises(SpecError, match="two or more"):
        mha_inspect.compare_heads((1, 1), Attention, x)
    with pytest.raises(TypeError, match="by name"):
        mha_inspect.compare_heads((1, 3), "torch", x)


def test_what_a_run_writes_into_its_input_no_other_gets(x):
    before = x.clone()
    torch.manual_seed(0)
    report = mha_inspect.compare_heads((1, 2, 5), lambda heads: Writing(DIM, heads).eval(), x, focus=True)
    torch.manual_seed(0)
    plain = mha_inspect.compare_heads((1, 2, 5), lambda heads: Attention(DIM, heads).eval(), x, focus=True)
    assert report.counts == plain.counts
    assert report.focus == plain.focus
    assert torch.equal(x, before)


def test_what_is_written_over_has_no_gradient(x):
    with pytest.raises(InputError, match=r"There is no gradient of Writing: .*modified by an inplace operation"):
        mha_inspect.compare_heads((1, 2), lambda heads: Writing(DIM, heads).eval(), x, steps=1)


def test_a_forward_that_draws_is_not_compared(x):
    with pytest.raises(SpecError, match="Noisy draws random numbers in its forward"):
        mha_inspect.compare_heads((1, 2), lambda heads: Noisy(DIM, heads).eval(), x)


def test_a_mask_of_one_head_count_alone_is_told_beside_the_split(x):
    def said(kind):
        return [line for line in mha_inspect.compare_heads((1, 2, 5), kind, x).answer if "Beside the split" in line]

    (sentence,) = said(CausalOfMany)
    assert sentence.endswith("query 0 sees keys 0–6 with 1 head and key 0 with 5 heads.")
    assert not said(Attention)
    assert not said(BestKeys)


def test_focus_tells_several_attentions_apart(x):
    report = mha_inspect.compare_heads((1, 3), lambda heads: Stack(heads, CAUSAL), x, focus=True)
    places = [(count.num_heads, count.attention, count.module) for count in report.focus.counts]
    assert places == [(1, 1, "blocks.0"), (1, 2, "blocks.1"), (3, 1, "blocks.0"), (3, 2, "blocks.1")]
    assert "With 3 heads in each of 2 attentions" in report.focus.answer
    assert "2 blocks.1" in str(report)


def test_outputs_that_are_infinite_elsewhere_are_not_told_by_how_much(x):
    class Overflows(Attention):
        def forward(self, x):
            return super().forward(x) / 0  # inf or -inf, by the sign of what the heads give

    report = mha_inspect.compare_heads((1, 3), lambda heads: Overflows(n_head=heads), x)
    assert report.outcome == "differs"
    assert report.answer[0].endswith("the outputs of 1 and 3 heads have NaN or inf in different places.")


class OneKeyHead(torch.nn.Module):
    """Heads of a fixed size share one key and value head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.q = torch.nn.Linear(DIM, 4 * num_heads)
        self.kv = torch.nn.Linear(DIM, 8)

    def forward(self, x):
        queries = self.q(x).unflatten(-1, (self.heads, 4)).transpose(1, 2)
        keys, values = self.kv(x)[:, None].chunk(2, -1)
        return ((queries @ keys.mT / 2).softmax(-1) @ values).sum(1)


def test_no_weight_is_said_to_become_what_it_is(x):
    changes = " ".join(str(mha_inspect.compare_heads((1, 2), OneKeyHead, x)).split())
    assert "W_q [4, " in changes
    assert f"[4, {DIM}] becomes [4, {DIM}]" not in changes
