"""Tensors of a recording, computed again from what the run began with."""

from __future__ import annotations

import torch
from torch import nn

from mha_inspect.graph.evaluate import Replay
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
