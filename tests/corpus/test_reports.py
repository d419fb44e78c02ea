"""Public reports, rebuilt: each is what the reporter says, and its twin is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .reports import REPORTS, Report


def first(answer: Any) -> Tensor:
    return answer if isinstance(answer, Tensor) else answer[0]


def answered(report: Report, make: Any) -> Tensor:
    module = report.module(make)
    with torch.no_grad():
        return first(report.run(module, report.given()))


def differ(left: Tensor, right: Tensor) -> bool:
    return left.shape != right.shape or not torch.allclose(left, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_each_report_is_what_it_says_and_its_twin_is_not(report: Report) -> None:
    if report.kind == "files":
        left, right = report.wrong(), report.right()
        assert left.keys() == right.keys()
        assert any(differ(left[name], right[name]) for name in left)
        return
    mended = answered(report, report.right)
    assert mended.isfinite().all()
    if report.kind == "raises":
        with pytest.raises((RuntimeError, ValueError)):
            answered(report, report.wrong)
        return
    assert differ(answered(report, report.wrong), mended)
