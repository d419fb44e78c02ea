"""What scores, weighs and averages, and is no attention: no queries are compared with keys."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mha_inspect

from .near import NEAR, B, N, PoolAtABentTime, PoolAtATime
from .styles import E


@pytest.mark.parametrize("module", NEAR)
def test_no_attention_is_claimed(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    made, x = module().eval(), torch.randn(B, N, E)
    assert not mha_inspect.trace(made, x).attentions
    assert not [own.name for own in mha_inspect.params(made, x).parameters if "W_" in own.role]


class Retrieval(nn.Module):
    """A modern Hopfield network: the state of each step asks the same patterns, which are keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.patterns = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, patterns = self.state(x), self.patterns(x)
        for _ in range(3):
            state = (state @ patterns.mT / E**0.5).softmax(-1) @ patterns
        return state


def test_queries_that_are_averages_of_the_values_are_queries_where_the_first_are_given() -> None:
    assert len(mha_inspect.trace(Retrieval().eval(), torch.randn(B, N, E)).attentions) == 3


def test_a_bend_makes_the_difference() -> None:
    """With it the weights hang on what is added, and without it they do not: in float64."""
    torch.manual_seed(0)
    for module, hangs in ((PoolAtATime().eval(), False), (PoolAtABentTime().eval(), True)):
        x = torch.randn(B, N, E)
        assert bool(mha_inspect.trace(module, x).attentions) == hangs
        module.double()
        before = module.score(module.hidden(x.double())).softmax(1)
        with torch.no_grad():
            module.b.bias += 1
        apart = (module.score(module.hidden(x.double())).softmax(1) - before).abs().max()
        assert (float(apart) > 1e-6) == hangs
