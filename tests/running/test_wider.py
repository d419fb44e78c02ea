"""A size of one tells nothing: names come from a run in which it is another, and all else from the run asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
import mha_inspect.running.subject
from mha_inspect.layers.spec import Show
from mha_inspect.questions.trace import traced
from mha_inspect.reports.trace import Trace
from mha_inspect.running.subject import Subject


def trace(module: nn.Module, x: Tensor, wide: Tensor | None = None, **show: bool) -> Trace:
    def without_ones(copied: nn.Module) -> Subject:
        if wide is None:
            raise RuntimeError("it is not to run again")
        return Subject(copied, (wide,), {})

    subject = Subject(module, (x,), {}, without_ones=without_ones)
    with torch.no_grad():
        return traced(subject, Show(**show), keep=show.get("stats", False))[0]


def names(report: Trace) -> list[Any]:
    """Axes, and what follows from them; sizes are passed over."""
    stages = [
        [(stage.name, stage.axes, stage.formula) for stage in attention.stages] for attention in report.attentions
    ]
    return [stages, [returned.axes for returned in report.returns]]


def without_names(report: Trace) -> str:
    attentions = tuple(
        replace(attention, stages=tuple(replace(stage, axes="", formula="") for stage in attention.stages))
        for attention in report.attentions
    )
    # As text: a scale that is none is not equal to itself.
    return str(
        replace(report, attentions=attentions, returns=tuple(replace(returned, axes="") for returned in report.returns))
    )


class Restless(nn.Module):
    """Whatever a forward may change: buffers, what hangs on the module, and every generator."""

    def __init__(self, most: int = 9, apart: int = 9) -> None:
        super().__init__()
        self.most, self.apart = most, apart
        self.norm = nn.BatchNorm1d(8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.calls: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise RuntimeError("too many")
        self.calls.append(tuple(x.shape))
        x = self.norm(x.mT).mT
        for _ in range(1 + (len(x) > self.apart)):
            x = self.attend(x, x, x)[0]
        return x


def run_of(wide: Tensor | None, **kinds: int) -> tuple[Trace, list[Any]]:
    torch.manual_seed(0)
    module = Restless(**kinds)
    report = trace(module, torch.randn(1, 5, 8), wide, stats=True)
    return report, [module.calls, module.norm.running_mean.tolist(), torch.rand(3).tolist(), module.state_dict().keys()]


def test_the_wider_run_leaves_no_trace():
    (wide, after), (alone, expected) = run_of(torch.randn(2, 5, 8)), run_of(None)
    assert after == expected
    weights = [
        next(stage for stage in report.attentions[0].stages if stage.name == "weights") for report in (wide, alone)
    ]
    assert [stage.axes for stage in weights] == ["(batch heads) query key", "heads query key"]
    assert without_names(wide) == without_names(alone)


@pytest.mark.parametrize("kinds", [{"most": 1}, {"apart": 1}])
def test_what_cannot_be_told_from_a_wider_run_is_told_from_its_own(kinds):
    (wide, after), (alone, expected) = run_of(torch.randn(2, 5, 8), **kinds), run_of(None, **kinds)
    assert (names(wide), after) == (names(alone), expected)


def test_a_large_run_is_not_made_twice(monkeypatch):
    monkeypatch.setattr(mha_inspect.running.subject, "_SMALL", 1 << 9)
    ran: list[int] = []

    def without_ones(module: nn.Module, batch: int, length: int) -> Subject:
        module.register_forward_pre_hook(lambda *_: ran.append(length))
        return Subject(module, (torch.randn(batch, length, 8, device=next(module.parameters()).device),), {})

    subject = Subject(Restless(), (torch.randn(1, 5, 8),), {}, without_ones=lambda module: without_ones(module, 2, 5))
    traced(subject, Show(), keep=False)
    assert not ran
    traced(replace(subject, without_ones=lambda module: without_ones(module, 2, 2)), Show(), keep=False)
    assert ran == [2]
    traced(
        replace(subject, module=Restless().to("meta"), args=(torch.randn(1, 5, 8, device="meta"),)), Show(), keep=False
    )
    assert ran == [2, 5]


def test_what_a_run_may_change_is_not_run_a_second_time() -> None:
    class Cache:
        """Anything that no copy may stand for."""

        calls = 0

    class Cached(nn.Identity):
        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.calls += 1
            return (x @ x.mT).softmax(-1) @ x

    cache = Cache()
    with torch.no_grad():
        mha_inspect.trace(Cached(), torch.randn(1, 5, 12), cache)
    assert cache.calls == 1
