"""Which heads each parameter belongs to, however a forward makes its projections of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import mha_inspect
from mha_inspect.reports.params import Parameter
from mha_inspect.reports.trace import Stage

BATCH, LENGTH, HEADS, HEAD_DIM, RANK = 2, 6, 3, 8, 2
EMBED = HEADS * HEAD_DIM
STACKED = "rows are the heads stacked, 8 each"
BESIDE = "columns are the heads side by side, 8 each"
RUNS = [(head, (HEAD_DIM * head, HEAD_DIM * (head + 1))) for head in range(HEADS)]
"""Each head with its rows, or columns, where the heads follow one another."""


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def by_side(projected: Tensor) -> list[Tensor]:
    """Split `batch position (qkv heads head_dim)` into three tensors of heads."""
    return [split(side) for side in projected.chunk(3, -1)]


class Attention(nn.Module):
    """Attention of three heads; what derives from it makes their queries, keys and values in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.o = nn.Linear(EMBED, EMBED)

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        raise NotImplementedError

    def output(self, contexts: Tensor) -> Tensor:
        return self.o(contexts.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        return self.output((q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v)


class Apart(Attention):
    """One projection for each side."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(EMBED, EMBED) for _ in range(3))

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        return [split(project(x)) for project in (self.q, self.k, self.v)]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def drawn() -> Tensor:
    return torch.randn(BATCH, LENGTH, EMBED, generator=torch.Generator().manual_seed(0))


def rows_of(module: nn.Module, x: Tensor | None = None) -> dict[str, Parameter]:
    report = mha_inspect.params(module.eval(), drawn() if x is None else x, per_head=True)
    return {row.name: row for row in report.parameters}


def roles_of(module: nn.Module, x: Tensor | None = None) -> dict[str, str]:
    return {name: row.role for name, row in rows_of(module, x).items()}


def stages_of(module: nn.Module, x: Tensor | None = None) -> dict[str, Stage]:
    (attention,) = mha_inspect.trace(module.eval(), drawn() if x is None else x).attentions
    return {stage.name: stage for stage in attention.stages}


# -- parameters that are joined before the projection ------------------------------------------------------------------


def by_einsum(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [split(side) for side in torch.einsum("bne,cde->cbnd", x, torch.stack(weights))]


JOINED_WEIGHTS: dict[str, Callable[[Tensor, list[Tensor]], list[Tensor]]] = {
    "cat": lambda x, weights: by_side(F.linear(x, torch.cat(weights))),
    "stack in an einsum": by_einsum,
}


class JoinedWeights(Attention):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(EMBED, EMBED) / 5) for _ in range(3))
        self.way = way

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        return JOINED_WEIGHTS[self.way](x, [self.w_q, self.w_k, self.w_v])


@pytest.mark.parametrize("way", JOINED_WEIGHTS)
def test_each_joined_parameter_is_the_matrix_of_its_side(way: str) -> None:
    rows = rows_of(JoinedWeights(way))
    for letter in "qkv":
        row = rows[f"w_{letter}"]
        assert row.role == f"W_{letter}: {STACKED}"
        assert [(piece.head, piece.rows) for piece in row.heads or ()] == RUNS


class WeightsOfHeads(Attention):
    """Every head has parameters of its own, which are joined before the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.randn(HEAD_DIM, EMBED) / 5 for _ in range(3 * HEADS))

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        return by_side(F.linear(x, torch.cat([*self.w])))


def test_joined_parameters_of_single_heads() -> None:
    roles = [role for name, role in roles_of(WeightsOfHeads()).items() if name.startswith("w.")]
    assert roles == [f"W_{letter} of head {head}" for letter in "qkv" for head in range(HEADS)]


# -- one projection for each head --------------------------------------------------------------------------------------


JOINED_HEADS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "stack of heads": lambda heads: torch.stack([*heads], 1),
    "cat of heads": lambda heads: torch.cat([head[:, None] for head in heads], 1),
    "cat of features": lambda heads: split(torch.cat([*heads], -1)),
    "backwards": lambda heads: torch.stack([*reversed(heads)], 1),
}


class JoinedHeads(Attention):
    def __init__(self, way: str, heads_of_each: Sequence[int] = (1,) * HEADS) -> None:
        super().__init__()
        widths = [HEAD_DIM * heads for heads in heads_of_each]
        self.q, self.k, self.v = (nn.ModuleList(nn.Linear(EMBED, width) for width in widths) for _ in range(3))
        self.way = way

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        return [JOINED_HEADS[self.way]([layer(x) for layer in side]) for side in (self.q, self.k, self.v)]


@pytest.mark.parametrize("way", JOINED_HEADS)
def test_each_projection_is_the_matrix_of_its_head(way: str) -> None:
    roles = roles_of(JoinedHeads(way))
    for letter in "qkv":
        for place in range(HEADS):
            head = HEADS - 1 - place if way == "backwards" else place
            assert roles[f"{letter}.{place}.weight"] == f"W_{letter} of head {head}"
            assert roles[f"{letter}.{place}.bias"] == f"b_{letter} of head {head}"


def test_projections_of_several_heads_each() -> None:
    module = JoinedHeads("cat of features", (2, 1))
    roles = roles_of(module)
    assert roles["k.0.weight"] == f"W_k of heads 0–1: {STACKED}"
    assert roles["k.1.weight"] == "W_k of head 2"
    assert stages_of(module)["k_proj"].axes == "batch key (heads head_dim)"


# -- heads that are projected one by one and added up ------------------------------------------------------------------


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


class Summed(Apart):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def output(self, contexts: Tensor) -> Tensor:
        return SUMS[self.way](contexts, self.o.weight) + self.o.bias


@pytest.mark.parametrize("way", SUMS)
def test_the_output_is_the_sum_over_the_heads_and_its_weight_has_their_columns(way: str) -> None:
    module = Summed(way)
    output = stages_of(module)["output"]
    assert output.axes == "batch query embed"
    assert output.formula.endswith(" · W_oᵀ + b_o")
    assert output.flops == 2 * BATCH * LENGTH * EMBED * EMBED
    rows = rows_of(module)
    assert rows["o.weight"].role == f"W_o: {BESIDE}"
    assert rows["o.bias"].role == "b_o: added once, not split by head"
    assert [(piece.head, piece.columns) for piece in rows["o.weight"].heads or ()] == RUNS


class OntoResidual(Apart):
    """The sum over the heads begins with the input."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        contexts = (q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v
        return sum(terms_of(contexts, self.o.weight), x)


def test_a_sum_that_begins_with_the_residual_is_no_output() -> None:
    module = OntoResidual()
    assert "output" not in stages_of(module)
    assert roles_of(module)["o.weight"] == f"W_o: {BESIDE}"


# -- weights that the forward computes ---------------------------------------------------------------------------------


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


COMPUTED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
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


@pytest.mark.parametrize("name", COMPUTED)
def test_a_computed_weight_projects_the_queries(name: str) -> None:
    make, expected = COMPUTED[name]
    module = Apart()
    module.q = make()
    assert {"query", "q_proj", "k_proj", "v_proj"} <= stages_of(module).keys()
    roles = roles_of(module)
    assert {parameter: roles[parameter] for parameter in expected} == expected
    assert roles["q.bias"] == "b_q"
    assert roles["k.weight"] == f"W_k: {STACKED}"


def test_a_computed_output_weight_has_the_columns_of_the_heads() -> None:
    module = Apart()
    module.o = MergedLora()
    roles = roles_of(module)
    assert roles["o.weight"] == f"W_o: {BESIDE}"
    assert roles["o.down"] == f"a factor of what is added to W_o: {BESIDE}"
    assert roles["o.up"] == "a factor of what is added to W_o; not split by head"


# -- LoRA beside a fused projection ------------------------------------------------------------------------------------


def onto_sides(projected: Tensor, q: Tensor, v: Tensor) -> Tensor:
    projected[..., :EMBED] += q
    projected[..., -EMBED:] += v
    return projected


ADDED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in place": onto_sides,
    "cat": lambda projected, q, v: projected + torch.cat([q, torch.zeros_like(q), v], -1),
    "pad": lambda projected, q, v: projected + F.pad(q, (0, 2 * EMBED)) + F.pad(v, (2 * EMBED, 0)),
}


class Adapted(Attention):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(EMBED, 3 * EMBED)
        self.down_q, self.down_v = (nn.Linear(EMBED, RANK, bias=False) for _ in range(2))
        self.up_q, self.up_v = (nn.Linear(RANK, EMBED, bias=False) for _ in range(2))
        self.way = way

    def sides(self, x: Tensor) -> Sequence[Tensor]:
        added_q, added_v = self.up_q(self.down_q(x)), self.up_v(self.down_v(x))
        return by_side(ADDED[self.way](self.qkv(x), added_q, added_v))


@pytest.mark.parametrize("way", ADDED)
def test_an_adapter_changes_the_side_that_it_is_added_to(way: str) -> None:
    roles = roles_of(Adapted(way).requires_grad_(False))
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
        projected = self.qkv(x)
        added = torch.cat([low_q @ self.up_q.T, low_v @ self.up_v.T], -1)
        projected = projected + torch.zeros_like(projected).index_copy(-1, self.rows, added)
        by_group = projected.unflatten(-1, (2, 6, 4)).permute(0, 2, 3, 1, 4)
        q, k, v = by_group.split((4, 1, 1), 2)
        q, k, v = (side.expand_as(q).reshape(len(x), 8, -1, 4) for side in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(context.transpose(1, 2).flatten(2))


def test_rows_of_an_adapter_by_group_are_those_of_other_heads() -> None:
    rows = rows_of(ByGroup(), torch.randn(BATCH, LENGTH, 32))
    assert rows["up_q"].role == "a factor of what is added to W_q of heads 0–5, W_k of head 0, W_v of head 0"
    assert rows["up_v"].role == "a factor of what is added to W_k of head 1, W_v of head 1"
    assert rows["down"].role == "a factor of what is added to W_q, W_k, W_v; not split by head"
    expected = {("factor_k", 0): (16, 20), ("factor_v", 0): (20, 24)}
    for head, first in enumerate([0, 4, 8, 12, 24, 28]):
        expected["factor_q", head] = (first, first + 4)
    assert {(piece.part, piece.head): piece.rows for piece in rows["up_q"].heads or ()} == expected


# -- convolutions ------------------------------------------------------------------------------------------------------


class Transposed(nn.Module):
    """The weight of a transposed convolution is `in out *kernel`: W_q has its heads in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.ConvTranspose1d(EMBED, 3 * EMBED, 1), nn.ConvTranspose1d(EMBED, EMBED, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (side.unflatten(1, (HEADS, HEAD_DIM)).mT for side in self.qkv(x).chunk(3, 1))
        weights = (q @ k.mT / HEAD_DIM**0.5).softmax(-1)
        return self.o((weights @ v).mT.flatten(1, 2))


def test_heads_of_a_transposed_convolution_are_in_the_second_dimension() -> None:
    rows = rows_of(Transposed(), torch.randn(BATCH, EMBED, LENGTH))
    assert rows["qkv.weight"].axes == "embed (qkv heads head_dim) 1"
    assert rows["qkv.weight"].role == "W_q, W_k, W_v side by side: columns 0–23, 24–47, 48–71"
    assert rows["o.weight"].axes == "(heads head_dim) embed 1"
    pieces = rows["qkv.weight"].heads or ()
    for side, letter in enumerate("qkv"):
        columns = [(piece.head, piece.columns) for piece in pieces if piece.part == f"W_{letter}"]
        assert columns == [(head, (EMBED * side + start, EMBED * side + end)) for head, (start, end) in RUNS]


def test_a_spectral_norm_of_a_convolution() -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (parametrizations.spectral_norm(nn.Conv2d(8, 8, 1)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x).flatten(2) for layer in (self.q, self.k, self.v))
            return (v @ (q.mT @ k).softmax(-1).mT).view(x.shape)

    module, x = Convolved(), torch.randn(2, 8, 3, 3)
    assert {"q_proj", "k_proj", "v_proj"} <= stages_of(module, x).keys()
    assert roles_of(module, x)["v.parametrizations.weight.original"].startswith("W_v: ")
