"""A cache and a mask of all tokens in one call, with padding on the left, as a loop that generates text calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.reports.check import CheckReport, Finding
from mha_inspect.running.subject import Subject

from ...corpus.planted import D, E, Right


def rotated(x: Tensor, at: Tensor) -> Tensor:
    """Rotate halves of `batch heads position head_dim` by positions, `batch position`."""
    half = x.shape[-1] // 2
    angles = (at[..., None].float() * 50.0 ** (-torch.arange(half) / half))[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Cached(Right):
    """Attention with a cache of all tokens or of a window, and a mask of `batch key`; `fault` breaks it."""

    def __init__(self, fault: str = "", *, window: int = 0) -> None:
        super().__init__()
        self.fault, self.window = fault, window

    def positions(self, mask: Tensor | None, start: int, count: int, batch: int) -> Tensor:
        """Return the positions of new tokens, `batch position`: those of real tokens, where a mask tells them."""
        is_counted = mask is None or self.fault in ("distances", "all tokens")
        if is_counted or (self.fault == "positions" and start):
            return torch.arange(start, start + count).expand(batch, -1)
        return (mask.long().cumsum(-1)[:, -count:] - 1).clamp(min=0)

    def seen(self, count: int, keys: int) -> Tensor:
        rows, columns = torch.arange(keys - count, keys)[:, None], torch.arange(keys)
        return (columns <= rows) & (columns > rows - (self.window or keys))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = self.heads(x)
        count, kept = q.shape[2], 0 if past is None else past[0].shape[2]
        start = 0 if past is None else past[2]
        at = self.positions(attention_mask, start, count, len(x))
        q, k = rotated(q, at), rotated(k, at)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        seen = self.seen(count, k.shape[2])
        if attention_mask is not None and not (self.fault == "ignored" and past is not None):
            seen = seen & self.laid_over(attention_mask.bool(), count, k.shape[2], kept)
        weights = (q @ k.mT / D**0.5).masked_fill(~seen, -1e9).softmax(-1)
        cut = slice(-self.window if self.window else None, None)
        return self.o(self.join(weights @ v)), (k[:, :, cut], v[:, :, cut], start + count)

    def laid_over(self, mask: Tensor, count: int, keys: int, kept: int) -> Tensor:
        if self.fault in ("all tokens", "counted"):
            return mask[:, None, None]
        if self.fault == "first":
            return mask[:, None, None, :keys]
        if self.fault == "square":
            return mask[:, None, None, :].expand(-1, -1, count, -1).reshape(len(mask), 1, count, count)
        return mask[:, None, None, -keys:]


class NewAlone(Cached):
    """Keeps the mask of earlier tokens in its cache, and takes that of the new tokens alone."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if mask.shape[1] != x.shape[1]:
            raise ValueError("the mask is that of the new tokens")
        if past is not None:
            past, mask = past[:3], torch.cat((past[3], mask), 1)
        y, cache = super().forward(x, mask, past)
        return y, (*cache, mask)


def report_of(module: nn.Module, *, batch: int = 2, given: bool = False, **intent: Any) -> CheckReport:
    torch.manual_seed(3)
    declared = {"causal": True, "cache": "past", "padding": "attention_mask", "padding_true": "keep", **intent}
    kwargs = {"attention_mask": torch.ones(batch, 12)} if given else {}
    return check(Subject(module.eval(), (torch.randn(batch, 12, E),), kwargs), Intent(**declared))


def finding_of(report: CheckReport) -> Finding:
    (finding,) = report.findings
    assert (finding.check, finding.sure) == ("cache", True)
    return finding


@pytest.mark.parametrize(("batch", "given"), [(1, True), (2, False)])
def test_a_cache_of_a_window_and_a_mask_of_all_tokens_clash(batch: int, given: bool) -> None:
    finding = finding_of(report_of(Cached("all tokens", window=5), batch=batch, given=given, window=5))
    assert "continues from its cache with attention_mask of all tokens" in finding.sentence
    assert "10 keys, mask of 11" in finding.sentence
    assert "attention_mask[:, -keys:]" in finding.fix
    assert "test_cache_with_mask.py" in finding.source


def test_a_mask_that_no_cut_fits_is_still_a_finding() -> None:
    finding = finding_of(report_of(Cached("square")))
    assert "continues from its cache with attention_mask of all tokens" in finding.sentence
    assert "reshape(2, 1, 5, 11)" in finding.fix  # of the failing line


@pytest.mark.parametrize(
    ("fault", "window", "said"),
    [
        ("ignored", 0, "which are masked out in one call"),
        ("positions", 0, "The queries and the keys of the new position"),
        ("first", 5, ""),
    ],
)
def test_a_difference_with_padding_on_the_left_alone_says_so(fault: str, window: int, said: str) -> None:
    intent = {"window": window} if window else {}
    finding = finding_of(report_of(Cached(fault, window=window), **intent))
    assert finding.sentence.startswith("With padding on the left in attention_mask, calls with the cache")
    assert said in finding.sentence
    assert "Without padding" in finding.evidence


@pytest.mark.parametrize(("batch", "window", "given"), [(1, 0, True), (2, 5, True), (3, 5, False)])
def test_right_calls_pass(batch: int, window: int, given: bool) -> None:
    intent = {"window": window} if window else {}
    report = report_of(Cached(window=window), batch=batch, given=given, **intent)
    assert report.findings == ()
    assert {"cache", "padding"} <= {passed.check for passed in report.passed}


def test_a_mask_of_the_new_tokens_alone_is_another_convention() -> None:
    report = report_of(NewAlone())
    assert report.findings == ()
    assert any("new tokens" in note for note in report.notes)


def test_where_a_cut_argument_gives_other_positions_the_line_is_mended() -> None:
    finding = finding_of(report_of(Cached("counted", window=5), window=5))
    assert "10 keys, mask of 11" in finding.sentence
    assert "[..., -10:] for the last 10 keys" in finding.fix
