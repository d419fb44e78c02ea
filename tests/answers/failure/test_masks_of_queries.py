"""A mask with one entry for each query is not cut to the number of keys; a longer mask of both is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect.errors import ForwardError


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (3, 4)).transpose(1, 2) for each in (self.q(x), self.k(context), self.v(context)))
        weights = (q @ k.mT / 2).masked_fill(~mask, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("shape", "keys", "is_cut"),
    [((2, 1, 1, 9), 5, False), ((9, 9), 5, False), ((16, 16), 9, True), ((2, 1, 1, 16), 5, True)],
)
def test_a_mask_of_the_queries_is_not_cut_to_the_keys(shape, keys, is_cut):
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ForwardError) as caught:
        mha_inspect.trace(Attention(), torch.randn(2, 9, 12), torch.randn(2, keys, 12), mask)
    cause = caught.value.trace.failure.cause
    assert cause.name == "mask_size"
    assert ("Cut the mask" in cause.fix) == is_cut
