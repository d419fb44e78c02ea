"""Weights that the forward computes from parameters, by a product, a parametrization or an index, are weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import mha_inspect

BATCH, LENGTH, HEADS, HEAD_DIM, RANK = 2, 6, 3, 8, 2
EMBED = HEADS * HEAD_DIM
STACKED = "rows are the heads stacked, 8 each"
BESIDE = "columns are the heads side by side, 8 each"


class Attention(nn.Module):
    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(EMBED, EMBED) for _ in range(4))
        self.heads = heads

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = map(self.split, (q, k, v))
        weights = (q @ k.mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((weights @ v).transpose(-2, -3).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.q(x), self.k(x), self.v(x))


class MergedLora(nn.Linear):
    def __init__(self) -> None:
        super().__init__(EMBED, EMBED)
        self.down, self.up = nn.Parameter(torch.randn(RANK, EMBED)), nn.Parameter(torch.randn(EMBED, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.up @ self.down, self.bias)


class LowRank(MergedLora):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.up @ self.down, self.bias)


class Reversed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(EMBED - 1, -1, -1)
        return F.linear(x, self.weight[order], self.bias[order])


def reports(module: nn.Module, x: Tensor) -> tuple[dict[str, str], mha_inspect.AttentionReport]:
    """Return the role of each parameter, and the report of the only attention."""
    roles = {row.name: row.role for row in mha_inspect.params(module.eval(), x).parameters}
    (attention,) = mha_inspect.trace(module.eval(), x).attentions
    return roles, attention


def stages_of(attention: mha_inspect.AttentionReport) -> list[str]:
    return [stage.name for stage in attention.stages]


def inputs() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, generator=torch.Generator().manual_seed(0))


LAYERS: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(EMBED, EMBED)),
        {"q.parametrizations.weight.original": f"W_q: {STACKED}"},
    ),
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(EMBED, EMBED)),
        {"q.parametrizations.weight.original": "W_q is computed from it"},
    ),
    "merged LoRA": (
        MergedLora,
        {
            "q.weight": f"W_q: {STACKED}",
            "q.up": f"a factor of what is added to W_q: {STACKED}",
            "q.down": "a factor of what is added to W_q; not split by head",
        },
    ),
    "product": (
        LowRank,
        {"q.up": f"a factor of W_q: {STACKED}", "q.down": "a factor of W_q; not split by head"},
    ),
    "index": (
        lambda: Reversed(EMBED, EMBED),
        {"q.weight": "W_q: rows are the heads stacked in another order, 8 each"},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_computed_weight_projects_the_queries(name: str) -> None:
    torch.manual_seed(0)
    module, (layer, expected) = Attention(), LAYERS[name]
    module.q = layer()
    roles, attention = reports(module, inputs())
    assert attention.kind[0] == "self"
    assert {"query", "q_proj", "k_proj", "v_proj"} <= set(stages_of(attention))
    assert {parameter: roles[parameter] for parameter in expected} == expected
    assert roles["q.bias"] == "b_q"
    assert roles["k.weight"] == f"W_k: {STACKED}"


def test_a_computed_output_weight_has_the_columns_of_the_heads() -> None:
    torch.manual_seed(0)
    module = Attention()
    module.o = MergedLora()
    roles, _ = reports(module, inputs())
    assert roles["o.weight"] == f"W_o: {BESIDE}"
    assert roles["o.down"] == f"a factor of what is added to W_o: {BESIDE}"
    assert roles["o.up"] == "a factor of what is added to W_o; not split by head"


def test_a_spectral_norm_of_a_convolution() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (parametrizations.spectral_norm(nn.Conv2d(8, 8, 1)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
            return (v @ (q.mT @ k).softmax(-1).mT).view(x.shape)

    torch.manual_seed(0)
    roles, attention = reports(Convolved(), torch.randn(2, 8, 3, 3))
    assert {"q_proj", "k_proj", "v_proj"} <= set(stages_of(attention))
    assert roles["v.parametrizations.weight.original"].startswith("W_v: ")
