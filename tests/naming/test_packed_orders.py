"""Queries, keys and values in one matrix, in the orders that people pack them in: whose rows they are.

The truth is how the rows are packed, and which contexts change when they are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from mha_inspect.naming.parameters import parts_of
from mha_inspect.naming.projection import Part, coordinates
from mha_inspect.running.subject import Subject

E, H, D = 20, 4, 6
Heads = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each `batch heads position head_dim`."""
Rows = dict[tuple[str, str], Tensor]
"""Letter and parameter to the rows of each head: `heads head_dim`."""


def split(x: Tensor, heads: int = H) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join(context: Tensor) -> Tensor:
    return context.transpose(1, 2).flatten(2)


def in_order(*shape: int) -> Tensor:
    """Return the rows of a matrix, as `shape`."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


class Packed(nn.Module):
    """A module that keeps its contexts, `batch heads position head_dim`."""

    def __init__(self, width: int = H * D) -> None:
        super().__init__()
        self.o = nn.Linear(width, E)
        self.contexts = torch.zeros(())

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        self.contexts = context
        return context

    def rows(self) -> Rows:
        raise NotImplementedError


class One(Packed):
    """One matrix, and a function that splits what it gives."""

    def __init__(self, to_heads: Callable[[Tensor], Heads], rows: Sequence[Tensor]) -> None:
        heads, width = len(rows[0]), rows[2].shape[-1]
        super().__init__(heads * width)
        self.qkv = nn.Linear(E, 1 + int(max(of_side.max() for of_side in rows)))
        self.to_heads, self.truth = to_heads, rows

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(self.attend(*self.to_heads(self.qkv(x)))))

    def rows(self) -> Rows:
        return {(letter, "qkv.weight"): rows for letter, rows in zip("qkv", self.truth, strict=True)}


def thirds(y: Tensor) -> Heads:
    """GPT-2: `(qkv heads head_dim)`."""
    q, k, v = map(split, y.chunk(3, -1))
    return q, k, v


def head_by_head(y: Tensor) -> Heads:
    """GPT-NeoX: `(heads qkv head_dim)`."""
    y = y.unflatten(-1, (H, 3 * D))
    q, k, v = (y[..., at : at + D].transpose(1, 2) for at in (0, D, 2 * D))
    return q, k, v


def groups(y: Tensor) -> Heads:
    """Group by group: three query heads, a key and a value."""
    y = y.view(*y.shape[:2], 2, 5, 4)
    q, k, v = y[:, :, :, :-2].flatten(2, 3), y[:, :, :, [-2]], y[:, :, :, [-1]]
    k, v = (t.expand(-1, -1, -1, 3, -1).flatten(2, 3) for t in (k, v))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def wide_values(y: Tensor) -> Heads:
    """LeViT: values are wider."""
    q, k, v = (t.transpose(1, 2) for t in y.unflatten(-1, (3, -1)).split([4, 4, 8], 3))
    return q, k, v


ORDER = torch.tensor([2, 0, 3, 1])


def of_thirds(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Heads]:
    """Return a function that splits what `change` makes of each third into heads."""

    def to_heads(y: Tensor) -> Heads:
        q, k, v = (split(change(t)) for t in y.chunk(3, -1))
        return q, k, v

    return to_heads


THIRDS = in_order(3, H, D)
BY_HEAD = in_order(H, 3, D).unbind(1)
GROUPS = in_order(2, 5, 4)
OF_GROUPS = GROUPS[:, :3].flatten(0, 1), GROUPS[:, 3], GROUPS[:, 4]
LEVIT = in_order(3, 16).split([4, 4, 8], 1)


class Columns(Packed):
    """GPT-2's own: a matrix the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(E, 72)), nn.Parameter(torch.randn(72))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, E), self.weight).view(*x.shape[:2], -1)
        return self.o(join(self.attend(*thirds(y))))

    def rows(self) -> Rows:
        return {(letter, "weight"): THIRDS[at] for at, letter in enumerate("qkv")}


class Beside(Packed):
    """PaLM: queries beside the rows of the feed-forward, one key and one value."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.down = nn.Linear(E, 24 + 12 + 80), nn.Linear(40, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, rest = self.fused(x).split((24, 6, 6, 80), -1)
        q = rearrange(q, "b n (h d) -> b h n d", h=H)
        weights = (torch.einsum("bhid,bjd->bhij", q, k) / 2).softmax(-1)
        self.contexts = torch.einsum("bhij,bjd->bhid", weights, v)
        gate, up = rest.chunk(2, -1)
        return self.o(rearrange(self.contexts, "b h n d -> b n (h d)")) + self.down(F.silu(gate) * up)

    def rows(self) -> Rows:
        rows = in_order(6, 6)
        return {
            ("q", "fused.weight"): rows[:4],
            ("k", "fused.weight"): rows[4:5],
            ("v", "fused.weight"): rows[5:6],
        }


class LowRankPadded(One):
    """LoRA of queries and values: two matrices in one, with zeros between them."""

    def __init__(self) -> None:
        super().__init__(thirds, THIRDS.unbind(0))
        self.down, self.up = nn.Parameter(torch.randn(6, E)), nn.Parameter(torch.randn(48, 3))

    def forward(self, x: Tensor) -> Tensor:
        added = F.conv1d(F.linear(x, self.down).mT, self.up[:, :, None], groups=2).mT
        of_queries, of_values = added.split(24, -1)
        y = self.qkv(x) + torch.cat([of_queries, torch.zeros_like(of_queries), of_values], -1)
        return self.o(join(self.attend(*thirds(y))))

    def rows(self) -> Rows:
        of_two = in_order(2, H, D)
        return super().rows() | {("q", "up"): of_two[0], ("v", "up"): of_two[1]}


class Image(Packed):
    """Convolutions in the place of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Conv2d(E, 72, 1), nn.Conv2d(24, E, 1)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.mT for t in self.qkv(x.mT[..., None]).view(len(x), 3, H, D, -1).unbind(1))
        return self.o(self.attend(q, k, v).mT.reshape(len(x), 24, -1, 1))

    def rows(self) -> Rows:
        return {(letter, "qkv.weight"): THIRDS[at] for at, letter in enumerate("qkv")}


class Latent(Packed):
    """DeepSeek's: keys and values from one latent, and a rotated key that all heads share."""

    def __init__(self) -> None:
        super().__init__(H * 5)
        self.q, self.down, self.up = nn.Linear(E, H * 8), nn.Linear(E, 7 + 2), nn.Linear(7, H * 11)

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(x))
        latent, shared = self.down(x).split([7, 2], -1)
        k, v = split(self.up(latent)).split([6, 5], -1)
        q = torch.cat([q[..., :6], self.rotated(q[..., 6:])], -1)
        k = torch.cat([k, self.rotated(shared)[:, None].expand(-1, H, -1, -1)], -1)
        return self.o(join(self.attend(q, k, v)))

    def rotated(self, x: Tensor) -> Tensor:
        angle = torch.arange(float(x.shape[-2]))[:, None]
        return x * angle.cos() + torch.cat((-x[..., 1:], x[..., :1]), -1) * angle.sin()

    def rows(self) -> Rows:
        k, v = in_order(H, 11).split([6, 5], 1)
        return {
            ("q", "q.weight"): in_order(H, 8),
            ("k", "up.weight"): k,
            ("v", "up.weight"): v,
            ("k", "down.weight"): torch.tensor([[7, 8]] * H),
        }


ORDERS: dict[str, Callable[[], Packed]] = {
    "thirds": lambda: One(thirds, THIRDS),
    "head by head": lambda: One(head_by_head, BY_HEAD),
    "groups": lambda: One(groups, OF_GROUPS),
    "wide values": lambda: One(wide_values, LEVIT),
    "heads in another order": lambda: One(
        of_thirds(lambda t: split(t)[:, ORDER].transpose(1, 2).flatten(2)), THIRDS[:, ORDER]
    ),
    "columns": Columns,
    "beside the feed-forward": Beside,
    "low rank, padded": LowRankPadded,
    "convolution": Image,
    "latent": Latent,
}
"""Name to a function that makes the module."""

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
