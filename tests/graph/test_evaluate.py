"""Tensors of a recording, computed again from what the run began with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.graph.evaluate import CannotReplayError, Replay
from mha_inspect.naming.subject import run


class Turned(nn.Module):
    """Writes into the mask that it is given."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = (x @ x.mT).masked_fill(mask.logical_not_(), -torch.inf).softmax(-1)
        return weights @ x


def test_what_it_begins_with_is_not_written_into() -> None:
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    recording = run(Turned(), (torch.randn(2, 5, 8), allowed.clone()), {}).recording
    barred = next(op for op in recording.ops if op.base_name == "masked_fill").inputs[1]
    first = next(named.tensor for named in recording.inputs if named.name == "mask")
    given = allowed.clone()
    assert torch.equal(Replay(recording, {first.id: given}).value(barred), ~allowed)
    assert torch.equal(given, allowed)


def test_what_nothing_writes_into_is_not_copied() -> None:
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()

    class Barred(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (x @ x.mT).masked_fill(mask.mT, -torch.inf).softmax(-1) @ x

    recording = run(Barred(), (torch.randn(2, 5, 8), allowed), {}).recording
    barred = next(op for op in recording.ops if op.base_name == "masked_fill").inputs[1]
    leaves = {named.tensor.id: allowed for named in recording.inputs if named.name == "mask"}
    assert Replay(recording, leaves).value(barred).data_ptr() == allowed.data_ptr()


class Chosen(nn.Module):
    """Opens to each query those two of the keys before it that an indexer scores highest."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        ahead = torch.full((length, length), -torch.inf).triu(1)
        chosen = (self.index(x) @ x.mT + ahead).topk(2, dim=-1).indices
        opened = torch.full((len(x), length, length), -torch.inf).scatter(-1, chosen, 0.0) + ahead
        self.bias = self.index(x) @ x.mT
        return (self.q(x) @ self.k(x).mT + opened + self.bias).softmax(-1) @ self.v(x)


@pytest.mark.parametrize("keep", [False, True])
def test_what_scores_choose_is_known_whether_tensors_are_kept_or_not(keep: bool) -> None:
    torch.manual_seed(0)
    (attention,) = mha_inspect.trace(Chosen(), torch.randn(2, 6, 8), keep=keep).attentions
    assert attention.kind == ("self", "causal")


def test_a_product_is_not_computed_again_for_itself() -> None:
    module, x = Chosen(), torch.randn(2, 6, 8)
    recording = run(module, (x,), {}).recording
    leaves = {named.tensor.id: module.get_parameter(named.name) for named in recording.parameters}
    leaves[recording.inputs[0].tensor.id] = x
    *_, opened, bias = (op.inputs[1] for op in recording.ops if op.base_name == "add")
    with pytest.raises(CannotReplayError, match="it hangs on a product"):
        Replay(recording, leaves).value(bias)
    with torch.no_grad():
        module(x)
    assert ((Replay(recording, leaves).value(opened) == 0).sum(-1) <= 2).all()
