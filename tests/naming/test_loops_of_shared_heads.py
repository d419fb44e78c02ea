"""A loop over query heads that slices one key head several times: as many key heads as there are different ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mha_inspect

BATCH, LENGTH, EMBED, HEAD_DIM = 2, 6, 24, 4


class Loop(nn.Module):
    """Query head h uses key head `key_of[h]` and value head `value_of[h]`."""

    def __init__(self, key_of: list[int], value_of: list[int]) -> None:
        super().__init__()
        self.key_of, self.value_of = key_of, value_of
        self.heads = len(key_of), max(key_of) + 1, max(value_of) + 1
        self.q, self.k, self.v = (nn.Linear(EMBED, heads * HEAD_DIM) for heads in self.heads)
        self.o = nn.Linear(len(key_of) * HEAD_DIM, EMBED)

    def forward(self, x: Tensor) -> Tensor:
        made = zip((self.q, self.k, self.v), self.heads, strict=True)
        q, k, v = (layer(x).unflatten(-1, (heads, HEAD_DIM)).transpose(1, 2) for layer, heads in made)
        contexts = []
        for head, (key, value) in enumerate(zip(self.key_of, self.value_of, strict=True)):
            weights = (q[:, head] @ k[:, key].mT / HEAD_DIM**0.5).softmax(-1)
            contexts.append(weights @ v[:, value])
        return self.o(torch.stack(contexts, 2).flatten(2))


def rows_in(module: nn.Module, name: str) -> dict[int, tuple[int, int] | None]:
    report = mha_inspect.params(module.eval(), torch.randn(BATCH, LENGTH, EMBED), per_head=True)
    (row,) = [row for row in report.parameters if row.name == name]
    return {piece.head: piece.rows for piece in row.heads or ()}


def at(numbers: list[int]) -> dict[int, tuple[int, int]]:
    return {head: (HEAD_DIM * number, HEAD_DIM * (number + 1)) for head, number in enumerate(numbers)}


def test_different_key_heads_are_counted_once_each() -> None:
    torch.manual_seed(0)
    module = Loop([0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1])
    (attention,) = mha_inspect.trace(module.eval(), torch.randn(BATCH, LENGTH, EMBED)).attentions
    assert (attention.num_heads, attention.num_kv_heads) == (6, 2)
    assert rows_in(module, "k.weight") == rows_in(module, "v.weight") == at([0, 1])


def test_a_skipped_key_head_is_used_by_none() -> None:
    torch.manual_seed(0)
    module = Loop([0, 0, 2], [0, 1, 2])
    (attention,) = mha_inspect.trace(module.eval(), torch.randn(BATCH, LENGTH, EMBED)).attentions
    assert attention.num_kv_heads == 2
    assert rows_in(module, "k.weight") == at([0, 2])
    assert rows_in(module, "v.weight") == at([0, 1, 2])
