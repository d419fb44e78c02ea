"""Every mistake of one line is found, most of them with nothing declared, and what is right is not accused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect import Intent
from mha_inspect.reports.check import CheckReport

from .mutants import HEAD, IDIOMS, MUTANTS, ORDERS


def module_of(source: str, folder: Path, name: str) -> nn.Module:
    file = folder / f"{name}.py"
    file.write_text(HEAD + source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    torch.manual_seed(7)
    module: nn.Module = made.M().eval()
    return module


def arguments(idiom: str) -> dict[str, Any]:
    torch.manual_seed(11)
    made: dict[str, Any] = eval(IDIOMS[idiom][1], {"torch": torch})
    return made


def mutated(idiom: str, right: str, wrong: str) -> str:
    source = IDIOMS[idiom][2]
    assert right in source
    return source.replace(right, wrong)


def report_of(idiom: str, source: str, folder: Path, name: str, **intent: Any) -> CheckReport:
    return mha_inspect.check(module_of(source, folder, name), intent=Intent(**intent), **arguments(idiom))


TWO = {
    # two lines are wrong
    *(("fairseq", "batch_first"), ("mha", "not_bf_nomask"), ("llama", "rope_before_split")),
    # rows of NaN, and the mask that makes them
    *(("nanogpt", "mask_inverted"), ("mha", "mask_inv"), ("mha", "mask_tril")),
}


def named(case: tuple[str, str, str, str]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.mark.parametrize("idiom", IDIOMS)
def test_what_is_right_is_not_accused(idiom: str, tmp_path: Path) -> None:
    intent, _, source = IDIOMS[idiom]
    for meant in (intent, {}):
        report = report_of(idiom, source, tmp_path, idiom, **meant)
        assert [finding for finding in report.findings if finding.sure] == []


@pytest.mark.parametrize("case", MUTANTS, ids=named)
def test_a_mistake_is_found(case: tuple[str, str, str, str], tmp_path: Path) -> None:
    idiom, name, right, wrong = case
    report = report_of(idiom, mutated(idiom, right, wrong), tmp_path, name, **IDIOMS[idiom][0])
    assert len({finding.check for finding in report.findings if finding.sure}) == 1 + ((idiom, name) in TWO)


def test_most_mistakes_are_found_with_nothing_declared(tmp_path: Path) -> None:
    cases = MUTANTS[::5]
    found = [not report_of(c[0], mutated(c[0], c[2], c[3]), tmp_path, f"m{n}").ok for n, c in enumerate(cases)]
    assert sum(found) >= 0.65 * len(cases)  # those of `cases`, most of which are, are not among them


@pytest.mark.parametrize("case", ORDERS, ids=named)
def test_another_order_is_told_by_a_reference(case: tuple[str, str, str, str], tmp_path: Path) -> None:
    idiom, name, right, wrong = case
    trusted = module_of(IDIOMS[idiom][2], tmp_path, "trusted")
    report = report_of(idiom, mutated(idiom, right, wrong), tmp_path, name, reference=trusted)
    assert [finding.check for finding in report.findings if finding.sure] == ["reference"]
    assert report.findings[0].source
