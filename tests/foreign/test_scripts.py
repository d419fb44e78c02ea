"""Modules that torch.jit compiled: Python stands still in them, and the attention is that of the same in Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mha_inspect

E = 8
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 2, 4).transpose(1, 2)
        k = self.k(x).view(batch, length, 2, 4).transpose(1, 2)
        v = self.v(x).view(batch, length, 2, 4).transpose(1, 2)
        weights = ((q @ k.transpose(-2, -1)) / math.sqrt(4)).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, 8))


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(E, 3 * E, bias=False), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.einsum("bhid,bhjd->bhij", q * 0.5, k).softmax(-1)
        return self.o(torch.einsum("bhij,bhjd->bhid", weights, v).transpose(1, 2).reshape(batch, length, 8))


class Fused(Plain):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 2, 4).transpose(1, 2)
        k = self.k(x).view(batch, length, 2, 4).transpose(1, 2)
        v = self.v(x).view(batch, length, 2, 4).transpose(1, 2)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(context.transpose(1, 2).reshape(batch, length, 8))


def told(module: nn.Module, x: Tensor) -> Any:
    (one,) = mha_inspect.trace(module, x).attentions
    weights = next((stage.shape, stage.axes, stage.formula) for stage in one.stages if stage.name == "weights")
    return weights, one.num_heads, one.head_dim, one.scale, one.kind


@pytest.mark.parametrize("style", [Plain, Einsum, Fused])
@pytest.mark.parametrize("how", ["scripted", "traced"])
def test_a_script_is_told_as_its_source(style: type[nn.Module], how: str) -> None:
    torch.manual_seed(0)
    module, x = style().eval(), torch.randn(2, 5, E)
    compiled = torch.jit.script(module) if how == "scripted" else torch.jit.trace(module, x)
    assert told(compiled, x) == told(module, x)
