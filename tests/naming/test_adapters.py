"""LoRA beside a fused projection, in place and not: which heads each factor reaches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect

BATCH, LENGTH, HEADS, HEAD_DIM, RANK = 2, 6, 3, 8, 2
EMBED = HEADS * HEAD_DIM
STACKED = "rows are the heads stacked, 8 each"


def in_place(made: Tensor, q: Tensor, v: Tensor) -> Tensor:
    made[..., :EMBED] += q
    made[..., -EMBED:] += v
    return made


ADDED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in place": in_place,
    "cat": lambda made, q, v: made + torch.cat([q, torch.zeros_like(q), v], -1),
    "pad": lambda made, q, v: made + F.pad(q, (0, 2 * EMBED)) + F.pad(v, (2 * EMBED, 0)),
}


class Adapted(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(EMBED, 3 * EMBED), nn.Linear(EMBED, EMBED)
        self.down_q, self.down_v = (nn.Linear(EMBED, RANK, bias=False) for _ in range(2))
        self.up_q, self.up_v = (nn.Linear(RANK, EMBED, bias=False) for _ in range(2))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        made = ADDED[self.way](self.qkv(x), self.up_q(self.down_q(x)), self.up_v(self.down_v(x)))
        q, k, v = (side.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2) for side in made.chunk(3, -1))
        weights = (q @ k.mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", ADDED)
def test_an_adapter_changes_the_side_that_it_is_added_to(way: str) -> None:
    torch.manual_seed(0)
    module = Adapted(way).eval().requires_grad_(False)
    report = mha_inspect.params(module, torch.randn(BATCH, LENGTH, EMBED), per_head=True)
    roles = {row.name: row.role for row in report.parameters}
    assert roles["qkv.weight"] == "W_q, W_k, W_v stacked: rows 0–23, 24–47, 48–71"
    assert roles["qkv.bias"] == "b_q, b_k, b_v concatenated: elements 0–23, 24–47, 48–71"
    for letter in "qv":
        assert roles[f"up_{letter}.weight"] == f"a factor of what is added to W_{letter}: {STACKED}"
        assert roles[f"down_{letter}.weight"] == f"a factor of what is added to W_{letter}; not split by head"


class ByGroup(nn.Module):
    """LoRA for q and v takes the rows as `[q k v]`, but they lie group by group: `(kv_heads (group + 2) head_dim)`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 48, bias=False), nn.Linear(32, 32)
        self.down = nn.Parameter(torch.randn(8, 32) / 10)
        self.up_q, self.up_v = nn.Parameter(torch.randn(32, 4) / 10), nn.Parameter(torch.randn(8, 4) / 10)
        self.rows = torch.tensor([*range(32), *range(40, 48)])

    def forward(self, x: Tensor) -> Tensor:
        low_q, low_v = (x @ self.down.T).chunk(2, -1)
        made = self.qkv(x)
        added = torch.cat([low_q @ self.up_q.T, low_v @ self.up_v.T], -1)
        made = made + torch.zeros_like(made).index_copy(-1, self.rows, added)
        by_group = made.unflatten(-1, (2, 6, 4)).permute(0, 2, 3, 1, 4)
        q, k, v = by_group.split((4, 1, 1), 2)
        q, k, v = (side.expand_as(q).reshape(len(x), 8, -1, 4) for side in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(context.transpose(1, 2).flatten(2))


def test_rows_of_an_adapter_by_group_are_those_of_other_heads() -> None:
    torch.manual_seed(0)
    report = mha_inspect.params(ByGroup().eval(), torch.randn(BATCH, LENGTH, 32), per_head=True)
    rows = {row.name: row for row in report.parameters}
    assert rows["up_q"].role == "a factor of what is added to W_q of heads 0–5, W_k of head 0, W_v of head 0"
    assert rows["up_v"].role == "a factor of what is added to W_k of head 1, W_v of head 1"
    assert rows["down"].role == "a factor of what is added to W_q, W_k, W_v; not split by head"
    pieces = {(piece.part, piece.head): piece.rows for piece in rows["up_q"].heads or ()}
    firsts = [0, 4, 8, 12, 24, 28]
    assert pieces == {("factor_q", head): (first, first + 4) for head, first in enumerate(firsts)} | {
        ("factor_k", 0): (16, 20),
        ("factor_v", 0): (20, 24),
    }
