"""A cut of a subject shows what the whole run does there, whatever its arguments are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mha_inspect.answers import head_runs as cutting
from mha_inspect.answers.head_runs import cut, layouts_of
from mha_inspect.call.load import load_layer
from mha_inspect.layers.spec import AttentionSpec, InputSpec, RunSpec
from mha_inspect.naming.subject import Subject
from mha_inspect.record.arguments import first_tensor, tensors_in

BATCH, QUERY, HEADS = 7, 11, 2


def first_layout(own: Subject) -> Any:
    return next(iter(layouts_of(own)))


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "POSITIONS", 5)
    monkeypatch.setattr(cutting, "ROWS", 3)
    monkeypatch.setattr(cutting, "_MANY", 1)


@pytest.mark.parametrize("mask", [None, (QUERY, QUERY), (BATCH * HEADS, QUERY, QUERY)])
@pytest.mark.parametrize(("layer", "settings"), [("torch", {}), ("split-heads", {})])
def test_few_sequences_give_what_the_whole_gives_there(tmp_path, monkeypatch, layer, settings, mask) -> None:
    generator = torch.Generator().manual_seed(0)
    file = None
    if mask is not None:
        torch.save(torch.randn(mask, generator=generator), file := tmp_path / "mask.pt")
    inputs = InputSpec(batch=BATCH, seq_len=QUERY, padding=(1, 3, 2, 0, 4, 1, 2), attn_mask=file)
    own = load_layer(AttentionSpec(embed_dim=22, num_heads=HEADS, **settings), inputs, RunSpec(), layer)
    monkeypatch.setattr(cutting, "POSITIONS", QUERY)
    monkeypatch.setattr(cutting, "_WORTH_IT", 1)
    part = cut(own, first_layout(own))
    whole, few = (first_tensor(one.plain()) for one in (own, part))
    torch.testing.assert_close(few, whole[:3])


def test_few_positions_of_a_causal_layer_give_what_the_whole_gives_there() -> None:
    inputs = InputSpec(batch=BATCH, seq_len=QUERY, causal=True)
    own = load_layer(AttentionSpec(embed_dim=22, num_heads=HEADS), inputs, RunSpec())
    part = cut(own, first_layout(own))
    given = [tensor for _, tensor in tensors_in((part.args, part.kwargs)) if tensor.dim() == 3]
    assert {tuple(tensor.shape) for tensor in given} == {(3, 5, 22)}
    whole, few = (first_tensor(one.plain()) for one in (own, part))
    torch.testing.assert_close(few, whole[:3, :5])


def test_a_tensor_that_is_given_twice_stays_one_and_no_view_of_the_whole() -> None:
    x = torch.randn(BATCH, QUERY, 6)
    own = Subject(nn.Identity(), (x, [x]), {"y": x})
    part = cut(own, first_layout(own))
    assert part.args[0] is part.args[1][0] is part.kwargs["y"]
    assert part.args[0].untyped_storage().nbytes() == 3 * 5 * 6 * 4


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(2, 5, 6), torch.randn(9, 9, 6), torch.randn(1, 3, 32, 32), torch.tensor(1.0)],
    ids=["small", "as many sequences as positions", "image", "number"],
)
def test_what_cannot_be_cut_or_saves_nothing_is_left_whole(tensor) -> None:
    assert list(layouts_of(Subject(nn.Identity(), (tensor,), {}))) == []
