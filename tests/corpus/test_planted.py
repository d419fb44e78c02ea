"""Every mistake is found, and no twin is accused."""

from __future__ import annotations

import pytest
import torch

import mha_inspect
from mha_inspect.answers.check.check import check
from mha_inspect.answers.check.intent import Intent
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject

from .planted import CASES, Case


def report_of(case: Case, *, wrong: bool, declared: bool = True) -> CheckReport:
    torch.manual_seed(7)
    module = case.make(wrong)
    kwargs = case.inputs()
    return check(Subject(module.to(kwargs["x"].dtype), (), kwargs), case.intent if declared else Intent())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_mistake_is_found(case: Case) -> None:
    report = report_of(case, wrong=True)
    assert case.check in [finding.check for finding in report.findings if finding.sure]
    if case.alone:
        assert not report_of(case, wrong=True, declared=False).ok


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_trace_accuses_no_twin(case: Case) -> None:
    torch.manual_seed(0)
    module, inputs = case.make(False).eval(), case.inputs()
    if next(iter(inputs.values())).dtype != torch.float32:
        module = module.half()
    with torch.no_grad():
        assert [finding for finding in mha_inspect.trace(module, **inputs).findings if finding.sure] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_twin_is_not_accused(case: Case) -> None:
    report = report_of(case, wrong=False)
    assert [finding for finding in report.findings if finding.sure] == []
    assert not any(item.check == case.check for item in report.left_out)


@pytest.mark.parametrize(
    ("name", "says"), [("PaddingForTorchsLayer", "The mask is inverted"), ("MeanOfPadding", "another operation")]
)
def test_the_cause_is_told(name: str, says: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert [says in finding.sentence for finding in report_of(case, wrong=True).findings] == [True]
