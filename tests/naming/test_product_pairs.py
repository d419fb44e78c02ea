"""Products that follow one another without a softmax are told with their shapes, axes and what lies between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect.render import to_text
from mha_inspect.reports.trace import Product, ProductPair

from ..built import trace_module

B, N, H, D, V, E = 7, 11, 3, 5, 2, 22


class Layer(nn.Module):
    """Projections into heads of their own width, a rule for what is done with them, and the heads side by side."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, H * w) for w in (D, D, V, V))
        self.o = nn.Linear(H * V, E)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t(x).unflatten(-1, (H, w)).transpose(1, 2) for t, w in ((self.q, D), (self.k, D), (self.v, V)))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.relu() @ (k.relu().mT @ v)


def linear_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((v.mT @ k) @ q.mT).mT


def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bhnd,bhne->bhde", k, v)
    total = torch.einsum("bhnd,bhd->bhn", q, k.sum(2))
    return torch.einsum("bhnd,bhde->bhne", q, state) / total[..., None]


def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def recurrent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, outputs = q.new_zeros(B, H, D, V), []
    for t in range(N):
        state = state * 0.9 + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append((q[:, :, t, :, None] * state).sum(-2))
    return torch.stack(outputs, 2)


def cumulative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    states = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(2)
    return torch.einsum("bhnd,bhnde->bhne", q, states)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 4) @ v


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT).tril().mT @ v


def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = q @ k.mT / 4
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)) @ v


def retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    distance = torch.arange(N)[:, None] - torch.arange(N)
    return (q @ k.mT) * (0.9**distance).tril() @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bhje->bhie", torch.einsum("bhid,bhjd->bhij", q, k).tril(), v)


def broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q[:, :, :, None] * k[:, :, None]).sum(-1).tril()
    return (weights[..., None] * v[:, :, None]).sum(-2)


def pairs_of(module: nn.Module, *args: Tensor) -> tuple[ProductPair, ...]:
    torch.manual_seed(0)
    trace = mha_inspect.trace(module, *(args or (torch.randn(B, N, E),)))
    assert not trace.attentions
    return trace.products


def written(product: Product) -> list[str]:
    """Role, axes and shape of each factor, then axes and shape of what comes out."""
    factors = [f"{factor.role}: {factor.axes} {list(factor.shape)}" for factor in product.factors]
    return [*factors, f"{product.axes} {list(product.shape)}"]


Q, K, KT, VALUE = (
    f"q: batch heads query head_dim {[B, H, N, D]}",
    f"k: batch heads key head_dim {[B, H, N, D]}",
    f"k: batch heads head_dim key {[B, H, D, N]}",
    f"v: batch heads key v_head_dim {[B, H, N, V]}",
)
SCORES = f"batch heads query key {[B, H, N, N]}"
STATE = f"batch heads head_dim v_head_dim {[B, H, D, V]}"
CONTEXT = f"batch heads query v_head_dim {[B, H, N, V]}"


@pytest.mark.parametrize(
    ("attend", "between"),
    [
        (scaled, ("scale 0.25",)),
        (summed, ("scale 0.25", "div by its sum")),
        (retention, (f"mul {[N, N]}",)),
        (lambda q, k, v: q @ k.mT @ v, ()),
    ],
)
def test_scores_that_no_softmax_is_taken_of(attend: Callable[..., Tensor], between: tuple[str, ...]) -> None:
    (pair,) = pairs_of(Layer(attend))
    assert (pair.form, pair.between, pair.count) == ("scores", between, 1)
    assert written(pair.first) == [Q, KT, SCORES]
    assert written(pair.second) == [VALUE, CONTEXT]
    lines = [product.source.rpartition(":")[2] for product in (pair.first, pair.second)]
    first = attend.__code__.co_firstlineno
    assert all(first <= int(line) <= first + 4 for line in lines)
    assert all(product.source.startswith("tests/test_product_pairs.py:") for product in (pair.first, pair.second))


def test_factors_are_those_that_einsum_was_given() -> None:
    (pair,) = pairs_of(Layer(einsum))
    assert (pair.form, pair.between) == ("scores", ("tril",))
    assert written(pair.first) == [Q, K, SCORES]
    assert written(pair.second) == [VALUE, CONTEXT]


def test_keys_may_be_the_left_factor() -> None:
    (pair,) = pairs_of(Layer(keys_first))
    assert [factor.role for factor in pair.first.factors] == ["k", "q"]
    assert written(pair.first)[2] == f"batch heads key query {[B, H, N, N]}"
    assert written(pair.second) == [VALUE, CONTEXT]


@pytest.mark.parametrize("attend", [linear, efficient])
def test_linear_attention_makes_a_state_of_keys_and_values(attend: Callable[..., Tensor]) -> None:
    (pair,) = pairs_of(Layer(attend))
    assert (pair.form, pair.between) == ("state", ())
    assert written(pair.first) == [KT, VALUE, STATE]
    assert written(pair.second) == [Q, CONTEXT]


def test_linear_attention_with_einsum_and_a_normaliser() -> None:
    (pair,) = pairs_of(Layer(normalised))
    assert written(pair.first) == [K, VALUE, STATE]
    assert written(pair.second) == [Q, CONTEXT]


def test_the_state_may_stand_the_other_way_round() -> None:
    (pair,) = pairs_of(Layer(linear_turned))
    assert [factor.role for factor in (*pair.first.factors, *pair.second.factors)] == ["v", "k", "q"]
    assert written(pair.first)[2] == f"batch heads v_head_dim head_dim {[B, H, V, D]}"
    assert written(pair.second)[1] == f"batch heads v_head_dim query {[B, H, V, N]}"


def test_a_state_that_is_carried_from_step_to_step_is_told_once() -> None:
    (pair,) = pairs_of(Layer(recurrent))
    assert (pair.form, pair.between, pair.count) == ("state", (f"add {[B, H, D, V]}",), N)
    assert pair.first.shape == (B, H, D, V)
    assert pair.second.axes == "batch heads v_head_dim"
    assert pair.first.name == "aten.mul.Tensor"


def test_states_that_are_summed_up_along_the_sequence_tell_where_it_is() -> None:
    (pair,) = pairs_of(Layer(cumulative))
    assert (pair.form, pair.between) == ("state", ("cumsum",))
    assert written(pair.first) == [K, VALUE, f"batch heads key head_dim v_head_dim {[B, H, N, D, V]}"]
    assert written(pair.second) == [Q, CONTEXT]


def test_products_may_be_a_multiplication_and_a_sum() -> None:
    (pair,) = pairs_of(Layer(broadcast))
    assert (pair.form, pair.between) == ("scores", ("tril",))
    assert [factor.role for factor in pair.first.factors] == ["q", "k"]
    assert pair.first.shape == (B, H, N, N)
    assert pair.first.axes == "batch heads query key"
    assert pair.second.axes == "batch heads query v_head_dim"


class WithoutProjections(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).sigmoid() @ x


def test_where_nothing_is_projected_axes_stay_numbers() -> None:
    (pair,) = pairs_of(WithoutProjections())
    assert (pair.form, pair.between) == ("", ("sigmoid",))
    assert written(pair.first)[2] == f": 7 11 11 {[B, N, N]}".removeprefix(": ")


class Perceptron(nn.Module):
    """Gated, with residuals and a norm: every product is with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate, self.norm = nn.Linear(E, 9), nn.Linear(9, E), nn.Linear(E, 9), nn.LayerNorm(E)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.b(self.a(self.norm(x)).relu() * self.gate(x).sigmoid())
        return x


class Streams(nn.Module):
    """Each position writes into several streams and reads from them again: no two positions meet."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.read, self.value = nn.Linear(E, 3), nn.Linear(E, 3), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        streams = x[:, :, None] + self.write(x)[..., None] * self.value(x)[:, :, None]
        return (self.read(x)[..., None] * streams).sum(2)


class Experts(nn.Module):
    """The matrices of each token's expert are picked out of a stack of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, E, 9)), nn.Parameter(torch.randn(4, 9, E))
        self.router = nn.Linear(E, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1).flatten()
        return torch.bmm(torch.bmm(x.reshape(-1, 1, E), self.up[chosen]).relu(), self.down[chosen])


class Attention(nn.Module):
    """Two layers with a softmax each, and no projection behind the first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(E, E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = (self.q(x) @ self.k(x).mT / math.sqrt(E)).softmax(-1) @ x
        return x


@pytest.mark.parametrize("make", [Perceptron, Streams, Experts, lambda: nn.Conv1d(N, 3, 3), lambda: nn.LSTM(E, 5)])
def test_models_without_such_products_have_none(make: Callable[[], nn.Module]) -> None:
    assert pairs_of(make()) == ()


def test_an_attention_is_no_such_pair() -> None:
    trace = mha_inspect.trace(Attention(), torch.randn(B, N, E))
    assert (len(trace.attentions), trace.products) == (2, ())


def test_both_are_told_where_a_model_has_both() -> None:
    torch.manual_seed(0)
    trace = trace_module(nn.Sequential(Layer(linear), Attention()), torch.randn(B, N, E))
    assert [pair.module for pair in trace.products] == ["0"]
    assert len(trace.attentions) == 2
    assert "products without a softmax" in to_text(trace, "plain")
    # Whoever has asked for one attention is shown that one.
    assert "products without a softmax" not in to_text(replace(trace, chosen=(1,)), "plain")


def test_the_page_and_the_file_tell_them(tmp_path: Path) -> None:
    trace = mha_inspect.trace(Layer(scaled), torch.randn(B, N, E))
    page = str(trace)
    assert "No attention was found: no softmax lies between two matrix products of activations." in page
    assert "queries meet keys, then values; between them scale 0.25." in page
    trace.save(tmp_path / "trace.json")
    assert mha_inspect.load(tmp_path / "trace.json").products == trace.products
