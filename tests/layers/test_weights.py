"""The same weights into any layer and out again, and clear words where they cannot be carried."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mha_inspect.errors import ExitCode, WeightsError
from mha_inspect.layers.catalog import LAYERS, find_layer
from mha_inspect.layers.settings import spec_for

from .conftest import HEAD_DIM, HEADS
from .declared_weights import canonical_weights, load_weights, read_weights

EMBED = HEADS * HEAD_DIM


def parameters(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def distinct(layer: nn.Module) -> nn.Module:
    """Every element of every parameter a number of its own: nothing can be swapped unseen."""
    start = 1
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.arange(start, start + parameter.numel()).view(parameter.shape))
            start += parameter.numel()
    return layer


def build(name: str, heads: int, head_dim: int, kv_heads: int | None = None, **more) -> nn.Module:
    kind = find_layer(name)
    sizes = {"embed_dim": heads * head_dim, "num_heads": heads, "dtype": "float64", **more}
    if "head_dim" in kind.takes:
        sizes["head_dim"] = head_dim
    if "num_kv_heads" in kind.takes:
        sizes["num_kv_heads"] = kv_heads
    return kind.load().build(spec_for(kind, **sizes))


FULL = ["torch", "split-heads", "fold-heads", "per-head", "grouped-query", "wide"]
"""Layers that have a place for every number."""
LESS = ["bert", "narrow"]
"""Layers that have not: their weights go to the others, and come back."""


@settings(max_examples=4, deadline=None)
@given(heads=st.integers(1, 5), head_dim=st.integers(1, 7), bias=st.booleans())
def test_out_of_one_into_another_and_back_is_the_identity(heads, head_dim, bias):
    for source, target in product([*FULL, *LESS], FULL):
        layer, other = distinct(build(source, heads, head_dim, bias=bias)), build(target, heads, head_dim, bias=bias)
        before = parameters(layer)
        load_weights(other, read_weights(layer))
        carried = read_weights(other)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        load_weights(layer, carried)
        assert same(parameters(layer), before), (source, target)


@settings(max_examples=6, deadline=None)
@given(kv_heads=st.integers(1, 3), group=st.integers(1, 3), head_dim=st.integers(1, 5), target=st.sampled_from(FULL))
def test_shared_heads_are_repeated_and_come_back(kv_heads, group, head_dim, target):
    layer = distinct(build("grouped-query", kv_heads * group, head_dim, kv_heads))
    before, other = parameters(layer), build(target, kv_heads * group, head_dim)
    load_weights(other, read_weights(layer))
    carried = read_weights(other)
    assert carried.kv_heads == kv_heads * group
    assert torch.equal(carried.w_k, read_weights(layer).w_k.repeat_interleave(group, dim=0))
    load_weights(layer, carried)
    assert same(parameters(layer), before)


@pytest.mark.parametrize(("name", "extra"), [("torch", {"add_bias_kv": True}), ("fold-heads", {}), ("per-head", {})])
def test_widths_of_their_own_and_appended_keys(name, extra):
    layer = distinct(build(name, HEADS, HEAD_DIM, kdim=13, vdim=17, **extra))
    other = build("torch", HEADS, HEAD_DIM, kdim=13, vdim=17, **extra)
    weights = read_weights(layer)
    assert weights.w_k.shape == (HEADS, HEAD_DIM, 13)
    assert weights.w_v.shape == (HEADS, HEAD_DIM, 17)
    load_weights(other, weights)
    assert read_weights(other).equals(weights)


def test_torchs_packed_matrix_is_q_k_v_by_head(bench):
    layer = distinct(bench.build("torch"))
    weights = read_weights(layer)
    assert torch.equal(weights.w_q[1, 2], layer.in_proj_weight[HEAD_DIM + 2])
    assert torch.equal(weights.w_k[2, 0], layer.in_proj_weight[EMBED + 2 * HEAD_DIM])
    assert torch.equal(weights.b_v[1], layer.in_proj_bias[2 * EMBED + HEAD_DIM : 2 * EMBED + 2 * HEAD_DIM])
    assert torch.equal(weights.w_o[:, 2, 5], layer.out_proj.weight[:, 2 * HEAD_DIM + 5])


@pytest.mark.parametrize("name", LAYERS)
def test_what_was_read_is_a_copy(bench, name):
    layer = distinct(bench.build(name))
    weights = read_weights(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert all(tensor.count_nonzero() for tensor in weights.tensors().values())


def test_loading_leaves_autograd_as_it_was(bench):
    layer = bench.build("fold-heads")
    load_weights(layer, canonical_weights(bench.spec()))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in layer.parameters())


def refused(target, weights, message):
    before = parameters(target)
    with pytest.raises(WeightsError, match=message) as error:
        load_weights(target, weights)
    assert error.value.exit_code == ExitCode.USAGE
    assert same(parameters(target), before), "nothing is written when something does not fit"


@pytest.mark.parametrize(
    ("name", "settings", "source", "message"),
    [
        ("bert", {}, {}, "no output projection, and the weights' W_o is not the identity"),
        ("narrow", {}, {}, "gives head 0 the features 0 to 10 .* reads all 33 features"),
        ("wide", {}, {}, "head_dim 33, and the weights have head_dim 11"),
        ("split-heads", {"bias": False}, {}, "no place for a bias b_o"),
        ("bert", {"bias": False}, {"w_o": "identity", "b_o": None}, "no place for a bias b_q"),
        ("grouped-query", {"num_kv_heads": 1}, {}, "num_kv_heads 1 for 3 heads.*3 key/value heads that differ"),
        ("torch", {"embed_dim": 22, "num_heads": 2}, {}, "num_heads 2, and the weights have num_heads 3"),
        ("torch", {"kdim": 13}, {}, "kdim 13, and the weights have kdim 33"),
        (
            "torch",
            {"add_bias_kv": True},
            {},
            "learned key and value.*in the MultiheadAttention, and not in the weights",
        ),
    ],
)
def test_what_cannot_be_carried_is_said(bench, name, settings, source, message):
    weights = canonical_weights(bench.spec())
    if source.pop("w_o", None):
        weights = replace(weights, w_o=torch.eye(EMBED, dtype=torch.float64).view(EMBED, HEADS, HEAD_DIM))
    refused(bench.build(name, **settings), replace(weights, **source), message)


def test_an_appended_key_has_no_place_elsewhere(bench):
    refused(
        bench.build("per-head"), canonical_weights(bench.spec(add_bias_kv=True)), "in the weights, and not in the Per"
    )


def test_a_bias_of_zero_is_no_bias(bench):
    weights = canonical_weights(bench.spec(bias=False))
    layer, plain = distinct(bench.build("torch")), bench.build("wide", head_dim=HEAD_DIM, bias=False)
    load_weights(layer, weights)
    loaded = read_weights(layer)
    assert not any(bias.count_nonzero() for bias in (loaded.b_q, loaded.b_k, loaded.b_v, loaded.b_o))
    load_weights(plain, read_weights(layer))
    assert read_weights(plain).equals(weights)


def test_a_module_of_another_kind_is_not_guessed_at():
    with pytest.raises(WeightsError, match=r"weights of Linear cannot be told apart by head"):
        read_weights(nn.Linear(3, 3))


def test_canonical_weights_do_not_hang_on_the_head_count(bench):
    one, three = canonical_weights(bench.spec(num_heads=1)), canonical_weights(bench.spec(num_heads=3))
    assert three.w_q.shape == (3, 11, 33)
    assert one.with_heads(3).equals(three)
    assert three.with_heads(1).equals(one)
    assert not canonical_weights(bench.spec(seed=1)).equals(canonical_weights(bench.spec(seed=2)))


def test_canonical_biases_are_there_to_be_seen(bench):
    weights = canonical_weights(bench.spec(add_bias_kv=True))
    assert set(weights.tensors()) == {"w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "bias_k", "bias_v"}
    drawn = torch.cat([tensor.flatten() for tensor in weights.tensors().values()])
    assert drawn.unique().numel() == drawn.numel()
    assert drawn.abs().min() > 0
    assert set(canonical_weights(bench.spec(bias=False)).tensors()) == {"w_q", "w_k", "w_v", "w_o"}


def test_other_heads_must_divide_and_not_be_shared(bench):
    weights = canonical_weights(bench.spec())
    with pytest.raises(WeightsError, match="33 rows cannot be split over num_heads 5"):
        weights.with_heads(5)
    shared = canonical_weights(bench.spec("grouped-query", num_kv_heads=1))
    with pytest.raises(WeightsError, match="num_kv_heads 1 is below num_heads 3"):
        shared.with_heads(1)


def test_every_layer_is_covered_here():
    assert set(FULL) | set(LESS) == set(LAYERS)
