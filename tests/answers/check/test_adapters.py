"""A factor of LoRA that is named for one side and reaches others is a suspicion."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha_inspect import check

WIDTH, HEADS, GROUPS, RANK = 32, 8, 2, 4
D = WIDTH // HEADS


class ByGroup(nn.Module):
    """LoRA for q and v of a fused weight; `rows` says where its rows lie."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * D, bias=False), nn.Linear(WIDTH, WIDTH)
        self.a = nn.Parameter(torch.randn(2 * RANK, WIDTH) * 0.1)
        self.bq = nn.Parameter(torch.randn(HEADS * D, RANK) * 0.1)
        self.bv = nn.Parameter(torch.randn(GROUPS * D, RANK) * 0.1)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        low = (x @ self.a.T).chunk(2, -1)
        z = self.qkv(x)
        added = torch.cat([low[0] @ self.bq.T, low[1] @ self.bv.T], -1)
        z = z + torch.zeros_like(z).index_copy(-1, self.rows, added)
        group = HEADS // GROUPS
        z = z.view(b, t, GROUPS, group + 2, D).permute(0, 2, 3, 1, 4)
        q, k, v = z.split((group, 1, 1), 2)
        q, k, v = (part.expand_as(q).reshape(b, HEADS, t, D) for part in (q, k, v))
        y = (q @ k.mT / D**0.5).softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


def rows_side_by_side() -> Tensor:
    """As if the rows lay `[q | k | v]`."""
    q, k = HEADS * D, GROUPS * D
    return torch.tensor([*range(q), *range(q + k, q + 2 * k)])


def rows_by_group() -> Tensor:
    """Where the rows of q and v are: `groups (group + 2) head_dim`."""
    places = torch.arange((HEADS + 2 * GROUPS) * D).view(GROUPS, HEADS // GROUPS + 2, D)
    return torch.cat([places[:, :-2].flatten(), places[:, -1].flatten()])


def suspicions(module: nn.Module) -> list[str]:
    report = check(module.eval(), torch.randn(2, 6, WIDTH))
    return [finding.sentence for finding in report.findings if "is named for" in finding.sentence]


def test_rows_that_lie_by_group_are_not_those_of_the_name() -> None:
    assert suspicions(ByGroup(rows_side_by_side())) == [
        "bq is named for q, and is added to W_q of heads 0–5, W_k of head 0 and W_v of head 0.",
        "bv is named for v, and is added to W_k of head 1 and W_v of head 1.",
    ]


def test_the_right_rows_are_no_suspicion() -> None:
    assert suspicions(ByGroup(rows_by_group())) == []
