"""Attention that is given queries, keys and values: only what is done to them shows what an axis is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

from .truth import assert_true, attentions

BATCH, HEADS, KV_HEADS, LENGTH, WINDOW, HEAD_DIM = 5, 6, 2, 8, 4, 3


class Core(nn.Module):
    """`batch heads query head_dim`, with as many heads of keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


class Windows(Core):
    """Windows are cut from the last dimension before the features."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(*(side.unflatten(-2, (-1, WINDOW)) for side in (q, k, v))).flatten(-3, -2)


class FlatWindows(Core):
    """Windows become a part of the batch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(*(side.reshape(-1, WINDOW, HEAD_DIM) for side in (q, k, v))).view_as(q)


class Expanded(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = (side[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for side in (k, v))
        return self.attend(q, k, v)


class Repeated(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, *(side.repeat_interleave(q.shape[1] // side.shape[1], 1) for side in (k, v)))


class Broadcast(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q.unflatten(1, (k.shape[1], -1)), k[:, :, None], v[:, :, None]).flatten(1, 2)


class ByKernel(Core):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def given(module: nn.Module, heads: int | None, kv_heads: int | None) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = [(BATCH, *([] if count is None else [count]), LENGTH, HEAD_DIM) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("kind", [Windows, FlatWindows])
@pytest.mark.parametrize("heads", [None, HEADS])
def test_windows_of_a_core_are_no_heads(kind: type[Core], heads: int | None) -> None:
    module = kind()
    (attention,) = attentions(module, *given(module, heads, heads))
    assert attention.names.num_heads == (heads or 1)
    assert attention.names.num_windows == LENGTH // WINDOW
    assert "windows" in attention.axes()["weights"]
    assert_true(attention)


@pytest.mark.parametrize("kind", [Expanded, Repeated, Broadcast, ByKernel])
@pytest.mark.parametrize("kv_heads", [KV_HEADS, 1])
def test_keys_that_a_core_expands_are_few_heads(kind: type[Core], kv_heads: int) -> None:
    module = kind()
    (attention,) = attentions(module, *given(module, HEADS, kv_heads))
    assert (attention.names.num_heads, attention.names.num_kv_heads) == (HEADS, kv_heads)
    (shown,) = mha_inspect.trace(module, *given(module, HEADS, kv_heads)).attentions
    assert "grouped" in shown.kind


def test_of_two_axes_beside_the_batch_nothing_shows_which_is_heads() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, HEADS, LENGTH, HEAD_DIM) for _ in range(3))
    (attention,) = attentions(Core(), q, k, v)
    axes = attention.axes()
    assert axes["weights"] == f"batch 3 {HEADS} query key"
    assert axes["q_heads"] == f"batch 3 {HEADS} query head_dim"
