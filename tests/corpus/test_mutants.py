"""Every mistake of one line is found by the checks that it is planted for, with what is meant declared and without."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mha_inspect
from mha_inspect.reports.check import CheckReport

from .every import ENTRIES
from .mutants import MUTANTS, ORDERS

HEAD = """import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
"""


def mutated(name: str, right: str, wrong: str, file: Path) -> nn.Module:
    """Return an entry with another line in its source, loaded from a file of its own."""
    source = ENTRIES[name].source
    assert right in source
    file.write_text(HEAD + source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    torch.manual_seed(7)
    module: nn.Module = getattr(made, name)().eval()
    return module


def checked(name: str, module: nn.Module, **intent: Any) -> CheckReport:
    args, kwargs = ENTRIES[name].arguments()
    return mha_inspect.check(module, *args, **intent, **kwargs)


def sure_checks(report: CheckReport) -> str:
    return " ".join(sorted({finding.check for finding in report.findings if finding.sure}))


def named(case: tuple[str, ...]) -> str:
    return f"{case[0]}-{case[1]}"


@pytest.mark.parametrize("case", MUTANTS, ids=named)
def test_a_mistake_is_found(case: tuple[str, ...], tmp_path: Path) -> None:
    name, mistake, right, wrong, checks, _ = case
    module = mutated(name, right, wrong, tmp_path / f"{mistake}.py")
    assert sure_checks(checked(name, module, intent=ENTRIES[name].intent)) == checks


@pytest.mark.parametrize("case", [case for case in MUTANTS if case[5]][::3], ids=named)
def test_most_mistakes_are_found_with_nothing_declared(case: tuple[str, ...], tmp_path: Path) -> None:
    name, mistake, right, wrong, _, alone = case
    assert sure_checks(checked(name, mutated(name, right, wrong, tmp_path / f"{mistake}.py"))) == alone


@pytest.mark.parametrize("case", ORDERS, ids=named)
def test_another_order_is_told_by_a_reference(case: tuple[str, ...], tmp_path: Path) -> None:
    name, mistake, right, wrong = case
    trusted, module = (
        mutated(name, right, line, tmp_path / f"{mistake}{n}.py") for n, line in enumerate((right, wrong))
    )
    report = checked(name, module, intent=mha_inspect.Intent(reference=trusted))
    assert sure_checks(report) == "reference"
    assert report.findings[0].source
