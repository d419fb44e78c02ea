"""Heads that are projected one by one and added up: the output is the sum, and W_o has the columns of every head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 6, 3, 8
EMBED = HEADS * HEAD_DIM


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def terms_of(contexts: Tensor, weight: Tensor) -> list[Tensor]:
    columns = weight.split(HEAD_DIM, 1)
    return [contexts[:, head] @ columns[head].T for head in range(HEADS)]


def in_place(contexts: Tensor, weight: Tensor) -> Tensor:
    total = torch.zeros_like(contexts.transpose(1, 2).flatten(2))
    for term in terms_of(contexts, weight):
        total += term
    return total


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda contexts, weight: sum(terms_of(contexts, weight), torch.tensor(0.0)),
    "in place": in_place,
    "product": lambda contexts, weight: (contexts @ weight.view(EMBED, HEADS, HEAD_DIM).permute(1, 2, 0)).sum(1),
}


class Summed(nn.Module):
    def __init__(self, way: str, residual: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(EMBED, EMBED) for _ in range(4))
        self.way, self.residual = way, residual

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(layer(x)) for layer in (self.q, self.k, self.v))
        contexts = (q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v
        if self.residual:
            return sum(terms_of(contexts, self.o.weight), x)
        return SUMS[self.way](contexts, self.o.weight) + self.o.bias


@pytest.mark.parametrize("way", SUMS)
def test_the_output_is_the_sum_over_the_heads(way: str) -> None:
    torch.manual_seed(0)
    module, x = Summed(way).eval(), torch.randn(BATCH, LENGTH, EMBED)
    with torch.no_grad():
        (attention,) = mha_inspect.trace(module, x).attentions
        stages = {stage.name: stage for stage in attention.stages}
        assert stages["output"].axes == "batch query embed"
        assert stages["output"].formula.endswith(" · W_oᵀ + b_o")
        assert stages["output"].flops == 2 * BATCH * LENGTH * EMBED * EMBED


@pytest.mark.parametrize("way", SUMS)
def test_the_output_weight_has_the_columns_of_every_head(way: str) -> None:
    torch.manual_seed(0)
    report = mha_inspect.params(Summed(way).eval(), torch.randn(BATCH, LENGTH, EMBED), per_head=True)
    rows = {row.name: row for row in report.parameters}
    assert rows["o.weight"].role == "W_o: columns are the heads side by side, 8 each"
    assert rows["o.bias"].role == "b_o: added once, not split by head"
    assert [(piece.head, piece.columns) for piece in rows["o.weight"].heads or ()] == [
        (head, (HEAD_DIM * head, HEAD_DIM * (head + 1))) for head in range(HEADS)
    ]


def test_a_sum_that_begins_with_the_residual_is_no_output() -> None:
    torch.manual_seed(0)
    module, x = Summed("sum", residual=True).eval(), torch.randn(BATCH, LENGTH, EMBED)
    (attention,) = mha_inspect.trace(module, x).attentions
    assert "output" not in {stage.name for stage in attention.stages}
    roles = {row.name: row.role for row in mha_inspect.params(module, x).parameters}
    assert roles["o.weight"] == "W_o: columns are the heads side by side, 8 each"
