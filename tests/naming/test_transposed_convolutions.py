"""The weight of a transposed convolution is `in out *kernel`: W_q has its heads in the second dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mha_inspect

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 6, 3, 8
EMBED = HEADS * HEAD_DIM


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.ConvTranspose1d(EMBED, 3 * EMBED, 1), nn.ConvTranspose1d(EMBED, EMBED, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(1, (HEADS, HEAD_DIM)).mT for side in self.qkv(x).chunk(3, 1))
        weights = (q @ k.mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((weights @ v).mT.flatten(1, 2))


def test_heads_are_in_the_second_dimension() -> None:
    torch.manual_seed(0)
    module, x = Transposed().eval(), torch.randn(BATCH, EMBED, LENGTH)
    report = mha_inspect.params(module, x, per_head=True)
    rows = {row.name: row for row in report.parameters}
    assert rows["qkv.weight"].axes == "embed (qkv heads head_dim) 1"
    assert rows["qkv.weight"].role == "W_q, W_k, W_v side by side: columns 0–23, 24–47, 48–71"
    assert rows["o.weight"].axes == "(heads head_dim) embed 1"
    assert [(piece.part, piece.head, piece.columns) for piece in rows["qkv.weight"].heads or ()] == [
        (f"W_{letter}", head, (EMBED * side + HEAD_DIM * head, EMBED * side + HEAD_DIM * (head + 1)))
        for side, letter in enumerate("qkv")
        for head in range(HEADS)
    ]
