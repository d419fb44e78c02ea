"""What each layer declares of itself: formula, roles, lazy parameters, seeds, and the settings that it takes."""

from __future__ import annotations

import pytest
import torch

from mha_inspect.call.load import layer_called, load_layer
from mha_inspect.layers.catalog import LAYERS, OPTIONAL, evaluate, find_layer
from mha_inspect.layers.spec import InputSpec, RunSpec

from .declared import ROLES, spec_of

OURS = [name for name in LAYERS if name != "torch"]
SIZES = [
    {},
    {"bias": False},
    {"num_heads": 1},
    {"embed_dim": 35, "num_heads": 5},
    {"kdim": 13, "vdim": 17},
    {"embed_dim": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 7},
    {"head_dim": 5},
    {"head_dim": 33, "bias": False},
]


def each_that_takes():
    for name in OURS:
        for sizes in SIZES:
            if set(sizes) & set(OPTIONAL) <= find_layer(name).takes:
                yield pytest.param(name, sizes, id=f"{name}-{sizes}")


@pytest.mark.parametrize(("name", "sizes"), list(each_that_takes()))
def test_the_formula_gives_the_count_and_the_roles_cover_every_element(bench, name, sizes):
    kind, spec = find_layer(name), bench.spec(name, **sizes)
    layer = bench.build(name, **sizes)
    assert evaluate(kind.formula(spec), spec) == sum(parameter.numel() for parameter in layer.parameters())
    roles = ROLES[name](spec)
    for parameter_name, parameter in layer.named_parameters():
        role, seen = roles[parameter_name], torch.zeros(parameter.shape, dtype=torch.int)
        assert role.text
        for part in role.parts:
            slices = part.slices() or [None]
            for piece in slices:
                rows, columns = (part.rows, part.columns) if piece is None else (piece.rows, piece.columns)
                seen[(slice(*rows), slice(*columns)) if columns else slice(*rows)] += 1
        assert seen.eq(1).all(), parameter_name
    assert spec_of(layer).num_heads == spec.num_heads
    assert set(dict(layer.named_parameters())) <= set(roles)


@pytest.mark.parametrize("name", OURS)
def test_a_seed_gives_the_same_layer_and_leaves_the_generator_alone(bench, name):
    state = torch.get_rng_state()
    first, second, reseeded = bench.build(name, seed=3), bench.build(name, seed=3), bench.build(name, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    pairs = list(zip(first.parameters(), second.parameters(), reseeded.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not any(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize("name", LAYERS)
def test_on_meta_it_runs_with_every_mask(bench, name):
    inputs = InputSpec(batch=2, seq_len=7, key_len=5, causal=True, padding=(1,))
    subject = load_layer(bench.spec(name), inputs, RunSpec(device="meta"), name)
    assert subject.plain()[0].shape == (2, 7, 33)


ASKED = {
    "num_kv_heads": {"num_kv_heads": 2},
    "head_dim": {"head_dim": 10},
    "rope": {"rope": True},
    "kdim": {"kdim": 13},
    "vdim": {"vdim": 17},
    "add_bias_kv": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
    "dropout": {"dropout": 0.1},
    "batch_first": {"batch_first": False},
    "unbatched": {},
    "need_weights": {},
}


@pytest.mark.parametrize(
    ("name", "setting"), [(name, setting) for name in LAYERS for setting in sorted(LAYERS[name].takes)]
)
def test_what_is_taken_is_heard(bench, name, setting):
    kind = find_layer(name)

    def run(asked):
        sizes = ASKED[setting] if asked else {}
        spec = bench.spec(name, embed_dim=32, num_heads=4, training=setting == "dropout", **sizes)
        inputs = InputSpec(batch=1, seq_len=5, unbatched=asked and setting == "unbatched")
        need_weights = not (asked and setting == "need_weights")
        subject = layer_called(kind.build(spec), spec, inputs, RunSpec(need_weights=need_weights), name)
        output, weights = subject.plain()
        return [output] if weights is None else [output, weights]

    heard, plain = run(True), run(False)
    assert len(heard) != len(plain) or any(
        left.shape != right.shape or not torch.allclose(left, right, rtol=0, atol=1e-9)
        for left, right in zip(heard, plain, strict=True)
    )
