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

E, H = 24, 3


def rotated(x: Tensor, at: Tensor) -> Tensor:
    """Rotate halves of `batch heads position head_dim` by positions, `batch position`."""
    half = x.shape[-1] // 2
    angles = (at[..., None].float() * 50.0 ** (-torch.arange(half) / half))[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Cached(nn.Module):
    """Attention with a cache of all tokens or of a window, and a mask of `batch key`; `fault` breaks it."""

    def __init__(self, fault: str = "", *, window: int = 0) -> None:
        super().__init__()
        self.fault, self.window = fault, window
        self.qkv, self.o = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, past: Any = None) -> tuple[Tensor, Any]:
        q, k, v = (each.unflatten(-1, (H, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        count, kept = q.shape[2], 0 if past is None else past[0].shape[2]
        start = 0 if past is None else past[2]
        at = torch.arange(start, start + count).expand(len(x), -1)
        if attention_mask is not None and attention_mask.shape[1] >= start + count:
            by_mask = attention_mask.long().cumsum(-1)[:, -count:] - 1
            at = at if self.fault == "positions" and past is not None else by_mask.clamp(min=0)
        if self.fault in ("distances", "all tokens"):
            at = torch.arange(start, start + count).expand(len(x), -1)
        q, k = rotated(q, at), rotated(k, at)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        keys = k.shape[2]
        rows, columns = torch.arange(keys - count, keys)[:, None], torch.arange(keys)
        seen = (columns <= rows)[None, None]
        if self.window:
            seen = seen & (columns > rows - self.window)
        if attention_mask is not None and not (self.fault == "ignored" and past is not None):
            seen = seen & self.laid_over(attention_mask.bool(), count, keys, kept)
        scores = (q @ k.mT / (E // H) ** 0.5).masked_fill(~seen, -1e9)
        cut = slice(-self.window if self.window else None, None)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), (k[:, :, cut], v[:, :, cut], start + count)

    def laid_over(self, mask: Tensor, count: int, keys: int, kept: int) -> Tensor:
        if self.fault in ("all tokens", "counted"):
            return mask[:, None, None]
        if self.fault == "first":
            return mask[:, None, None, :keys]
        if self.fault == "square":
            return mask[:, None, None, :].expand(-1, -1, count, -1).reshape(len(mask), 1, count, count)
        if self.fault == "new alone":
            return torch.cat((mask.new_ones(len(mask), kept), mask), 1)[:, None, None]
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


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_cache_of_a_window_and_a_mask_of_all_tokens_clash(batch: int, given: bool) -> None:
    finding = finding_of(report_of(Cached("all tokens", window=5), batch=batch, given=given, window=5))
    assert "continues from its cache with attention_mask of all tokens" in finding.sentence
    assert "10 keys, mask of 11" in finding.sentence
    assert "attention_mask[:, -keys:]" in finding.fix
    assert "test_cache_with_mask.py" in finding.source


def test_where_a_cut_argument_gives_other_positions_the_line_is_mended() -> None:
    finding = finding_of(report_of(Cached("counted", window=5), window=5))
    assert "10 keys, mask of 11" in finding.sentence
    assert "[..., -10:] for the last 10 keys" in finding.fix


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


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("window", [0, 5])
def test_right_calls_pass(batch: int, window: int, given: bool) -> None:
    report = report_of(Cached(window=window), batch=batch, given=given, **({"window": window} if window else {}))
    assert report.findings == ()
    assert {"cache", "padding"} <= {passed.check for passed in report.held}


def test_positions_that_count_padding_in_every_call_pass() -> None:
    report = report_of(Cached("distances"))
    assert report.findings == ()


def test_a_mask_of_the_new_tokens_alone_is_another_convention() -> None:
    report = report_of(NewAlone())
    assert report.findings == ()
    assert any("new tokens" in note for note in report.notes)


def test_padding_on_the_right_is_no_matter_of_a_cache() -> None:
    report = report_of(Cached("positions"), padding_side="right")
    assert [finding for finding in report.findings if finding.check == "cache"] == []
