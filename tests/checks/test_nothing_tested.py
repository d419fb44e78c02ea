"""A check that had nothing to test, or could judge only a part, has not passed: it is skipped with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.errors import InputError
from mha_inspect.reports.check import CheckReport

from ..corpus.planted import B, D, E, H, N, Right, angles, future, halves


def checked(module: nn.Module, *args: Tensor, **intent: Any) -> CheckReport:
    torch.manual_seed(0)
    args = args or (torch.randn(B, N, E),)
    return mha_inspect.check(module.eval(), *args, intent=Intent(**intent))


def skipped(report: CheckReport) -> dict[str, str]:
    return {check.check: check.reason for check in report.left_out}


def accused(report: CheckReport) -> list[str]:
    return [finding.check for finding in report.findings]


# -- grouped -----------------------------------------------------------------------------------------------------------


def added_up(_: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Add up the queries of a group, for key heads that several query heads share."""
    summed = q.unflatten(1, (2, -1)).sum(2)
    weights = (summed @ k.mT / D**0.5).softmax(-1)
    return (weights @ v).repeat_interleave(2, 1)


def test_queries_that_are_added_up_are_not_passed_as_grouped() -> None:
    report = checked(Right(kv_heads=2, attend=added_up))
    assert "grouped" in skipped(report)


# -- training ----------------------------------------------------------------------------------------------------------


class TwoPaths(Right):
    """By hand in training, if weights are dropped then, and with a fused kernel else."""

    def __init__(self, rate: float = 0.2, scale: float = D**-0.5) -> None:
        super().__init__()
        self.drop, self.scale = rate, scale

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.training and self.drop:
            return F.dropout((q @ k.mT * self.scale).softmax(-1), self.drop) @ v
        return F.scaled_dot_product_attention(q, k, v)


def test_the_path_of_training_is_entered() -> None:
    report = checked(TwoPaths(scale=1.0))
    assert accused(report) == ["training"]
    assert "not scaled in train" in report.findings[0].sentence
    assert accused(checked(TwoPaths())) == []


def test_a_path_that_training_never_takes_is_no_fault() -> None:
    report = checked(TwoPaths(rate=0.0, scale=1.0))
    assert accused(report) == []
    assert "training" not in skipped(report)


@pytest.mark.parametrize(
    "drop",
    [
        lambda m, w: F.dropout(w, 0.3, m.training),
        lambda m, w: torch.dropout(w, 0.3, m.training),
        lambda m, w: F.alpha_dropout(w, 0.3, m.training),
    ],
)
def test_a_rate_that_no_attribute_holds_drops_nothing(drop: Callable[[Any, Tensor], Tensor]) -> None:
    report = checked(Right(weigh=lambda m, s: drop(m, s.softmax(-1))))
    assert report.ok
    assert "training" not in skipped(report)


def test_numbers_that_are_dropped_by_hand_are_unknown() -> None:
    def by_hand(m: Any, scores: Tensor) -> Tensor:
        kept = torch.rand(scores.shape) > 0.1
        return scores.softmax(-1) * kept / 0.9 if m.training else scores.softmax(-1)

    report = checked(Right(weigh=by_hand))
    assert report.ok
    assert "training" in skipped(report)


# -- rotary ------------------------------------------------------------------------------------------------------------


def turned(x: Tensor) -> Tensor:
    """Return what `halves` does, by products with matrices."""
    turns = angles(x.shape[-2])
    cos, sin = torch.diag_embed(turns.cos()), torch.diag_embed(turns.sin())
    matrices = torch.cat([torch.cat([cos, -sin], -1), torch.cat([sin, cos], -1)], -2)
    return (matrices @ x[..., None])[..., 0]


def scores_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / D**0.5).softmax(-1) @ v


def test_a_rotation_of_which_one_side_is_unknown_is_not_passed() -> None:
    def attend(_: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores_of(halves(q), turned(k), v)

    report = checked(Right(attend=attend))
    assert accused(report) == []
    assert "rotary" in skipped(report)


def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (2, -1))
    return scores_of(q, k[:, :, None], v[:, :, None]).flatten(1, 2)


@pytest.mark.parametrize("head", range(H))
def test_every_query_head_is_compared_with_its_key_head(head: int) -> None:
    def attend(_: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned_back = halves(q)
        turned_back[:, head] = halves(q.flip(-2))[:, head].flip(-2)
        return shared(turned_back, halves(k), v)

    def twin(_: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared(halves(q), halves(k), v)

    assert accused(checked(Right(kv_heads=2, attend=attend))) == ["rotary"]
    right = checked(Right(kv_heads=2, attend=twin))
    assert "rotary" in {passed.check for passed in right.passed}


# -- masks -------------------------------------------------------------------------------------------------------------


def causally(_: Right, scores: Tensor) -> Tensor:
    return scores.masked_fill(future(scores), -torch.inf)


def test_without_a_mask_no_masking_is_passed() -> None:
    assert "masking" in skipped(checked(Right()))
    assert "masking" not in skipped(checked(Right(mask=causally)))


def test_a_window_that_hides_no_key_is_not_passed() -> None:
    with pytest.raises(InputError, match="longer input"):
        checked(Right(mask=causally), window=N)


def test_one_token_shows_no_order() -> None:
    with pytest.raises(InputError, match="who sees whom"):
        checked(Right(mask=causally), torch.randn(B, 1, E), causal=True)


class Cross(Right):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(y)), self.split(self.v(y))
        return self.o(self.join(scores_of(q, k, v)))


def test_tokens_that_attend_to_others_alone_are_not_passed_as_mixed() -> None:
    report = checked(Cross(), torch.randn(B, N, E), torch.randn(B, 5, E))
    assert accused(report) == []
    assert "mixing" in skipped(report)


# -- several attentions, of which one cannot be judged -----------------------------------------------------------------


class Two(nn.Module):
    """One attention with heads that are merged by a transpose, and one in a loop over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Right(), Right(attend=one_at_a_time)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def one_at_a_time(_: Right, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True)
    return torch.stack([scores_of(*head) for head in heads], 1)


def test_a_part_that_could_not_be_judged_is_told() -> None:
    report = checked(Two())
    assert accused(report) == []
    assert "only some attentions" in skipped(report)["heads"]


# -- batch -------------------------------------------------------------------------------------------------------------


def test_an_item_that_changes_the_one_before_it_alone_is_found() -> None:
    def leave(module: Right, x: Tensor) -> Tensor:
        later = torch.cat((x[1:], torch.zeros_like(x[:1])))
        return module.o(x + later)

    assert "batch" in accused(checked(Right(leave=leave)))
