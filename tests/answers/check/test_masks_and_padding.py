"""Masks with padding, at sizes that coincide: right ones are not accused, and what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.answers.decode import decoded
from mha_inspect.layers.spec import Show
from mha_inspect.reports.check import CheckReport, Finding
from mha_inspect.running.subject import Subject

from ...corpus.planted import MADE, B, E, H, N, Padded, Right, folded, future

KEEP: dict[str, Any] = {"padding": "mask", "padding_true": "keep"}


class Causal(Right):
    """Causal attention with a mask of padding, `batch key`, over past and new keys."""

    def seen(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def forward(self, x: Tensor, mask: Tensor, cache: tuple[Tensor, Tensor] | None = None) -> Any:
        q, k, v = self.heads(x)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        seen = self.seen(q.shape[2], k.shape[2]) & mask.bool()[:, None, None]
        context = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(self.join(context)), (k, v)


class Late(Causal):
    """Each query sees one future token."""

    def seen(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries + 1)


class Gap(Causal):
    """No query sees the token two before it."""

    def seen(self, queries: int, keys: int) -> Tensor:
        whole = super().seen(queries, keys)
        return whole & ~(whole.tril(keys - queries - 2) & ~whole.tril(keys - queries - 3))


def marks(lengths: tuple[int, ...], size: int) -> Tensor:
    return (torch.arange(size)[None] < torch.tensor(lengths)[:, None]).long()


def checked(module: nn.Module, mask: Tensor, **intent: Any) -> CheckReport:
    torch.manual_seed(0)
    return mha_inspect.check(module.eval(), torch.randn(*mask.shape, E), mask, intent=Intent(**intent))


def of_scores(module: nn.Module, **intent: Any) -> list[Finding]:
    """Return what is found in 6 tokens without a mask."""
    torch.manual_seed(0)
    return list(mha_inspect.check(module.eval(), torch.randn(2, 6, E), intent=Intent(**intent)).findings)


def faults(report: CheckReport) -> list[str]:
    return [finding.check for finding in report.findings if finding.sure]


def sight(report: CheckReport) -> str:
    (seen,) = [fact.sentence for fact in report.facts if fact.name == "who sees whom"]
    return seen


@pytest.mark.parametrize("lengths", [(4, 4), (1, 6)])
def test_causal_attention_with_padding_has_no_gaps(lengths: tuple[int, ...]) -> None:
    report = checked(Causal(), marks(lengths, 6), causal=True)
    assert faults(report) == []
    seen = sight(report)
    assert "causal" in seen
    assert "window" not in seen
    assert "gaps" not in seen


@pytest.mark.parametrize(("module", "said"), [(Late, "future"), (Gap, "all of its past")])
def test_a_wrong_mask_with_padding_is_found(module: type[Causal], said: str) -> None:
    report = checked(module(), marks((5, 4), 6), causal=True)
    (finding,) = [finding for finding in report.findings if finding.check == "causal"]
    assert said in finding.sentence


def test_as_many_items_as_tokens_change_nothing() -> None:
    """Of a mask of `batch key` no rows are cut as if they were queries, at 4 items of 4 tokens."""
    mask = marks((4,) * 4, 4)
    report = checked(Causal(), mask, causal=True, cache="cache", **KEEP)
    assert report.findings == ()
    assert {"padding", "cache"} <= {passed.check for passed in report.passed}
    proof = decoded(Subject(Causal().eval(), (torch.randn(4, 4, E), mask), {}), Show(), 2)[0].decode
    assert proof is not None
    assert proof.verdict == "same"


class Segments(Padded):
    """A token sees the tokens with its own mark: neither mark keeps a key."""

    def mask(self, scores: Tensor) -> Tensor:
        apart = self.padding[:, :, None] != self.padding[:, None]
        return scores.masked_fill(apart[:, None], -torch.inf)


class Safe(Padded):
    """Rows with every key masked out are filled with 0 against NaN, and weights of masked keys are set to 0."""

    def weigh(self, scores: Tensor) -> Tensor:
        seen = (self.padding[:, :, None] & self.padding[:, None])[:, None]
        masked = scores.masked_fill(~seen, -torch.inf).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        return masked.softmax(-1) * seen


@pytest.mark.parametrize(
    ("module", "lengths", "is_left"),
    [
        (Segments, (2, 8), True),
        (Safe, (8, 5), True),
        (Safe, (3, 8), False),
    ],
)
def test_right_masks_of_padding_are_not_accused(module: type[Padded], lengths: tuple[int, ...], is_left: bool) -> None:
    mask = marks(lengths, 8)
    report = checked(module(), mask.flip(1) if is_left else mask, **KEEP)
    assert faults(report) == []
    assert "padding" in {passed.check for passed in report.passed}


def lowered(number: float) -> Right:
    """Causal by a finite number."""
    return Right(mask=lambda module, scores: scores.masked_fill(future(scores), number))


@pytest.mark.parametrize(("number", "suspected"), [(-69.0, True), (-100.0, False)])
def test_a_finite_mask_that_changes_no_output_is_at_most_suspected(number: float, suspected: bool) -> None:
    findings = of_scores(lowered(number), causal=True)
    assert [(finding.check, finding.sure) for finding in findings] == [("masking", False)] * suspected


def prefixed(_: Right, scores: Tensor) -> Tensor:
    """Causal, but the first two tokens see each other: one pair of fifteen is of the future."""
    hidden = future(scores)
    hidden[:, :2] = False
    return scores.masked_fill(hidden, -1e9)


def test_one_pair_of_the_future_is_no_late_diagonal() -> None:
    (finding,) = of_scores(Right(mask=prefixed), causal=True)
    assert finding.sentence == "Positions can see future tokens."
    assert "1 of 15" in finding.evidence


def test_a_mask_of_ones_that_is_subtracted_loses_weight() -> None:
    subtracted = Right(mask=lambda module, scores: scores - future(scores).float())
    (finding,) = [finding for finding in of_scores(subtracted) if finding.check == "masking"]
    assert "subtracted" in finding.sentence
    assert finding.sentence.endswith("lose weight.")


class Joined(Padded):
    """Scores of `(batch heads) query key`, and a mask of `batch key` that may be tiled, or lie over the queries."""

    def __init__(self, *, tiled: bool = False, of_queries: bool = False) -> None:
        super().__init__(**folded())
        self.tiled, self.of_queries = tiled, of_queries

    def mask(self, scores: Tensor) -> Tensor:
        keep = self.padding.repeat(H, 1) if self.tiled else self.padding.repeat_interleave(H, 0)
        hidden = ~(keep[:, :, None] if self.of_queries else keep[:, None])
        return scores.masked_fill(hidden, -1e9)


def test_a_fix_is_laid_out_as_the_scores_are() -> None:
    mask = marks((6, 4, 5), 6)
    assert checked(Joined(), mask, **KEEP).findings == ()
    (finding,) = checked(Joined(tiled=True), mask, **KEEP).findings
    assert finding.sentence == "The mask of one batch item masks out keys of another item."
    assert "mask.repeat_interleave(heads, 0)[:, None, :]" in finding.fix
    (finding,) = checked(Joined(of_queries=True), mask, **KEEP).findings
    assert "queries instead of keys" in finding.sentence
    assert "mask.repeat_interleave(heads, 0)[:, None, :]" in finding.fix


class Summed(Right):
    """Softmax by hand, whose sum counts masked keys, or does not."""

    counts_masked = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * q.shape[-1] ** -0.5).exp()
        seen = scores.tril()
        return seen @ v / (scores if self.counts_masked else seen).sum(-1, keepdim=True)


def test_a_sum_that_counts_masked_keys_is_the_fault_and_no_mixing_of_positions() -> None:
    assert of_scores(Summed(counts_masked=False), causal=True) == []
    (finding,) = of_scores(Summed(), causal=True)
    assert finding.check == "softmax"
    assert "divided by something other than the sum" in finding.sentence
    assert "sum" in finding.fix


def test_the_keys_that_some_items_see_are_counted() -> None:
    assert sight(checked(Padded(), marks((1, 8), 8))).startswith("every query sees 1 to 8 of 8 keys")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("MaskBeforeCap", "undoes the mask"),
        ("ConvolutionSeesAhead", "no attention weight: another operation mixes positions."),
        ("CausalWithoutItself", " queries give no weight to their own key; the first is query 1."),
    ],
)
def test_a_mistake_is_told_with_what_it_does(name: str, said: str) -> None:
    (finding,) = mha_inspect.check(MADE[name](True), torch.randn(B, N, E), intent=Intent(causal=True)).findings
    assert said in f"{finding.sentence} {finding.evidence}"
