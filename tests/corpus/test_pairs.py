"""Of two modules the outcome, the first stage and the kinds of reasons are those of the pair; both stay as they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import mha_inspect
from mha_inspect import Intent
from mha_inspect.reports.diff import DiffReport

from .pairs import PAIRS, Pair

BY_NAME = {pair.name: pair for pair in PAIRS}


@cache
def compared(name: str) -> tuple[DiffReport, bool]:
    """Return the report of a pair, which the properties and the snapshots share, and whether both sides stayed."""
    left, right = BY_NAME[name].made()
    before = [{name: tensor.clone() for name, tensor in side.state_dict().items()} for side in (left, right)]
    report = mha_inspect.diff(left, right, **BY_NAME[name].given())
    assert isinstance(report, DiffReport)
    stayed = True
    for side, state in zip((left, right), before, strict=True):
        stayed = stayed and all(torch.equal(tensor, state[name]) for name, tensor in side.state_dict().items())
    return report, stayed


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_outcome_and_the_reasons(pair: Pair) -> None:
    report, stayed = compared(pair.name)
    assert stayed
    assert report.outcome == pair.outcome
    assert tuple(reason.kind for reason in report.reasons) == pair.reasons
    assert report.weights.whole == pair.whole
    assert report.buffers == pair.buffers
    if pair.first is not None:
        assert report.first_differing_stage == pair.first
    if pair.outcome == "same":
        assert report.first_differing_stage is None


def first_of(returned: Any) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    return first_of(next(iter(returned.values() if isinstance(returned, dict) else returned)))


def same_shapes(pair: Pair) -> bool:
    """Return whether parameters of one name are the same matrix on both sides, read the same way."""
    left, right = ({name: p.shape for name, p in side.named_parameters()} for side in pair.made())
    return left == right and pair.name != "ReadAsMatrices"


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if same_shapes(pair)], ids=lambda pair: pair.name)
def test_the_difference_is_that_of_the_same_weights(pair: Pair) -> None:
    """By hand: the weights of the left in the module of the right, which keeps its buffers."""
    left, right = pair.made()
    report, _ = compared(pair.name)
    with torch.no_grad():
        for name, parameter in left.named_parameters():
            right.get_parameter(name).copy_(parameter)
        outputs = [first_of(side(**pair.given())).double() for side in (left, right)]
    apart = float((outputs[0] - outputs[1]).abs().max())
    assert report.output.max_abs_difference == pytest.approx(apart, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if pair.reasons and pair.whole][::5], ids=lambda pair: pair.name
)
def test_a_reference_is_judged_as_the_other_side_is(pair: Pair) -> None:
    left, right = pair.made()
    report = mha_inspect.check(left, **pair.given(), intent=Intent(reference=right))
    assert "reference" in [finding.check for finding in report.findings if finding.sure]
    reason = compared(pair.name)[0].reasons[0].sentence.split()[0]
    assert any(reason in finding.sentence for finding in report.findings)
