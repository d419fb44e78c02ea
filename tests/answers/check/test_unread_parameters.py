"""Parameters of an attention that no operation of the run reads: a suspicion, whatever their shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.reports.check import Finding
from mha_inspect.running.subject import Subject

E, H = 24, 3


class Sinks(nn.Module):
    """Attention with a sink for each head, a gain of the queries and a list of gates; `unread` leaves one out."""

    def __init__(self, unread: str = "") -> None:
        super().__init__()
        self.unread = unread
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.sinks, self.norm = nn.Parameter(torch.randn(H)), nn.RMSNorm(E // H)
        self.gates = nn.ParameterList([nn.Parameter(torch.randn(E)) for _ in range(2)])
        self.spare = nn.Linear(E, 5) if unread == "spare" else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (H, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        q = q if self.unread == "norm" else self.norm(q)
        scores = q @ k.mT / (E // H) ** 0.5
        weights = scores.softmax(-1)
        if self.unread != "sinks":
            sinks = self.sinks.view(1, H, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        y = (weights @ v).transpose(1, 2).flatten(2)
        for place, gate in enumerate(self.gates):
            y = y if self.unread == "gate" and place == 1 else y * gate.sigmoid()
        return self.o(y)


class Block(nn.Module):
    """The attention as a part of a module."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attn, self.norm = Sinks(**settings), nn.LayerNorm(E)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


def findings_of(module: nn.Module) -> list[Finding]:
    torch.manual_seed(2)
    findings = check(Subject(module.eval(), (torch.randn(2, 7, E),), {}), Intent()).findings
    return [finding for finding in findings if finding.check == "parameters"]


@pytest.mark.parametrize("outer", [Sinks, Block])
@pytest.mark.parametrize(
    ("unread", "named"),
    [("sinks", "sinks"), ("norm", "norm.weight"), ("gate", "gates.1"), ("spare", "spare.weight")],
)
def test_a_parameter_that_no_operation_reads_is_a_suspicion(outer: type[nn.Module], unread: str, named: str) -> None:
    (finding,) = findings_of(outer(unread=unread))
    path = "attn." if outer is Block else ""
    assert (finding.sentence, finding.sure) == (f"{path}{named} is unused.", False)


@pytest.mark.parametrize("outer", [Sinks, Block])
def test_parameters_that_are_read_are_none(outer: type[nn.Module]) -> None:
    assert findings_of(outer()) == []
