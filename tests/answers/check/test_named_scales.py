"""A scale that is made of another width than the head's is named by its formula, and is no finding by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.running.subject import Subject


class Wide(nn.Module):
    """8 heads of 24 features, of an input of 64 features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(64, 8 * 24) for _ in range(3))
        self.o = nn.Linear(8 * 24, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (8, 24)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = (q @ k.mT * (64 // 8) ** -0.5).softmax(-1)
        result: Tensor = self.o((weights @ v).transpose(1, 2).flatten(2))
        return result


def test_a_scale_of_another_width_is_named() -> None:
    subject = Subject(Wide(), (torch.randn(2, 9, 64),), {})
    report = check(subject, Intent())
    assert report.findings == ()
    (scale,) = [fact.sentence for fact in report.facts if fact.name == "scale"]
    assert scale == "0.3536 = 1/√(embed_dim / heads) (head_dim 24)"
    (finding,) = check(subject, Intent(scale="sqrt_head_dim")).findings
    assert "scaled by 0.3536 = 1/√(embed_dim / heads); expected 1/√24 = 0.2041" in finding.sentence
