"""Nothing false is said of what is not yet understood: no accusation but the right one, and no wrong outcome."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.errors import InputError

from .not_yet import NOT_YET, NotYet


def made(make: Any) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = make().eval()
    return module


@pytest.mark.parametrize("name", NOT_YET)
def test_a_trace_says_nothing_false(name: str) -> None:
    case = NOT_YET[name]
    trace = mha_inspect.trace(made(case.make), *case.given())
    assert {finding.check for finding in trace.findings if finding.sure} <= case.checks
    assert case.attends or not trace.attentions
    assert trace.proof.agrees is not False


@pytest.mark.parametrize("name", NOT_YET)
def test_a_check_accuses_of_nothing_else(name: str) -> None:
    case = NOT_YET[name]
    nothing_to_check = contextlib.nullcontext() if case.attends else contextlib.suppress(InputError)
    with nothing_to_check:
        report = mha_inspect.check(made(case.make), *case.given(), intent=case.intent)
        assert {finding.check for finding in report.findings if finding.sure} <= case.checks


@pytest.mark.parametrize("case", [case for case in NOT_YET.values() if case.beside is not None])
def test_a_diff_is_right_about_the_outcome(case: NotYet) -> None:
    left, right = made(case.make), made(case.beside)
    with torch.no_grad():
        apart = float((left(*case.given()) - right(*case.given())).abs().max())
    assert mha_inspect.diff(left, right, *case.given()).outcome == ("same" if apart < 1e-5 else "differs")
