"""Where each head's part of each parameter is, by changing it and looking at which head moves; and weights carried."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.measure.weights import Weights, copy_by_head, weights_of
from mha_inspect.naming.parameters import projections
from mha_inspect.running.subject import Subject

from ..built import Layer, built_layer
from ..corpus.every import ENTRIES

E, H, G, D = 22, 6, 3, 5


class Grouped(nn.Module):
    """Query head h reads key head h // 2 or, interleaved, h % 3. It keeps what its heads give."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.qkv = nn.Linear(E, (H + 2 * G) * D)
        self.o = nn.Linear(H * D, E)
        self.weights, self.contexts = torch.zeros(()), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([H * D, G * D, G * D], dim=-1)
        q, k, v = (side.unflatten(-1, (-1, D)).transpose(1, 2) for side in (q, k, v))
        if self.interleaved:
            k, v = (side.repeat(1, H // G, 1, 1) for side in (k, v))
        else:
            k, v = (side.repeat_interleave(H // G, dim=1) for side in (k, v))
        self.weights = (q @ k.mT / D**0.5).softmax(-1)
        self.contexts = self.weights @ v
        return self.o(self.contexts.transpose(1, 2).flatten(2))


def read(module: nn.Module, *args: Tensor) -> Weights:
    with torch.no_grad():
        (weights,) = weights_of(Subject(module, args, {}).recorded(), module)
    return weights


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_shared_key_head_moves_the_heads_that_it_is_told_to_serve(interleaved: bool) -> None:
    torch.manual_seed(0)
    module, x = Grouped(interleaved), torch.randn(2, 7, E)
    weights = read(module, x)
    expected = [head % G if interleaved else head // (H // G) for head in range(H)]
    assert weights.users() == expected
    with torch.no_grad():
        module(x)
        before = module.weights.clone(), module.contexts.clone()
        for part, key_head in itertools.product(("W_k", "b_v"), range(G)):
            kept = weights.read()
            changed = kept[part].clone()
            changed[key_head] += 1
            weights.write({part: changed})
            module(x)
            after = (module.weights, module.contexts)
            weights.write(kept)
            place = 0 if part == "W_k" else 1
            moved = [not torch.equal(before[place][:, head], after[place][:, head]) for head in range(H)]
            assert moved == [user == key_head for user in expected]


def test_weights_that_the_forward_makes_of_several_are_not_claimed() -> None:
    module = ENTRIES["Base"].made()
    torch.nn.utils.parametrizations.weight_norm(module.q)
    (of_attention,) = projections(Subject(module, (torch.randn(2, 7, E),), {}).recorded())
    by_part = {projection.part: projection for projection in of_attention}
    assert not by_part["W_q"].is_whole
    assert by_part["W_k"].is_whole
    weights = read(module, torch.randn(2, 7, E))
    assert weights.missing
    assert "W_q" in weights.missing[0]


def filled(layer: str, **sizes: int) -> tuple[Layer, Weights]:
    spec = AttentionSpec(**{"embed_dim": 12, "num_heads": 3, **sizes})  # type: ignore[arg-type]
    forward = built_layer(spec, InputSpec(batch=2, seq_len=5), RunSpec(), layer)
    with torch.no_grad():
        for parameter in forward.module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        (weights,) = weights_of(forward.recorded(), forward.module)
    return forward, weights


PLAIN = [layer for layer in LAYERS if layer not in ("narrow", "wide", "bert")]


@pytest.mark.parametrize(("source", "destination"), [*itertools.pairwise([*PLAIN, PLAIN[0]])])
def test_carried_weights_give_the_same_output(source: str, destination: str) -> None:
    torch.manual_seed(0)
    (ours, given), (theirs, target) = filled(source), filled(destination)
    carried = copy_by_head(given, target)
    assert not carried.not_copied
    assert set(carried.copied) == set(given.shapes)
    with torch.no_grad():
        left, right = (result[0] if isinstance(result := f.plain(), tuple) else result for f in (ours, theirs))
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_what_has_no_place_is_left_out_and_said() -> None:
    torch.manual_seed(0)
    carried = copy_by_head(filled("torch")[1], filled("narrow")[1])
    assert [part.part for part in carried.not_copied] == ["W_q", "W_k", "W_v"]
    assert carried.not_copied[0].reason == "it has room for 3 blocks of [4, 4] only"
    bert = filled("bert")[1]
    assert [part.part for part in copy_by_head(filled("torch")[1], bert).not_copied] == ["W_o", "b_o"]
    back = copy_by_head(bert, filled("torch")[1])
    assert (back.not_copied, back.filled) == ((), ("W_o", "b_o"))


def test_keys_that_differ_cannot_be_shared_and_equal_ones_can() -> None:
    torch.manual_seed(0)
    fewer, all_of_them = filled("grouped-query", num_heads=4, num_kv_heads=2)[1], filled("torch", num_heads=4)[1]
    assert {part.part for part in copy_by_head(all_of_them, fewer).not_copied} == {"W_k", "W_v", "b_k", "b_v"}
    assert not copy_by_head(fewer, all_of_them).not_copied
    assert not copy_by_head(all_of_them, fewer).not_copied
