"""stdout: who reads it, how much it takes, what it can show."""

from __future__ import annotations

import io
import os
import subprocess

import pytest

from mha_inspect.cli import output
from mha_inspect.errors import ExportError
from mha_inspect.render import screen


class Stream(io.StringIO):
    """A stream that is a terminal or is none."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("variables", "terminal", "as_terminal", "color"),
    [
        ({}, True, True, True),
        ({}, False, False, False),
        ({"NO_COLOR": "1"}, True, True, False),
        ({"FORCE_COLOR": "0"}, True, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, True, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True, True),
    ],
)
def test_terminal_and_color(monkeypatch, variables, terminal, as_terminal, color):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert screen.is_terminal(Stream(terminal)) is as_terminal
    assert screen.in_color(Stream(terminal)) is color


@pytest.mark.parametrize(("typed", "width"), [("60", 60), ("0", None), ("wide", None), ("", None), ("²", None)])
def test_columns_are_those_that_were_set(monkeypatch, typed, width):
    monkeypatch.setenv("COLUMNS", typed)
    assert screen.columns(Stream(False)) == width


@pytest.mark.parametrize("line", ["trace --help", "--show-completion bash"])
def test_a_reader_that_is_gone_ends_it_quietly(entry_point, environment, line):
    read, write = os.pipe()
    os.close(read)
    # Which shell this is run from is not to be found out where there is none.
    variables = environment(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    done = subprocess.run(
        [*entry_point, *line.split()], stdout=write, stderr=subprocess.PIPE, env=variables, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_in_one_line(entry_point, environment):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*entry_point, "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("mha-inspect: stdout could not be written: No space left on device.")
    assert done.stderr.count("\n") == 1


def test_a_closed_stdout_is_said(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(ExportError, match="stdout is closed"):
        output.write("text")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_reaches_a_stream_of_any_encoding(monkeypatch, encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", stream)
    output.write("4E² / √64")
    written = stream.buffer.getvalue().decode(encoding)
    assert written == {"ascii": r"4E\xb2 / \u221a64", "latin-1": r"4E² / \u221a64", "utf-8": "4E² / √64"}[encoding]
