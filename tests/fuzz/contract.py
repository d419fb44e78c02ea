"""What holds for every command line, whatever it names."""

from __future__ import annotations

import re
import signal
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from mha_inspect.errors import MhaInspectError
from mha_inspect.text import printable

CODES = (0, 1, 2, 3, 130, 141)
SECONDS = 10
"""Of this process's own time: a machine that does other things takes longer."""
WAITING = 120
"""Seconds on a clock after which it does nothing any more."""
LONGEST = 2000
"""Characters of a message, which repeats a user's text only in part."""


def acts_on_a_terminal(text: str) -> list[str]:
    """The characters of an answer or a message that a terminal would act on."""
    return [c for c in sorted(set(text)) if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@contextmanager
def in_time() -> Iterator[None]:
    """Raise `TimeoutError` where the block takes longer than anything may."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s, or nothing for {WAITING} s")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAITING))
    before = [signal.signal(number, late) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def require_message(error: MhaInspectError) -> None:
    """An error of ours is one line or two, of a length that one reads, and acts on no terminal."""
    text = str(error)
    assert text
    assert text.count("\n") <= 1
    assert len(text) <= LONGEST, len(text)
    assert acts_on_a_terminal(text) == [], printable(text)


def require_answer(code: int, out: str, err: str, *, in_color: bool = False) -> None:
    """Codes of the table, nothing half said, no traceback; colors where they were asked for, and nothing else."""
    if in_color:
        out, err = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in (out, err))
    assert code in CODES, (code, err[-3000:])
    assert "Traceback (most recent call last)" not in err, err[-3000:]
    assert acts_on_a_terminal(out + err) == [], printable(out + err)
    if code in (2, 3):
        assert out == "", out[:500]
        told = [line for line in err.split("\n") if line]
        assert 1 <= len(told) <= 4, err
        assert max(map(len, told)) <= LONGEST, err
