"""What is an attention, what is none, and that finding them is linear in the number of operations."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect.graph.dataflow import Graph
from mha_inspect.graph.find import attentions_of
from mha_inspect.naming.axes import AxisNames
from mha_inspect.record.ops import Recording

from ..recorded import record, record_opened

B, N, E = 7, 11, 22


def recorded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Recording:
    with torch.no_grad():
        return record_opened(function, *args, **kwargs)[0]


class Written(nn.Module):
    """Linear layers by name, and a forward given as a function of them."""

    def __init__(self, forward: Callable[..., Tensor], **widths: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(*width) for name, width in widths.items()})
        self.function = forward

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(dict(self.layers.items()), *args)


def linear_attention(w: Any, x: Tensor) -> Tensor:
    q, k, v = (w[name](x) for name in "qkv")
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2))


def efficient_attention(w: Any, x: Tensor) -> Tensor:
    q, k, v = (w[name](x) for name in "qkv")
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def router(w: Any, x: Tensor) -> Tensor:
    weights, chosen = w["gate"](x).softmax(-1).topk(2)
    experts = torch.stack([w["q"](x), w["k"](x), w["v"](x)], dim=-2)
    return (experts.gather(-2, chosen[..., None].expand(*chosen.shape, E)) * weights[..., None]).sum(-2)


def dense_router(w: Any, x: Tensor) -> Tensor:
    experts = torch.stack([w["q"](x), w["k"](x), w["v"](x)], dim=-2)
    return torch.einsum("bne,bned->bnd", w["gate"](x).softmax(-1), experts)


def classifier(w: Any, x: Tensor) -> Tensor:
    return w["gate"](torch.relu(w["q"](x)).mean(1)).softmax(-1)


def contrast(w: Any, x: Tensor) -> Tensor:
    """Scores between two sets, and a softmax, but nothing is averaged by them."""
    return (w["q"](x) @ w["k"](x).transpose(-1, -2)).softmax(-1)


NONE = (linear_attention, efficient_attention, router, dense_router, classifier, contrast)


@pytest.mark.parametrize("function", NONE, ids=lambda function: function.__name__)
def test_what_is_no_attention_is_not_found(function: Callable[..., Tensor]) -> None:
    module = Written(function, q=(E, E), k=(E, E), v=(E, E), gate=(E, 3))
    assert attentions_of(Graph(recorded(module, torch.randn(B, N, E)))) == []


def test_an_attention_is_found_beside_what_is_none() -> None:
    def both(w: Any, x: Tensor) -> Tensor:
        x = x + w["o"]((w["q"](x) @ w["k"](x).transpose(-1, -2) / math.sqrt(E)).softmax(-1) @ w["v"](x))
        x = x + router(w, x) + linear_attention(w, x)
        return classifier(w, x)

    module = Written(both, q=(E, E), k=(E, E), v=(E, E), o=(E, E), gate=(E, 3))
    (attention,) = attentions_of(Graph(recorded(module, torch.randn(B, N, E))))
    assert math.isclose(attention.scale or 0, E**-0.5, rel_tol=1e-6)
    assert {name: op.output.numel for name, op in attention.projections.items()} == dict.fromkeys(
        ("query", "key", "value", "output"), B * N * E
    )


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_function_without_any_projection(rank: int) -> None:
    shape = {2: (N, 5), 3: (B, N, 5), 4: (B, 3, N, 5)}[rank]
    q, k, v = (torch.randn(shape) for _ in range(3))
    recording = recorded(F.scaled_dot_product_attention, q, k, v)
    (attention,) = attentions_of(Graph(recording))
    names = AxisNames(attention, Graph(recording).dimensions)
    stages = ["q_heads", "k_heads", "v_heads", "scores", "weights", "context"]
    if (
        len(attention.stages["scores"].shape) > rank
    ):  # torch 2.15 gives its fused kernel a batch of one, and takes it away
        rank, stages = 4, [*stages, "concat"]
    assert list(attention.stages) == stages
    pattern = {2: "query head_dim", 3: "batch query head_dim", 4: "batch heads query head_dim"}[rank]
    assert names.of_stage("q_heads") == names.of_stage("context") == pattern
    assert names.of_stage("scores") == pattern.replace("head_dim", "key")
    assert (names.num_heads, names.head_dim) == (q.shape[-3] if rank == 4 else 1, 5)
    assert math.isclose(attention.scale or 0, 5**-0.5, rel_tol=1e-6)


def test_a_bias_between_products_belongs_to_the_projection() -> None:
    weights = nn.ParameterList([torch.randn(E, E) for _ in range(3)] + [torch.randn(E) for _ in range(3)])

    class Spelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = weights

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (x @ self.weights[i] + self.weights[i + 3] for i in range(3))
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    module, x = Spelled(), torch.randn(B, N, E)
    with torch.no_grad():
        recording, _ = record(module, x, keep=True)
    (attention,) = attentions_of(Graph(recording))
    with torch.no_grad():
        torch.testing.assert_close(recording.values[attention.stages["q_proj"].id], x @ weights[0] + weights[3])
    assert attention.scale == 1
    assert "output" not in attention.stages


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def test_a_hundred_layers_take_a_hundred_times_one() -> None:
    mask = torch.full((5, 5), -1.0).triu(1)
    few, many = (recorded(Stack(depth), torch.randn(2, 5, 6), mask) for depth in (3, 30))

    def find(recording: Recording) -> None:
        dimensions = Graph(recording).dimensions
        for attention in attentions_of(Graph(recording)):
            AxisNames(attention, dimensions)

    assert len(many.ops) <= 10 * len(few.ops)
    steps = calls(lambda: find(few)), calls(lambda: find(many))
    assert steps[1] < 10.5 * steps[0], steps


def test_a_chain_that_is_longer_than_the_stack_is_followed() -> None:
    def chain(x: Tensor) -> Tensor:
        for _ in range(3 * sys.getrecursionlimit()):
            x = x.view(-1) + torch.zeros(x.numel())
        return x

    recording = recorded(chain, torch.randn(13))
    dims = Graph(recording).dimensions.of(recording.outputs[0].tensor)
    assert [atom.size for (atom,) in dims] == [13]
