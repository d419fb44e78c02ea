"""A mask says the same whether it is added by hand or given to a fused kernel: a weight of zero is not seen."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

LENGTH, HEADS, HEAD_DIM = 11, 3, 4
WIDTH = HEADS * HEAD_DIM


class ByKernel(nn.Module):
    def __init__(self, number: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), number).triu(1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    def forward(self, x: Tensor) -> Tensor:
        sides = (side(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in (self.q, self.k, self.v))
        return self.attend(*sides).transpose(1, 2).flatten(2)


class ByHand(ByKernel):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(HEAD_DIM) + self.mask).softmax(-1) @ v


class ByLayer(ByKernel):
    def __init__(self, number: float) -> None:
        super().__init__(number)
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, attn_mask=self.mask, need_weights=False)[0]


@pytest.mark.parametrize(
    ("kind", "number", "causal"),
    [(ByLayer, -1e9, True), (ByKernel, -200.0, True), (ByHand, -200.0, True), (ByKernel, -50.0, False)],
)
def test_a_mask_hides_what_gets_no_weight(kind: type[ByKernel], number: float, causal: bool) -> None:
    torch.manual_seed(0)
    module, x = kind(number).eval(), torch.randn(2, LENGTH, WIDTH)
    weights = (torch.randn(LENGTH, LENGTH) + module.mask).softmax(-1)
    assert bool((weights.triu(1) == 0).all()) == causal
    (attention,) = mha_inspect.trace(module, x).attentions
    assert ("causal" in attention.kind) == causal


def test_scores_that_outweigh_a_mask_are_seen() -> None:
    """With scores as large as the mask, no weight of a masked key need be zero."""
    torch.manual_seed(0)
    kernel, by_hand = ByKernel(-100.0).eval(), ByHand(-100.0).eval()
    by_hand.load_state_dict(kernel.state_dict())
    for module in (kernel, by_hand):
        module.q.weight.data *= 30
    x = torch.randn(2, LENGTH, WIDTH)
    kinds = [mha_inspect.trace(module, x).attentions[0].kind for module in (kernel, by_hand)]
    assert kinds == [("self",), ("self",)]
