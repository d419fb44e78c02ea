"""What holds for every command line, whatever it names."""

from __future__ import annotations

import signal
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

from mha_inspect.errors import MhaInspectError
from mha_inspect.text import printable

CODES = (0, 1, 2, 3, 130, 141)
SECONDS = 10
LONGEST = 2000
"""Characters of a message, which repeats a user's text only in part."""


def acts_on_a_terminal(text: str) -> list[str]:
    """The characters of an answer or a message that a terminal would act on."""
    return [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@contextmanager
def in_time() -> Iterator[None]:
    """Raise `TimeoutError` where the block takes longer than anything may."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def require_message(error: MhaInspectError) -> None:
    """An error of ours is one line or two, of a length that one reads, and acts on no terminal."""
    text = str(error)
    assert text
    assert text.count("\n") <= 1
    assert len(text) <= LONGEST, len(text)
    assert acts_on_a_terminal(text) == [], printable(text)


def require_answer(code: int, out: str, err: str) -> None:
    """Codes of the table, nothing half said, no traceback."""
    assert code in CODES, (code, err[-3000:])
    assert "Traceback (most recent call last)" not in err, err[-3000:]
    assert acts_on_a_terminal(out + err) == [], printable(out + err)
    if code in (2, 3):
        assert out == "", out[:500]
        told = [line for line in err.split("\n") if line]
        assert 1 <= len(told) <= 4, err
        assert max(map(len, told)) <= LONGEST, err
