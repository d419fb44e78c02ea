"""Every mistake is found, and no twin is accused."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import mha_inspect
from mha_inspect.checks.check import check
from mha_inspect.checks.intent import Intent
from mha_inspect.reports.check import CheckReport
from mha_inspect.running.subject import Subject

from .every_mistake import CASES, Case


def report_of(case: Case, *, wrong: bool, declared: bool = True) -> CheckReport:
    """Return the report of a case, which the properties and the snapshots share."""
    return _reported(case.name, wrong, declared)


BY_NAME = {case.name: case for case in CASES}


@cache
def _reported(name: str, wrong: bool, declared: bool) -> CheckReport:
    case = BY_NAME[name]
    torch.manual_seed(7)
    module = case.make(wrong)
    kwargs = case.inputs()
    dtype = next((value.dtype for value in kwargs.values() if value.is_floating_point()), torch.float32)
    return check(Subject(module.to(dtype), (), kwargs), case.intent if declared else Intent())


WRONG = [case for case in CASES if case.wrong is not None]


SAID = {
    "SoftmaxOfSoftmax": "twice",
    "MaskAfterSoftmax": "after the softmax",
    "TrilWithoutSum": "after the softmax",
    "MaskOfTheOtherSign": "1e+09",
    "CausalWithoutItself": "itself",
    "CausalForgotten": "future",
    "CausalAlongHeads": "heads",
    "NormOverPositions": "another operation",
    "WindowOneWide": "5 positions",
    "WindowOneNarrow": "all of its window of 4",
    "PaddingTurnedRound": "inverted",
    "PaddingOnQueries": "queries instead",
    "PaddingInTheOtherOrder": "another item",
    "GivenPaddingOfFirstRow": "another item",
    "MaskBeforeCap": "undoes",
    "PaddingAsBoolForFused": "inverted",
    "MeanOfPadding": "another operation",
    "PositionsOfPadding": "side of the padding",
    "RotaryOfQueriesAlone": "the key is not",
    "RotaryByHead": "on the head",
    "LateWithPadding": "one diagonal too late",
    "GapWithPadding": "all of its past",
    "KeysFlipped": "different orders",
    "ValuesFlipped": "different orders",
    "SubtractedOnes": "subtracted",
    "LoweredTooLittle": "finite",
    "PaddingOnTheHeads": "aligned with the heads",
    "PaddingOnQueriesOfFoldedHeads": "queries instead",
    "ClassTokenWithoutPadding": "no effect",
    "PooledOverAll": "no real query",
    "PooledOverCount": "number of padding",
    "InvertedForTorch": "padding_idx of embed",
    "InvertedByHand": "padding_idx of embed",
    "PaddingAddedAsOnes": "added",
    "MaskForgotten": "no effect",
    "SumCountsMaskedKeys": "other than the sum",
    "OverQueriesAndKeys": "queries and keys",
    "OverHeads": "heads or batch",
    "OverQueries": "the queries instead",
    "EveryKeyMaskedOneByOne": "every key",
    "SlopesFromZero": "1, expected 2^(-8/4) = 0.25",
    "SlopesFromTwo": "0.0625, expected 2^(-8/4) = 0.25",
    "SlopesOfTheOtherSign": "raises",
    "FrequenciesFromOne": "0.0464 a position, expected 1",
    "TurnedByItem": "batch item",
    "TurnedByItemAlone": "of position 0",
    "TurnedByItemBesideHeads": "batch item",
    "TurnedByHead": "on the head",
    "TurnedByNothing": "of position 0",
    "TurnedAsOnePosition": "same angles",
}
"""The axis, the number or the word that tells a mistake from the others that its check finds."""


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.name)
def test_a_mistake_is_found(case: Case) -> None:
    report = report_of(case, wrong=True)
    found = {finding.check: finding.sure for finding in reversed(report.findings)}
    assert found.get(case.check) is not case.suspected
    assert case.check in found
    said = " ".join(finding.sentence for finding in report.findings if finding.check == case.check)
    assert SAID.get(case.name, "") in said


@pytest.mark.parametrize("name", ["NeverTransposed", "NeverTransposedFused"])
def test_what_attends_within_a_token_is_said_to(name: str) -> None:
    over = [fact.sentence for fact in report_of(BY_NAME[name], wrong=True).facts if fact.name == "attended over"]
    assert len(over) == 1
    assert over[0].startswith("the heads of one token")


@pytest.mark.parametrize(
    "case", [case for case in WRONG if case.alone and not case.suspected][::2], ids=lambda case: case.name
)
def test_a_mistake_is_found_with_nothing_declared(case: Case) -> None:
    assert not report_of(case, wrong=True, declared=case.intent == Intent()).ok


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_a_trace_accuses_no_twin(case: Case) -> None:
    torch.manual_seed(0)
    module, inputs = case.make(False).eval(), case.inputs()
    if torch.float16 in {value.dtype for value in inputs.values()}:
        module = module.half()
    with torch.no_grad():
        assert [finding for finding in mha_inspect.trace(module, **inputs).findings if finding.sure] == []


@pytest.mark.parametrize("case", [case for case in WRONG if case.in_trace], ids=lambda case: case.name)
def test_one_run_shows_a_mistake(case: Case) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        trace = mha_inspect.trace(case.make(True).eval(), **case.inputs())
    assert case.check in [finding.check for finding in trace.findings]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_twin_is_not_accused(case: Case) -> None:
    report = report_of(case, wrong=False)
    assert [finding for finding in report.findings if finding.sure] == []
    if case.suspected or case.wrong is None:
        assert case.check not in [finding.check for finding in report.findings]
    if case.asked:
        assert case.check in [passed.check for passed in report.passed]
