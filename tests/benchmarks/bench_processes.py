"""Whole processes: what starting the program costs beside what it stands on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PLAIN_TRACE = """
import torch
layer = torch.nn.MultiheadAttention(512, 8, batch_first=True).eval()
x = torch.randn(1, 12, 512)
with torch.no_grad():
    layer(x, x, x)
"""


def _run(*command: str, **variables: str) -> None:
    """Run in a pipe and read the answer; whether it succeeds is not the question here."""
    # Sources are compiled once, as where they are installed.
    around = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, env={**around, **variables}, stdin=subprocess.DEVNULL, capture_output=True, check=False)


@pytest.mark.parametrize(
    ("what", "arguments", "variables"),
    [
        ("--help", ["--help"], {}),
        ("trace --help", ["trace", "--help"], {}),
        ("--version", ["--version"], {}),
        ("a usage error", ["trace", "--embed-dmi", "3"], {}),
        (
            "completion",
            [],
            {"_MHA_INSPECT_COMPLETE": "complete_bash", "COMP_WORDS": "mha-inspect tr", "COMP_CWORD": "1"},
        ),
    ],
)
def test_starting(side_by_side, entry_point, what, arguments, variables):
    side_by_side(
        f"mha-inspect {what}",
        lambda: _run(*entry_point, *arguments, **variables),
        "import typer",
        lambda: _run(sys.executable, "-c", "import typer"),
        at_most=1.3,
        rounds=15,
    )


def test_trace(side_by_side, entry_point):
    side_by_side(
        "mha-inspect trace",
        lambda: _run(*entry_point, "trace"),
        "a script that runs the layer once",
        lambda: _run(sys.executable, "-c", _PLAIN_TRACE),
        at_most=1.0,
        rounds=7,
    )
