"""The help pages: grouped, with defaults, variables and examples; plain in a pipe, panels on a terminal."""

from __future__ import annotations

import re

import pytest

from mha_inspect.cli.help import COMMANDS, SHORT

pytestmark = pytest.mark.parametrize("command", [command for command in COMMANDS if command not in ("layers", "help")])
PANELS = ["Layer:", "Input:", "Run:", "Output:"]


def test_help_in_a_pipe_is_grouped_plain_text(invoke, command):
    code, out, err = invoke(command, "--help-all")
    assert (code, err) == (0, "")
    headings = [line for line in out.splitlines() if line in PANELS]
    assert headings == PANELS
    assert not re.search("[─-╿\x1b]", out)


def test_the_short_page_fits_a_small_terminal(invoke, command):
    code, out, err = invoke(command, "--help")
    assert (code, err) == (0, "")
    lines = out.rstrip("\n").splitlines()
    assert len(lines) < 24
    assert max(map(len, lines)) <= 80
    examples = out.partition("Examples:\n")[2].splitlines()
    assert 1 <= len(examples) <= 3
    assert len(SHORT[command].shown.split()) <= 13  # one is the target


def test_a_command_has_at_most_thirty_options(invoke, command):
    options = re.findall(r"^  (?:-\w, )?--[\w-]+ ", invoke(command, "--help-all").out, re.MULTILINE)
    assert len(options) <= 32  # with --help and --help-all


def test_help_ends_with_two_examples_that_parse(invoke, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    for file in ("model.py", "attention.py", "path/to/file.py"):
        (tmp_path / file).write_text("", encoding="utf-8")
    lines = invoke(command, "--help-all").out.partition("Examples:\n")[2].splitlines()
    assert len(lines) == 2
    for line in lines:
        name, asked, *flags = line.split()
        assert (name, asked) == ("mha-inspect", command)
        # An export that is refused comes after everything else has been understood, and before any work.
        code, _, err = invoke(command, *flags, "--export", str(tmp_path / "absent" / "a.txt"))
        assert code == 2
        assert "absent does not exist" in err


def test_short_and_long_help_are_one_page(invoke, command):
    assert invoke(command, "-h") == invoke(command, "--help") == invoke("help", command)


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_help_on_a_terminal_is_bold_only_where_that_is_wanted(invoke, command, variables, monkeypatch):
    monkeypatch.setattr("mha_inspect.render.screen.is_terminal", lambda stream: True)
    for name, value in {"TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    shown = invoke(command, "--help-all").out
    assert ("\x1b[1mLayer\x1b[0m:" in shown) == (not variables)
    assert set(re.findall("\x1b\\[[0-9;]*m", shown)) == (set() if variables else {"\x1b[1m", "\x1b[0m"})


def test_the_first_page_names_the_command_and_fits_a_small_terminal(invoke, command):
    page = invoke("--help").out
    assert f"  {command} " in page
    assert len(page.splitlines()) < 24
    assert max(map(len, page.splitlines())) <= 80
    assert invoke("help") == invoke() == invoke("--help")
