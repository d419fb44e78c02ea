"""What somebody who waits at a terminal is told, and that nobody else is told anything."""

from __future__ import annotations

import io
import sys

import pytest

from mha_inspect.render import screen


class Terminal(io.StringIO):
    """A terminal that keeps what it was shown, and says when that is a word that was waited for."""

    def isatty(self) -> bool:
        return True


def wait_for(terminal: io.StringIO, words: str) -> None:
    from threading import Event

    for _ in range(600):
        if words in terminal.getvalue():
            return
        Event().wait(0.05)
    pytest.fail(f"{words} was never shown: {terminal.getvalue()!r}")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_AFTER", 0.0)
    monkeypatch.setenv("TERM", "xterm")


def test_a_terminal_is_told_and_then_cleared(monkeypatch, at_once):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with screen.progress("tracing \x1b[2Jmodel") as tick:
        wait_for(terminal, "tracing \\x1b[2Jmodel")
        tick("run 3")
        wait_for(terminal, "run 3")
        assert sys.stderr is terminal  # nothing is put in its place
    # The cursor is there again, and the line is empty.
    end = terminal.getvalue()
    assert end.rindex("\x1b[?25h") > end.rindex("\x1b[?25l")
    assert end.endswith("\x1b[2K")


@pytest.mark.parametrize("why", ["pipe", "quiet", "dumb"])
def test_nobody_else_is_told(monkeypatch, at_once, why):
    stream = io.StringIO() if why == "pipe" else Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "dumb" if why == "dumb" else "xterm")
    with screen.progress("tracing", quiet=why == "quiet") as tick:
        tick("run 3")
    assert stream.getvalue() == ""


def test_a_pipe_is_told_once_what_takes_long(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(screen, "_LONG", 0.3)
    with screen.progress("tracing model.py") as tick:
        tick("importing and building it")
        wait_for(stream, "tracing model.py: importing and building it")
    assert stream.getvalue().count("\n") == 1
