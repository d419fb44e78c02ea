"""Which way a weight is read, x · W or x · Wᵀ: in the formulas of a trace, and in the rows and roles of parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect.reports.params import HeadSlice

H, D, N = 3, 4, 5
E = H * D

Three = tuple[Tensor, Tensor, Tensor]


class Stacked(nn.Module):
    """Three square matrices in one parameter, with a function that projects by them."""

    def __init__(self, shape: tuple[int, ...], project: Callable[[Tensor, Tensor], Three], heads: int = H) -> None:
        super().__init__()
        self.w, self.o = nn.Parameter(torch.randn(shape) / E), nn.Linear(E, E, bias=False)
        self.heads, self.project = heads, project

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.project(x, self.w))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def rows_in_out(x: Tensor, w: Tensor) -> Three:
    a, b, c = w.chunk(3)
    return x @ a, x @ b, x @ c


def rows_out_in(x: Tensor, w: Tensor) -> Three:
    a, b, c = w.chunk(3)
    return x @ a.T, x @ b.T, x @ c.T


def columns_in_out(x: Tensor, w: Tensor) -> Three:
    a, b, c = (x @ w).chunk(3, -1)
    return a, b, c


def columns_out_in(x: Tensor, w: Tensor) -> Three:
    a, b, c = w.chunk(3, 1)
    return F.linear(x, a), F.linear(x, b), F.linear(x, c)


def copied_in_out(x: Tensor, w: Tensor) -> Three:
    a, b, c = w.chunk(3)
    return F.linear(x, a.T.contiguous()), F.linear(x, b.T.contiguous()), F.linear(x, c.T.contiguous())


ROWS, COLUMNS = "rows 0–11, 12–23, 24–35", "columns 0–11, 12–23, 24–35"
STYLES = {
    rows_in_out: ("", "(qkv embed) (heads head_dim)", f"stacked: {ROWS}; each is read as (in, out)"),
    copied_in_out: ("", "(qkv embed) (heads head_dim)", f"stacked: {ROWS}; each is read as (in, out)"),
    rows_out_in: ("ᵀ", "(qkv heads head_dim) embed", f"stacked: {ROWS}"),
    columns_in_out: ("", "embed (qkv heads head_dim)", f"side by side: {COLUMNS}"),
    columns_out_in: ("ᵀ", "(heads head_dim) (qkv embed)", f"side by side: {COLUMNS}; each is read as (out, in)"),
}


@pytest.mark.parametrize("heads", [H, 1])
@pytest.mark.parametrize("project", STYLES, ids=lambda project: project.__name__)
def test_the_way_that_a_weight_is_read(project: Callable[[Tensor, Tensor], Three], heads: int) -> None:
    turned, axes, role = STYLES[project]
    module = Stacked((3 * E, E) if "rows" in role else (E, 3 * E), project, heads)
    x = torch.randn(2, N, E)
    (attention,) = mha_inspect.trace(module, x).attentions
    formulas = {stage.name: stage.formula for stage in attention.stages}
    assert [formulas[f"{letter}_proj"][-len(f"W_q{turned}") :] for letter in "qkv"] == [
        f"W_{letter}{turned}" for letter in "qkv"
    ]
    assert formulas["output"] == "concat · W_oᵀ"
    (weight, _) = mha_inspect.params(module, x, per_head=True).parameters
    assert (weight.axes, weight.role) == (axes, f"W_q, W_k, W_v {role}")
    check_heads(module, weight.heads or ())


def check_heads(module: Stacked, slices: tuple[HeadSlice, ...]) -> None:
    """The rows and columns of a head are what its projection changes with."""
    assert len(slices) == 3 * module.heads
    x = torch.randn(1, 1, E)
    before = module.project(x, module.w.detach())
    for piece in slices:
        changed = module.w.detach().clone()
        changed[slice(*piece.rows), slice(*piece.columns or (0, None))] += 1
        after = module.project(x, changed)
        width = E // module.heads
        for letter, left, right in zip("qkv", before, after, strict=True):
            moved = (left != right).flatten().nonzero().flatten().tolist()
            own = list(range(piece.head * width, (piece.head + 1) * width))
            assert moved == (own if piece.part == f"W_{letter}" else [])


def test_two_matrices_of_one_parameter_may_be_read_in_two_ways() -> None:
    class Both(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            k, q = x @ self.w[:E], F.linear(x, self.w[E:])
            q, k = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k))
            return self.o(F.scaled_dot_product_attention(q, k, k).transpose(1, 2).flatten(2))

    (weight, _) = mha_inspect.params(Both((2 * E, E), rows_in_out), torch.randn(2, N, E)).parameters
    assert weight.axes == f"packed {E}"
    assert weight.role == "W_k, W_v, W_q stacked: rows 0–11, 12–23; W_k read as (in, out), W_q read as (out, in)"


def test_one_matrix_for_each_head_is_read_as_it_is_stored() -> None:
    class ByHead(Stacked):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (torch.einsum("btc,hcd->bhtd", x, w) for w in self.w)
            return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    (attention,) = mha_inspect.trace(ByHead((3, H, E, D), rows_in_out), torch.randn(2, N, E)).attentions
    assert {stage.name: stage.formula for stage in attention.stages}["k_proj"] == "key · W_k"
