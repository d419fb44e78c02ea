"""A run that takes more memory than tensors may take while they are kept goes on without keeping any."""

from __future__ import annotations

import torch
from torch import Tensor

from mha_inspect import trace

from ..call.styles import Attention


class WritesLater(Attention):
    """Scores, then something that takes more than all the room, and then a mask that is added in place."""

    def forward(self, x: Tensor) -> Tensor:
        def masked(scores: Tensor) -> Tensor:
            scores += torch.zeros(1, 1, 4200, 4200)[..., : x.shape[1], : x.shape[1]]
            return scores

        return self.attended(x, masked)


def test_what_was_let_go_of_may_be_written_over() -> None:
    size = 4 * 4200**2
    assert size > 64 * 2**20  # more than a judged trace keeps
    report = trace(WritesLater(32, 4).eval(), torch.randn(2, 12, 32))
    assert len(report.attentions) == 1
    assert not report.failure
