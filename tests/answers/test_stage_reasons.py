"""The first stage that differs is told why: what is named was tried, and gives the numbers of the other side."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mha_inspect import check, diff
from mha_inspect.measure.replaced import replacement

WIDTH, H, D, N = 32, 4, 8, 9
CALLED = ("on the left", "on the right")


class Attention(nn.Module):
    """Causal attention of a sequence with a norm, a rotation and a scale of its own."""

    eps, start, dtype, order = 1e-5, 0, torch.float32, (0, 1, 2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def differs(self) -> bool:
        return True

    def scale(self) -> float:
        return 1 / D**0.5

    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), eps=self.eps if self.differs() else 1e-5)

    def turned(self, heads: Tensor, start: int = 0) -> Tensor:
        positions = torch.arange(heads.shape[2]) + (start if self.differs() else 0)
        angles = torch.outer(positions.float(), 100.0 ** (-torch.arange(D // 2) / (D // 2)))
        a, b = heads.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (H, D)).transpose(1, 2)

    def values(self, v: Tensor) -> Tensor:
        return v.to(self.dtype).to(v.dtype)[:, list(self.order)] if self.differs() else v

    def mask(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)

    def forward(self, x: Tensor) -> Tensor:
        x = self.normed(x)
        q, k = self.turned(self.split(self.q(x)), self.start), self.turned(self.split(self.k(x)))
        v = self.values(self.split(self.v(x)))
        weights = self.mask(q @ k.mT * self.scale()).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class LargeEpsilon(Attention):
    eps = 1e-2


class LaterPositions(Attention):
    start = 3


class Rounded(Attention):
    dtype = torch.bfloat16


class HeadsMoved(Attention):
    order = (1, 2, 3, 0)


class Doubled(Attention):
    def values(self, v: Tensor) -> Tensor:
        return 2 * v if self.differs() else v


REASONS = {
    LargeEpsilon: "eps 1e-05 {0} and 0.01 {1}",
    LaterPositions: "Position p {0} is q_heads of position p - 3 {1}",
    Rounded: "v_heads {1} is rounded to bfloat16",
    HeadsMoved: "read in another order: heads rolled by 1",
    Doubled: "v_heads {0} is 0.5 times v_heads {1}",
}


def given() -> Tensor:
    return torch.randn(2, N, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", REASONS)
def test_a_diff_of_modules_names_what_was_tried(kind: type[Attention]) -> None:
    report = diff(Attention(), kind(), given())
    assert report.outcome == "differs"
    assert any(REASONS[kind].format(*CALLED) in reason.sentence for reason in report.reasons), report.answer


@pytest.mark.parametrize("kind", [LargeEpsilon, Doubled])
def test_train_beside_eval_names_the_same(kind: type[Attention]) -> None:
    class InTraining(kind):  # type: ignore[valid-type,misc]
        def differs(self) -> bool:
            return bool(self.training)

    (finding,) = [finding for finding in check(InTraining(), given()).findings if finding.check == "training"]
    assert "the first difference is in" in finding.sentence
    assert REASONS[kind].format("in eval", "in train") in finding.sentence


class OtherScaleInTraining(Attention):
    def scale(self) -> float:
        return 1.0 if self.training else 1 / D**0.5


class OpenInTraining(Attention):
    def mask(self, scores: Tensor) -> Tensor:
        return scores if self.training else super().mask(scores)


def test_train_with_another_scale_or_mask_is_told() -> None:
    (scaled,) = [finding for finding in check(OtherScaleInTraining(), given()).findings if finding.check == "training"]
    assert "divided by √8 in eval and not scaled in train" in scaled.sentence
    (opened,) = [finding for finding in check(OpenInTraining(), given()).findings if finding.check == "training"]
    assert "query 0 sees key 0 in eval and keys 0–8 in train" in opened.sentence


class NoisyInTraining(Attention):
    """Adds numbers that no replacement explains."""

    def values(self, v: Tensor) -> Tensor:
        return v + v.roll(1, 2).sin() if self.training else v


def test_without_a_replacement_only_the_stage_is_named() -> None:
    (finding,) = [finding for finding in check(NoisyInTraining(), given()).findings if finding.check == "training"]
    assert finding.sentence.endswith("the first difference is in v_heads of attention 1.")


def test_the_module_is_as_before_and_right_modules_have_no_finding() -> None:
    module = OtherScaleInTraining()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    check(module, given())
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not check(Attention(), given()).findings


@pytest.mark.parametrize("seed", range(4))
def test_chance_is_no_replacement(seed: int) -> None:
    torch.manual_seed(seed)
    left, right = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    assert replacement("k_heads", "batch heads key head_dim", (left, right), 1e-5, CALLED) is None
    moved = replacement("k_heads", "batch heads key head_dim", (left, left.roll(2, 2)), 1e-5, CALLED)
    assert moved is not None
    assert moved.kind == "order"
    later = replacement("k_heads", "batch heads key head_dim", (left[:, :, :-1], left[:, :, 1:]), 1e-5, CALLED)
    assert later is not None
    assert later.sentence == "Position p of k_heads on the left is position p - 1 on the right."
