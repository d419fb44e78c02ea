"""`--watch` at a terminal: a page for each save, and Ctrl-C leaves."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from .code import ATTENTION

END = b"Ctrl-C ends"


class Screen:
    """A terminal in which the program runs."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.child, self.stream = pty.fork()
        if self.child == 0:
            os.chdir(folder)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
            os.environ.update(COLUMNS="100", LINES="40", TERM="xterm", NO_COLOR="1")
            os.execv(sys.executable, [sys.executable, "-m", "mha_inspect", *words])

    def page(self) -> str:
        """What is shown until the program waits for the next save."""
        shown = b""
        end = time.monotonic() + 120
        while END not in shown and time.monotonic() < end:
            if select.select([self.stream], [], [], 1)[0]:
                shown += os.read(self.stream, 65536)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())

    def interrupt(self) -> int:
        os.write(self.stream, b"\x03")
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(ATTENTION)
    return path


def test_each_save_prints_the_page_again(file: Path) -> None:
    screen = Screen(file.parent, "model.py", "--embed-dim", "16", "--watch")
    assert "nothing wrong in this run" in screen.page()
    time.sleep(0.5)
    file.write_text(ATTENTION.replace("softmax(-1)", "softmax(-2)"))
    page = screen.page()
    assert "1 problem: The softmax runs over the queries" in page
    assert "changed; before: nothing wrong" in page
    time.sleep(0.5)
    file.write_text(ATTENTION + "\n(((")
    assert "SyntaxError" in screen.page()
    time.sleep(0.5)
    file.write_text(ATTENTION)
    page = screen.page()
    assert "nothing wrong in this run" in page
    assert "changed; before: 1 problem" in page
    assert screen.interrupt() == 0


def test_a_layer_has_no_file_to_watch(invoke) -> None:
    answer = invoke("torch", "--watch")
    assert (answer.code, answer.out) == (2, "")
    assert "--watch needs a Python file" in answer.err
