"""One projection for each head, or for some of the heads, whose results are joined before one attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 6, 3, 8
EMBED = HEADS * HEAD_DIM


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


JOINED: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "stack of heads": lambda made: torch.stack([*made], 1),
    "cat of heads": lambda made: torch.cat([head[:, None] for head in made], 1),
    "cat of features": lambda made: split(torch.cat([*made], -1)),
    "backwards": lambda made: torch.stack([*reversed(made)], 1),
}


class Joined(nn.Module):
    def __init__(self, way: str, heads_of_each: Sequence[int] = (1,) * HEADS) -> None:
        super().__init__()
        widths = [HEAD_DIM * heads for heads in heads_of_each]
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(EMBED, width) for width in widths) for _ in range(3))
        self.o = nn.Linear(EMBED, EMBED)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (JOINED[self.way]([layer(x) for layer in side]) for side in (self.q, self.k, self.v))
        weights = (q @ k.mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def roles_of(module: nn.Module) -> dict[str, str]:
    report = mha_inspect.params(module.eval(), torch.randn(BATCH, LENGTH, EMBED))
    return {row.name: row.role for row in report.parameters}


def stages_of(module: nn.Module) -> dict[str, mha_inspect.Stage]:
    trace = mha_inspect.trace(module.eval(), torch.randn(BATCH, LENGTH, EMBED))
    return {stage.name: stage for stage in trace.attentions[0].stages}


@pytest.mark.parametrize("way", JOINED)
def test_each_projection_is_the_matrix_of_its_head(way: str) -> None:
    torch.manual_seed(0)
    roles = roles_of(Joined(way))
    for letter in "qkv":
        for place in range(HEADS):
            head = HEADS - 1 - place if way == "backwards" else place
            assert roles[f"{letter}.{place}.weight"] == f"W_{letter} of head {head}"
            assert roles[f"{letter}.{place}.bias"] == f"b_{letter} of head {head}"


def test_projections_of_several_heads_each() -> None:
    torch.manual_seed(0)
    module = Joined("cat of features", (2, 1))
    roles = roles_of(module)
    assert roles["k.0.weight"] == "W_k of heads 0–1: rows are the heads stacked, 8 each"
    assert roles["k.1.weight"] == "W_k of head 2"
    assert stages_of(module)["k_proj"].axes == "batch key (heads head_dim)"
