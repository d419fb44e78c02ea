"""Parameters that are joined into one weight before the projection: each is W_q, W_k or W_v by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 6, 3, 8
EMBED = HEADS * HEAD_DIM


def by_side(made: Tensor) -> list[Tensor]:
    """Split `batch position (qkv heads head_dim)` into three tensors of heads."""
    return [side.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in made.chunk(3, -1)]


def by_einsum(x: Tensor, w: list[Tensor]) -> list[Tensor]:
    made = torch.einsum("bne,cde->cbnd", x, torch.stack(w))
    return [side.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in made]


JOINED: dict[str, Callable[[Tensor, list[Tensor]], list[Tensor]]] = {
    "cat": lambda x, w: by_side(F.linear(x, torch.cat(w))),
    "stack in an einsum": by_einsum,
}


class Joined(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(EMBED, EMBED) / 5) for _ in range(3))
        self.o = nn.Linear(EMBED, EMBED)
        self.way = way

    def sides(self, x: Tensor) -> list[Tensor]:
        return JOINED[self.way](x, [self.w_q, self.w_k, self.w_v])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        weights = (q @ k.mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", JOINED)
def test_each_joined_parameter_is_the_matrix_of_its_side(way: str) -> None:
    torch.manual_seed(0)
    report = mha_inspect.params(Joined(way).eval(), torch.randn(BATCH, LENGTH, EMBED), per_head=True)
    rows = {row.name: row for row in report.parameters}
    for letter in "qkv":
        row = rows[f"w_{letter}"]
        assert row.role == f"W_{letter}: rows are the heads stacked, {HEAD_DIM} each"
        assert [(piece.head, piece.rows) for piece in row.heads or ()] == [
            (head, (HEAD_DIM * head, HEAD_DIM * (head + 1))) for head in range(HEADS)
        ]


class HeadByHead(Joined):
    """Every head has parameters of its own, which are joined before the projection."""

    def __init__(self) -> None:
        super().__init__("cat")
        del self.w_q, self.w_k, self.w_v
        self.w = nn.ParameterList(torch.randn(HEAD_DIM, EMBED) / 5 for _ in range(3 * HEADS))

    def sides(self, x: Tensor) -> list[Tensor]:
        return by_side(F.linear(x, torch.cat([*self.w])))


def test_joined_parameters_of_single_heads() -> None:
    torch.manual_seed(0)
    report = mha_inspect.params(HeadByHead().eval(), torch.randn(BATCH, LENGTH, EMBED))
    roles = [row.role for row in report.parameters if row.name.startswith("w.")]
    assert roles == [f"W_{letter} of head {head}" for letter in "qkv" for head in range(HEADS)]
