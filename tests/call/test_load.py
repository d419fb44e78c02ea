"""A layer of the catalog and a target are one kind of thing: made, run and told alike."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.trace import trace
from mha_inspect.build.target import Target
from mha_inspect.call.inputs import Asked
from mha_inspect.call.load import call_target, load_layer, subject_of
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.naming.subject import Subject


class Drawing(nn.Module):
    """Draws from every generator in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(()) + random.random() + np.random.rand()


def test_every_run_of_a_seeded_subject_draws_the_same_and_leaves_the_generators() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    own = Subject(Drawing(), (torch.zeros(3),), {}, seed=11)
    first = own.plain()
    assert torch.equal(first, own.plain())
    assert torch.equal(first, own.recorded().returned)
    assert not torch.equal(first, replace(own, seed=12).plain())
    assert torch.equal(before[0], torch.get_rng_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    assert torch.equal(first, Drawing()(torch.zeros(3)))


@pytest.mark.parametrize("grad", [False, True])
def test_gradients_are_as_asked_and_put_back(grad: bool) -> None:
    own = load_layer(AttentionSpec(embed_dim=6, num_heads=3), InputSpec(), RunSpec(grad=grad))
    with torch.set_grad_enabled(not grad):
        assert own.plain()[0].requires_grad is grad
        assert torch.is_grad_enabled() is not grad


class Attend(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor, barred: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT / 2).masked_fill(barred, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Two(nn.Module):
    """Two attentions after another; the second's mask is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(3), Attend(2)

    def forward(self, x: Tensor, barred: Tensor, other: Tensor) -> Tensor:
        return self.second(self.first(x, barred), other)


def nan_rows(output: Tensor) -> list[tuple[int, int]]:
    return [(row, query) for row, query in output.isnan().any(-1).nonzero().tolist()]


def test_queries_without_a_key_are_found_in_any_module() -> None:
    x, barred = torch.randn(2, 5, 12), torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    barred[1, 0, 3] = True
    barred[0, 0, 2, :4] = True  # one key is left
    module = Attend(3).eval()
    rows = trace(Subject(module, (x, barred), {})).masked_rows
    assert [(row.batch, row.query) for row in rows] == nan_rows(module(x, barred)) == [(1, 3)]
    assert [(row.stage, row.opened, row.plain) for row in rows] == [("weights", "nan", "nan")]
    assert trace(Subject(module, (x, torch.zeros_like(barred)), {})).masked_rows == ()


def test_left_padding_under_a_causal_mask_leaves_queries_without_a_key() -> None:
    """Neither mask alone does."""
    layer, x = nn.MultiheadAttention(12, 3, batch_first=True), torch.randn(2, 5, 12)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.tensor([[True, True, False, False, False], [False] * 5])
    given = {"attn_mask": causal, "key_padding_mask": padding}
    rows = trace(Subject(layer, (x, x, x), given)).masked_rows
    assert [(row.batch, row.query) for row in rows] == nan_rows(layer(x, x, x, **given)[0]) == [(0, 0), (0, 1)]


def test_each_row_is_told_once_by_the_first_attention_that_has_it() -> None:
    x, none = torch.randn(2, 5, 12), torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    other = none.clone()
    other[0, 0, 4] = True
    rows = trace(Subject(Two().eval(), (x, none, other), {})).masked_rows
    assert [(row.batch, row.query, row.plain) for row in rows] == [(0, 4, "nan")]
    both = trace(Subject(Two().eval(), (x, other, other), {})).masked_rows
    # In the second, scores are NaN already.
    assert [(row.batch, row.query, row.stage) for row in both] == [(0, 4, "weights")]


class TwoMasks(Attend):
    """Masks its scores twice."""

    def forward(self, x: Tensor, barred: Tensor, other: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT / 2).masked_fill(barred, float("-inf"))
        scores = scores + torch.zeros_like(scores).masked_fill(other, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_masks_that_are_put_on_one_after_another_bar_together() -> None:
    x, early = torch.randn(2, 5, 12), torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    late = early.clone()
    early[1, 0, 2, :3], late[1, 0, 2, 3:] = True, True
    module = TwoMasks(3).eval()
    rows = trace(Subject(module, (x, early, late), {})).masked_rows
    assert [(row.batch, row.query) for row in rows] == nan_rows(module(x, early, late)) == [(1, 2)]


def test_a_target_says_what_it_was_made_with_and_called_with() -> None:
    target = Target(nn.Linear(6, 2), "torch.nn:Linear", {"in_features": 6}, notes=("Linear was built so.",))
    own = subject_of(target, call_target(target, Asked(InputSpec(batch=2, seq_len=3))), seed=5)
    report = trace(own)
    assert (report.layer.name, report.layer.spec, report.environment.seed) == ("Linear", {"in_features": 6}, 5)
    assert report.notes[0] == "Linear was built so."
    assert "input float32 [2, 3, 6]" in report.notes[1]
