"""The help pages: grouped, with defaults, variables and examples; plain in a pipe, panels on a terminal."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from mha_inspect.cli.app import COMMANDS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.parametrize("command", [command for command in COMMANDS if command != "layers"])
PANELS = ["Layer:", "Input:", "Run:", "Output:"]


def test_help_in_a_pipe_is_grouped_plain_text(invoke, command):
    code, out, err = invoke(command, "--help")
    assert (code, err) == (0, "")
    headings = [line for line in out.splitlines() if line in PANELS]
    assert headings == PANELS
    assert not re.search("[─-╿\x1b]", out)


def test_help_says_how_defaults_and_variables_go(invoke, command):
    out = invoke(command, "--help").out
    assert "MHA_INSPECT_<NAME>" in out
    layer = out.partition("Layer:")[2].partition("Input:")[0]
    assert re.search(r"--embed-dim N\s+Width of the query and of the output\.\s+\[default: 512\]", layer)


def test_help_ends_with_two_examples_that_parse(invoke, command, tmp_path):
    lines = invoke(command, "--help").out.partition("Examples:\n")[2].splitlines()
    assert len(lines) == 2
    for line in lines:
        name, asked, *flags = line.split()
        assert (name, asked) == ("mha-inspect", command)
        # An export that is refused comes after everything else has been understood, and before any work.
        code, _, err = invoke(command, *flags, "--export", str(tmp_path / "absent" / "a.txt"))
        assert code == 2
        assert "absent is not there" in err


def test_short_and_long_help_are_one_page(invoke, command):
    assert invoke(command, "-h") == invoke(command, "--help")


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "0"}, {"TERM": "dumb"}])
def test_help_on_a_terminal_is_in_colour_only_where_colour_is_wanted(invoke, command, variables, monkeypatch):
    from typer import rich_utils

    monkeypatch.setattr(rich_utils, "COLOR_SYSTEM", "standard")
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", True)
    monkeypatch.setattr("mha_inspect.cli.screen.is_terminal", lambda stream: True)
    monkeypatch.setattr("mha_inspect.cli.help.is_terminal", lambda stream: True)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    out = invoke(command, "--help").out
    assert "╭─ Layer ─" in re.sub("\x1b\\[[0-9;]*m", "", out)
    assert ("\x1b" in out) == (not variables)
    # Yellow is pale on white, bright black vanishes on black.
    assert not re.search("\x1b\\[(?:[0-9]+;)*(?:33|90)[;m]", out)


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("columns", [60, 120])
def test_help_on_a_terminal_is_panels_within_the_width(entry_point, environment, command, columns):
    master, slave = os.openpty()
    done = subprocess.Popen(
        [*entry_point, command, "--help"], stdout=slave, stdin=slave, env=environment(COLUMNS=str(columns))
    )
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # Linux reports the end of a pseudo-terminal as an error.
        pass
    os.close(master)
    assert done.wait(60) == 0
    lines = re.sub("\x1b\\[[0-9;]*m", "", shown.decode()).splitlines()
    assert [line for line in lines if line.startswith("╭─ Layer ")]
    assert max(map(len, lines)) == columns


def test_readme_documents_the_command(command):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"^mha-inspect {command}\b|`mha-inspect {command}\b|^#+ .*\b{command}\b", readme, re.MULTILINE)
