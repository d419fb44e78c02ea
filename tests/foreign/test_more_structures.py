"""Attentions behind one another, and keys of no position, at sizes where one may be taken for the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect


class Reduced(nn.Module):
    """Fewer keys than queries, by a convolution before W_k and W_v (SegFormer, CvT) or as W_k and W_v (PVT)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.q, self.o = kind, nn.Linear(12, 12), nn.Linear(12, 12)
        self.few = nn.Conv2d(12, 24 if kind == "as" else 12, 2, 2, groups=12 if kind == "by channel" else 1)
        self.norm, self.kv = nn.LayerNorm(12), nn.Linear(12, 24)

    def forward(self, x: Tensor) -> Tensor:
        few = self.few(x.mT.unflatten(2, (4, 6))).flatten(2).mT
        k, v = (few if self.kind == "as" else self.kv(self.norm(few))).chunk(2, -1)
        q, k, v = (side.unflatten(-1, (3, 4)).transpose(1, 2) for side in (self.q(x), k, v))
        return self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", ["before", "by channel", "as"])
def test_keys_that_a_convolution_makes_fewer_say_so(kind: str) -> None:
    module, x = Reduced(kind), torch.randn(2, 24, 12)
    formulas = {stage.name: stage.formula for stage in mha_inspect.trace(module, x).attentions[0].stages}
    found = {row.name: row for row in mha_inspect.params(module, x, per_head=True).parameters}
    few = found["few.weight"]
    if kind == "as":
        assert (few.axes, few.role) == ("(kv heads head_dim) embed 2 2", "W_k, W_v stacked: rows 0–11, 12–23")
        assert [(piece.part, piece.head, piece.rows) for piece in few.heads or ()] == [
            (part, head, (start + 4 * head, start + 4 * head + 4))
            for part, start in (("W_k", 0), ("W_v", 12))
            for head in range(3)
        ]
    else:
        assert (formulas["key"], formulas["value"]) == ("the query, then convolution, native_layer_norm", "the key")
        roles = {found[name].role for name in ("few.weight", "few.bias", "norm.weight", "norm.bias")}
        assert roles == {"used before the projection to the keys and values"}
