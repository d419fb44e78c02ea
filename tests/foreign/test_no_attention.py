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
