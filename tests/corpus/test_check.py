"""Check accuses no entry that is right, with its intent declared or not, and a twin is the same function."""

from __future__ import annotations

import pytest
import torch

import mha_inspect
from mha_inspect import Intent

from .every import ENTRIES, entries
from .test_truth import NOT_YET

EVALUATED = [name for name in entries() if not ENTRIES[name].training]


@pytest.mark.parametrize("name", EVALUATED)
def test_check_accuses_nobody_who_is_right(name: str) -> None:
    entry = ENTRIES[name]
    for intent in {entry.intent, Intent()}:
        args, kwargs = entry.arguments()
        report = mha_inspect.check(entry.made(), *args, intent=intent, **kwargs)
        assert {finding.check for finding in report.findings if finding.sure} <= entry.findings
        over = [fact.sentence for fact in report.facts if fact.name == "attended over"]
        assert ["queries" in sentence for sentence in over] == [True for of in entry.attentions if of.over == "query"]


@pytest.mark.parametrize("name", [name for name in EVALUATED if ENTRIES[name].twin and name not in NOT_YET])
def test_a_twin_is_the_same(name: str) -> None:
    entry = ENTRIES[name]
    (args, kwargs), twin = entry.arguments(), ENTRIES[entry.twin]
    with torch.no_grad():
        report = mha_inspect.diff(entry.made(), twin.made(), *args, same_weights=True, **kwargs)
    assert report.outcome == "same"
    differing = {stage.name for stage in report.stages if stage.verdict != "same"}
    left, right = (set(of.attentions[0].stages()) for of in (entry, twin))
    assert differing == left ^ right
    assert {"k_heads", "scores", "context"} <= {stage.name for stage in report.stages}


@pytest.mark.parametrize("name", [name for name in entries(attending=False) if not ENTRIES[name].training])
def test_the_laws_of_outputs_accuse_nobody_where_nothing_attends(name: str) -> None:
    args, kwargs = ENTRIES[name].arguments()
    report = mha_inspect.check(ENTRIES[name].made(), *args, **kwargs)
    assert [finding for finding in report.findings if finding.sure] == []
    assert {"inputs", "repeat", "training"} <= {passed.check for passed in report.passed}
    assert "so the outputs alone were checked" in " ".join(report.notes)


@pytest.mark.parametrize("name", ["weighed: relu", "weighed: sparsemax", "weighed: sigmoid"])
def test_weights_that_are_zero_without_a_mask_pass_no_check_of_masks(name: str) -> None:
    args, kwargs = ENTRIES[name].arguments()
    report = mha_inspect.check(ENTRIES[name].made(), *args, **kwargs)
    assert "masking" not in {passed.check for passed in report.passed}
