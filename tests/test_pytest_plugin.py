"""The pytest plugin, as a project that uses it has it: tests of its own, run by a pytest of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MODULES = """
import torch
from torch import nn


class Right(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (3, 4)).transpose(1, 2)

    def weights(self, scores):
        return scores.softmax(-1)

    def forward(self, x):
        q, k, v = (self.split(project(x)) for project in (self.q, self.k, self.v))
        return self.o((self.weights(q @ k.mT / 2) @ v).transpose(1, 2).flatten(2))


class OverQueries(Right):
    def weights(self, scores):
        return scores.softmax(-2)
"""
TESTS = """
import pytest
import torch
from modules import OverQueries, Right
from torch import nn

X = torch.randn(2, 7, 12)


def test_right():
    assert Right()(X).shape == X.shape


def test_within_a_model():
    nn.Sequential(Right(), nn.Linear(12, 12))(X)


@pytest.mark.parametrize("times", [1, 2])
def test_wrong(times):
    module = OverQueries()
    for _ in range(times):
        module(X)


def test_fixture(attention):
    trace = attention(Right().eval(), X)
    assert trace.attentions[0].scores.shape == (2, 3, 7, 7)


def test_linear():
    nn.Linear(12, 12)(X)
"""
LIGHT = """
import sys


def test_light():
    assert "torch" not in sys.modules
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "modules.py").write_text(MODULES)
    (tmp_path / "test_modules.py").write_text(TESTS)
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "test_light.py").write_text(LIGHT)
    return tmp_path


def ran(folder: Path, *options: str) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mha_inspect.pytest_plugin"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_each_class_that_tests_call_is_checked_once(project: Path, options: list[str]) -> None:
    code, lines = ran(project, "--mha-check", "-p", "no:randomly", *options, "test_modules.py")
    assert code == 1
    assert "6 passed" in lines[-1]
    said = [line for line in lines if line.startswith("modules.")]
    assert len(said) == 2
    right, wrong = sorted(said, reverse=True)
    # With several workers, which test calls a class first is open.
    assert right.startswith("modules.Right (test_modules.py::test_")
    assert "): nothing wrong" in right
    assert wrong.startswith("modules.OverQueries (test_modules.py::test_wrong[")
    assert "]): 1 problem: The softmax runs over" in wrong
    assert any(line.strip().startswith("softmax: ") and "modules.py:" in line for line in lines)
    assert "    +        return scores.softmax(-1)" in lines


def test_without_it_tests_are_as_they_were(project: Path) -> None:
    code, lines = ran(project, "test_modules.py")
    assert code == 0
    assert not [line for line in lines if line.startswith("modules.")]
    assert ran(project / "light")[0] == 0
