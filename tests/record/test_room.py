"""A run that takes more memory than tensors may take while they are kept goes on without keeping any."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha_inspect import trace


class WritesLater(nn.Module):
    """Scores, then something that takes more than all the room, and then a mask that is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.mT / 8**0.5
        bias = torch.zeros(1, 1, 4200, 4200)[..., : x.shape[1], : x.shape[1]]
        scores += bias
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_was_let_go_of_may_be_written_over() -> None:
    size = 4 * 4200**2
    assert size > 64 * 2**20  # more than a judged trace keeps
    report = trace(WritesLater().eval(), torch.randn(2, 12, 32))
    assert len(report.attentions) == 1
    assert not report.failure
