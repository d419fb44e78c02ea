"""compare-heads over k head counts beside k plain forwards and the float64 reference, of a layer and of a target."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mha_inspect.answers.compare_heads import compare_heads
from mha_inspect.call.load import layers_by_name, modules_with_heads
from mha_inspect.running.subject import Subject

_COUNTS = (1, 2, 4, 8, 16)


class _Target(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        context = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(context.transpose(1, 2).flatten(2))


def _layers() -> list[tuple[int, Subject]]:
    return layers_by_name("torch", _COUNTS, {"embed_dim": 512, "batch": 8, "seq_len": 512})


def _targets() -> list[tuple[int, Subject]]:
    x = torch.randn(8, 512, 512, generator=torch.Generator().manual_seed(0))
    return list(modules_with_heads(_Target, _COUNTS, (x,), {}))


@pytest.mark.parametrize("made", [_layers, _targets])
def test_compare_heads(side_by_side, made):
    plain = [own for _, own in made()]

    def theirs() -> None:
        with torch.no_grad():
            for own in plain:
                own.module(*own.args, **own.kwargs)
        plain[0].copied(torch.float64).plain()

    side_by_side(
        f"compare-heads over {len(_COUNTS)} counts, {made.__name__.strip('_')}",
        lambda: compare_heads(made()),
        "the plain forwards and the float64 reference",
        theirs,
        at_most=1.2,
        rounds=11,
    )
