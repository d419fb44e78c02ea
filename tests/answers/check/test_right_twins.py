"""Right modules that look like a mistake are not accused, and wrong ones beside them still are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mha_inspect import Intent, check

WIDTH, H, D, N = 32, 4, 8, 9
CAUSAL = Intent(causal=True)


class Attention(nn.Module):
    """An attention that adds the mask that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / math.sqrt(D)
        if mask is not None:
            scores = scores + mask
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def given(batch: int = 2, length: int = N, seed: int = 0) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def future(length: int) -> Tensor:
    return torch.full((length, length), -math.inf).triu(1)


class Gated(nn.Module):
    """The gate is zero before training, as in Flamingo."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.gate = Attention(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate.tanh() * self.attention(x)


def test_a_gate_of_zero_is_no_unused_result() -> None:
    report = check(Gated(), given())
    assert not report.findings
    assert any("multiplied by zeros" in skipped.reason for skipped in report.left_out)


class WithPrefix(nn.Module):
    """Learned tokens, or an image, before the sequence see each other; the sequence is causal."""

    leaks = False

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.prefix = Attention(), nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, text: Tensor, image: Tensor | None = None) -> Tensor:
        prefix = self.prefix.expand(len(text), -1, -1) if image is None else image
        count = prefix.shape[1]
        both = torch.cat([prefix, text], 1)
        mask = future(both.shape[1])
        mask[:count, :count] = 0
        if self.leaks:
            mask[count, count + 1] = 0
        return self.attention(both, mask)[:, count:]


class LeakyPrefix(WithPrefix):
    leaks = True


@pytest.mark.parametrize("image", [None, given(length=6, seed=1)])
def test_a_prefix_that_sees_itself_is_no_leak(image: Tensor | None) -> None:
    assert not check(WithPrefix(), given(), image, intent=CAUSAL).findings
    sentences = [finding.sentence for finding in check(LeakyPrefix(), given(), image, intent=CAUSAL).findings]
    assert any("future" in sentence for sentence in sentences)


class Similarities(nn.Module):
    """One number for each pair of batch items, as a contrastive loss takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        pooled = functional.normalize(self.attention(x).mean(1), dim=-1)
        return pooled @ pooled.T


class MixedSimilarities(Similarities):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


def test_similarities_of_items_do_not_mix_them() -> None:
    assert not check(Similarities(), given(3)).findings
    (finding,) = check(MixedSimilarities(), given(3)).findings
    assert finding.check == "batch"
