"""Where each head's part of each parameter is, by changing it and looking at which head moves; and weights carried."""

from __future__ import annotations

import itertools

import pytest
import torch

from mha_inspect.layers.catalog import LAYERS
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.measure.weights import Weights, copy_by_head, weights_of

from ..built import Layer, built_layer

E, H, G, D = 22, 6, 3, 5


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
