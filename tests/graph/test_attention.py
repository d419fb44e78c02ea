"""Attention is found in a function without modules, and finding it is linear in the number of operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

from ..built import trace_module


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_function_without_any_projection(rank: int) -> None:
    q, k, v = (torch.randn({2: (11, 5), 3: (7, 11, 5), 4: (7, 3, 11, 5)}[rank]) for _ in range(3))
    with torch.no_grad(), mha_inspect.recording() as seen:
        F.scaled_dot_product_attention(q, k, v)
    (attention,) = seen.trace.attentions
    stages = {stage.name: stage.axes for stage in attention.stages}
    if len(stages["scores"].split()) > rank:  # torch 2.15 gives its fused kernel a batch of one, and takes it away
        rank = 4
    pattern = {2: "query head_dim", 3: "batch query head_dim", 4: "batch heads query head_dim"}[rank]
    assert stages["q_heads"] == stages["context"] == pattern
    assert stages["scores"] == pattern.replace("head_dim", "key")
    assert attention.scale == pytest.approx(5**-0.5)


def calls(function: Callable[[], Any]) -> int:
    """How many Python functions are called while this one runs."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_thirty_layers_take_ten_times_three() -> None:
    """Layers of other sizes are read one by one."""

    def trace(depth: int) -> Any:
        layers = [nn.TransformerEncoderLayer(6, 2, 7 + number, batch_first=True) for number in range(depth)]
        module, x = nn.Sequential(*layers).eval(), torch.randn(2, 5, 6)
        return lambda: trace_module(module, x)

    trace(3)()
    assert calls(trace(30)) < 12 * calls(trace(3))


def test_a_chain_that_is_longer_than_the_stack_is_followed() -> None:
    layer, x = nn.MultiheadAttention(6, 2, batch_first=True), torch.randn(2, 5, 6)
    with torch.no_grad(), mha_inspect.recording() as seen:
        y: Tensor = x
        for _ in range(3 * sys.getrecursionlimit()):
            y = y.view(-1, 6) + torch.zeros(6)
        y = y.view(x.shape)
        layer(y, y, y)
    assert [attention.num_heads for attention in seen.trace.attentions] == [2]
