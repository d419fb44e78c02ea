"""Learned keys before, after and around those of the input, and heads in another order: each formula says so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 7, 3, 4
WIDTH = HEADS * HEAD_DIM
PATTERN = "batch key (heads head_dim) -> batch heads key head_dim"


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


class Further(nn.Module):
    """Attention to the input and to learned keys; `places` says where they are put."""

    def __init__(self, places: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.keys, self.values = nn.Parameter(torch.randn(1, 2, WIDTH)), nn.Parameter(torch.randn(1, 2, WIDTH))
        self.more_keys, self.more_values = (nn.Parameter(torch.randn(1, 1, WIDTH)) for _ in range(2))
        self.places = places

    def joined(self, projected: Tensor, learned: Tensor, more: Tensor) -> Tensor:
        learned, more = (side.expand(len(projected), -1, -1) for side in (learned, more))
        if self.places == "before":
            return torch.cat([learned, projected], dim=1)
        if self.places == "after":
            return torch.cat([projected, learned], dim=-2)
        return torch.cat([learned, projected, more], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        k = split(self.joined(self.k(x), self.keys, self.more_keys))
        v = split(self.joined(self.v(x), self.values, self.more_values))
        weights = (split(self.q(x)) @ k.mT / 2).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


WORDS = {
    "before": ("plus 2 prepended keys", "plus 2 prepended values"),
    "after": ("plus 2 appended keys", "plus 2 appended values"),
    "around": ("plus 3 keys, 2 prepended and 1 appended", "plus 3 values, 2 prepended and 1 appended"),
}


@pytest.mark.parametrize("places", WORDS)
def test_learned_keys_are_said_to_be_where_they_are(places: str) -> None:
    torch.manual_seed(0)
    (shown,) = mha_inspect.trace(Further(places).eval(), torch.randn(BATCH, LENGTH, WIDTH)).attentions
    formulas = {stage.name: stage.formula for stage in shown.stages}
    assert (formulas["k_heads"], formulas["v_heads"]) == tuple(f"{PATTERN}, {words}" for words in WORDS[places])


def test_a_learned_key_has_its_place_among_the_parameters() -> None:
    torch.manual_seed(0)
    report = mha_inspect.params(Further("around").eval(), torch.randn(BATCH, LENGTH, WIDTH))
    roles = {parameter.name: parameter.role for parameter in report.parameters}
    assert roles["keys"] == "learned, and prepended to the keys"
    assert roles["values"] == "learned, and prepended to the values"
    assert roles["more_keys"] == "learned, and appended to the keys"


ORDERS = {
    "flip": lambda heads: heads.flip(1),
    "roll": lambda heads: heads.roll(1, dims=1),
    "index": lambda heads: heads[:, [2, 0, 1]],
    "index_select": lambda heads: heads.index_select(1, torch.tensor([2, 0, 1])),
}


class Reordered(Further):
    def __init__(self, order: str, stage: str) -> None:
        super().__init__("after")
        self.order, self.stage = ORDERS[order], stage

    def laid(self, heads: Tensor, stage: str) -> Tensor:
        return self.order(heads) if stage == self.stage else heads

    def forward(self, x: Tensor) -> Tensor:
        sides = (("q_heads", self.q), ("k_heads", self.k), ("v_heads", self.v))
        q, k, v = (self.laid(split(side(x)), stage) for stage, side in sides)
        context = self.laid((q @ k.mT / 2).softmax(-1) @ v, "concat")
        return self.o(context.transpose(1, 2).flatten(2))


CASES = [("flip", "q_heads"), ("roll", "k_heads"), ("index", "v_heads"), ("index_select", "concat")]


@pytest.mark.parametrize(("order", "stage"), CASES)
def test_heads_in_another_order_are_no_plain_rearrangement(order: str, stage: str) -> None:
    torch.manual_seed(0)
    (shown,) = mha_inspect.trace(Reordered(order, stage).eval(), torch.randn(BATCH, LENGTH, WIDTH)).attentions
    formulas = {shown_stage.name: shown_stage.formula for shown_stage in shown.stages}
    source = "context" if stage == "concat" else f"{stage[0]}_proj"
    assert formulas[stage] == f"{source} in heads, then {order}"
    for plain in {"q_heads", "k_heads", "v_heads", "concat"} - {stage}:
        assert " -> " in formulas[plain]
