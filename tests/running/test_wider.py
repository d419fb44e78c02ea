"""A size of one tells nothing: names come from a run in which it is another, and all else from the run asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mha_inspect
import mha_inspect.running.subject
from mha_inspect.answers.trace import traced
from mha_inspect.layers.spec import Show
from mha_inspect.reports.trace import Trace
from mha_inspect.running.subject import Subject

from ..corpus.entry import hidden
from ..corpus.every import ENTRIES, entries


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
    return repr(
        replace(report, attentions=attentions, returns=tuple(replace(returned, axes="") for returned in report.returns))
    )


@pytest.mark.parametrize("name", [name for name in entries() if ENTRIES[name].given is hidden][::16])
def test_a_batch_of_one_has_the_names_of_a_batch_of_three(name: str) -> None:
    module = ENTRIES[name].made().eval()
    single, two, three = (ENTRIES[name].arguments(batch, 12)[0][0] for batch in (1, 2, 3))
    widened = trace(module, single, two)
    assert names(widened) == names(trace(module, three))
    assert without_names(widened) == without_names(trace(module, single))


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


def axes_in_library(module: nn.Module, *args: Tensor) -> list[dict[str, str]]:
    with torch.no_grad():
        report = mha_inspect.trace(module, *args)
    return [{stage.name: stage.axes for stage in attention.stages} for attention in report.attentions]


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_library_names_a_batch_of_one_as_the_command_does(batch_first: bool) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=batch_first).eval()
    single, three = (torch.randn(*((batch, 7) if batch_first else (7, batch)), 32) for batch in (1, 3))
    (axes,) = axes_in_library(layer, single, single, single)
    assert axes == axes_in_library(layer, three, three, three)[0]
    assert axes["query"] == ("batch query embed" if batch_first else "query batch embed")
    assert axes["scores"].split()[-2:] == ["query", "key"]
    assert "batch" in axes["scores"]


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
