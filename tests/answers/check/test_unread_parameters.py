"""Parameters of an attention that no operation of the run reads: a suspicion, whatever their shape."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mha_inspect

from ...corpus.planted import D, E, H, Right


class Sinks(Right):
    """Attention with a sink for each head, a gain of the queries and a list of gates; `unread` leaves one out."""

    def __init__(self, unread: str = "") -> None:
        super().__init__()
        self.unread = unread
        self.sinks, self.norm = nn.Parameter(torch.randn(H)), nn.RMSNorm(D)
        self.gates = nn.ParameterList([nn.Parameter(torch.randn(E)) for _ in range(2)])
        self.spare = nn.Linear(E, 5) if unread == "spare" else None

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return q if self.unread == "norm" else self.norm(q), k, v

    def weigh(self, scores: Tensor) -> Tensor:
        if self.unread == "sinks":
            return scores.softmax(-1)
        sinks = self.sinks.view(1, H, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]

    def leave(self, x: Tensor) -> Tensor:
        x = x * self.gates[0].sigmoid()
        return self.o(x if self.unread == "gate" else x * self.gates[1].sigmoid())


class Block(nn.Module):
    """The attention as a part of a module."""

    def __init__(self, unread: str) -> None:
        super().__init__()
        self.attn, self.norm = Sinks(unread), nn.LayerNorm(E)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Sinks("sinks"), ["sinks"]),
        (Sinks("norm"), ["norm.weight"]),
        (Sinks("spare"), ["spare.weight"]),
        (Block("gate"), ["attn.gates.1"]),
        (Block(""), []),
    ],
)
def test_a_parameter_that_no_operation_reads_is_a_suspicion(module: nn.Module, named: list[str]) -> None:
    torch.manual_seed(2)
    report = mha_inspect.check(module.eval(), torch.randn(2, 7, E))
    findings = [(finding.sentence, finding.sure) for finding in report.findings if finding.check == "parameters"]
    assert findings == [(f"{name} is unused.", False) for name in named]
