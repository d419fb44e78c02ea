"""Whose rows they are: the truth is how the rows are packed, and which contexts change when they are zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mha_inspect.naming.parameters import parts_of
from mha_inspect.naming.projection import Part, coordinates
from mha_inspect.running.subject import Subject

from .packed import ORDERS, E, Packed

Serves = tuple[tuple[int, ...], ...]


def read(name: str) -> tuple[Packed, Tensor, list[Part], Serves]:
    torch.manual_seed(0)
    module, x = ORDERS[name](), torch.randn(3, 7, E)
    run = Subject(module, (x,), {}, grad=False).recorded(keep=True)
    ((parts, serves),) = parts_of(run)
    return module, x, parts, serves


def rows_of(part: Part, dim: int) -> dict[int, list[int]]:
    """Head to the rows, or columns, of its features in order; of columns that share a row each once."""
    rows = {}
    for head, places in part.heads.items():
        rows[head] = coordinates(places[places >= 0], part.parameter.tensor)[dim].tolist()
    return rows


@pytest.mark.parametrize("name", ORDERS)
def test_the_rows_of_each_head_are_as_they_were_packed(name: str) -> None:
    module, _, parts, _ = read(name)
    for (letter, parameter), truth in module.rows().items():
        (part,) = (part for part in parts if (part.letter, part.parameter.name) == (letter, parameter))
        dim = 1 if name == "columns" else 0
        wanted = {head: rows for head, rows in enumerate(truth.tolist()) if min(rows) >= 0}
        assert rows_of(part, dim) == wanted


@pytest.mark.parametrize("name", ORDERS)
def test_zeros_in_the_rows_of_a_head_change_its_contexts_alone(name: str) -> None:
    module, x, parts, serves = read(name)
    tried = 0
    with torch.no_grad():
        module(x)
        before = module.contexts.clone()
        for part in (part for part in parts if part.kind == "W" and part.letter in "qkv"):
            dim, weight = 1 if name == "columns" else 0, module.get_parameter(part.parameter.name)
            for head, rows in [*rows_of(part, dim).items()][:8]:
                kept = weight.clone()
                weight.index_fill_(dim, torch.tensor(rows), 0)
                module(x)
                weight.copy_(kept)
                changed = [not torch.equal(before[:, h], module.contexts[:, h]) for h in range(before.shape[1])]
                users = serves[head] if serves and part.letter in "kv" else (head,)
                assert changed == [h in users for h in range(before.shape[1])]
                tried += 1
    assert tried >= 3


def test_columns_of_the_output_are_those_of_the_contexts() -> None:
    for name in ("thirds", "wide values", "convolution"):
        module, _, parts, _ = read(name)
        (part,) = (part for part in parts if part.name == "W_o")
        heads = len(part.heads)
        width = module.o.weight.shape[1] // heads
        assert rows_of(part, 1) == {head: [*range(head * width, (head + 1) * width)] for head in range(heads)}


def test_heads_that_a_view_without_a_transpose_mixes_have_no_rows() -> None:
    class Wrong(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o = torch.nn.Linear(E, 72), torch.nn.Linear(24, E)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.reshape(len(x), 4, -1, 6) for t in self.qkv(x).chunk(3, -1))
            context = (q @ k.mT / 6**0.5).softmax(-1) @ v
            return self.o(context.reshape(*x.shape[:2], 24))

    run = Subject(Wrong(), (torch.randn(3, 7, E),), {}, grad=False).recorded(keep=True)
    ((parts, _),) = parts_of(run)
    for letter in "qkv":
        parts_of_side = [part for part in parts if part.letter == letter]
        assert parts_of_side
        assert all(part.is_shared or not part.heads for part in parts_of_side)
