"""Operations in forms that few forwards have: each is recorded, and its dimensions are followed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import mha_inspect

X, WEIGHTS = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(0, 1, 3)

RARE: dict[str, Callable[[], Tensor]] = {
    "a sum over all dimensions": lambda: X / X.exp().sum(dim=None),
    "a mean without NaN": lambda: X.nanmean(),
    "a masked variance": lambda: torch.masked.var(X, dim=None, unbiased=True),
    "a softmax over all": lambda: X.exp() / X.exp().sum(),
    "a logarithm of sums over two dimensions": lambda: (X - X.logsumexp((0, 1), keepdim=True)).exp(),
    "a gather of a scalar": lambda: torch.tensor(2.0).gather(0, torch.tensor([0])),
    "a gather by a scalar": lambda: WEIGHTS.gather(0, torch.tensor(1)),
    "a write by a scalar index": lambda: X.clone().index_put_((torch.tensor(1),), torch.ones(4)),
    "a write by two indices": lambda: X.clone().index_put_((torch.tensor([0, 1]), torch.tensor([1, 2])), torch.ones(2)),
    "a write where a mask is true": lambda: X.clone().index_put_((X > 0,), torch.tensor(1.0)),
    "a copy into a scalar": lambda: torch.tensor(1.0).index_copy_(0, torch.tensor([0]), torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", RARE)
def test_a_rare_operation_is_recorded_and_followed(name: str) -> None:
    with mha_inspect.recording() as recorded:
        result = RARE[name]()
    assert torch.equal(result, RARE[name]())
    assert recorded.trace.attentions == ()


def test_a_function_named_forward_may_delete_its_argument() -> None:
    def forward(x: Tensor) -> Tensor:
        doubled = x * 2
        del x
        return doubled + 1

    with mha_inspect.recording() as recorded:
        result = forward(X)
    assert torch.equal(result, X * 2 + 1)
    assert recorded.trace.attentions == ()
