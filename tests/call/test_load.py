"""A layer of the catalog and a target are one kind of thing: made, run and told alike."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.call.inputs import Asked
from mha_inspect.call.load import call_target, load_layer, subject_of
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.making.target import Target
from mha_inspect.running.subject import Subject

from ..built import trace


class Drawing(nn.Module):
    """Draws from every generator in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(()) + random.random() + np.random.rand()


def test_every_run_of_a_seeded_subject_draws_the_same_and_leaves_the_generators() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    subject = Subject(Drawing(), (torch.zeros(3),), {}, seed=11)
    first = subject.plain()
    assert torch.equal(first, subject.plain())
    assert torch.equal(first, subject.recorded().returned)
    assert not torch.equal(first, replace(subject, seed=12).plain())
    assert torch.equal(before[0], torch.get_rng_state())
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    assert torch.equal(first, Drawing()(torch.zeros(3)))


@pytest.mark.parametrize("grad", [False, True])
def test_gradients_are_as_asked_and_put_back(grad: bool) -> None:
    subject = load_layer(AttentionSpec(embed_dim=6, num_heads=3), InputSpec(), RunSpec(grad=grad))
    with torch.set_grad_enabled(not grad):
        assert subject.plain()[0].requires_grad is grad
        assert torch.is_grad_enabled() is not grad


def test_a_target_says_what_it_was_made_with_and_called_with() -> None:
    target = Target(nn.Linear(6, 2), "torch.nn:Linear", {"in_features": 6}, notes=("Linear was built so.",))
    subject = subject_of(target, call_target(target, Asked(InputSpec(batch=2, seq_len=3))), seed=5)
    report = trace(subject)
    assert (report.layer.name, report.layer.spec, report.environment.seed) == ("Linear", {"in_features": 6}, 5)
    assert report.notes[0] == "Linear was built so."
    assert "input float32 [2, 3, 6]" in report.notes[1]


def test_a_page_says_which_numbers_are_random(invoke, tmp_path):
    """Of a built-in layer. The weights of a user's module may be trained."""
    file = tmp_path / "x.pt"
    torch.save(torch.zeros(2, 5, 16), file)
    for line, said in (((), "random weights and inputs, seed 0"), (("--input", str(file)), "random weights, seed 0")):
        assert said in invoke("trace", "--embed-dim", "16", *line).out
    assert "random" not in str(mha_inspect.trace(torch.nn.MultiheadAttention(16, 2), *[torch.zeros(2, 5, 16)] * 3))
