"""One line on stderr of a terminal that says how far a long answer is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType

from ..text import fitting, printable

_AFTER = 1.0
"""Seconds before it appears."""


class Progress:
    """Shows what is being done, and takes the line away at the end; in a pipe it shows nothing."""

    def __init__(self) -> None:
        self._shown = False
        self._start = time.monotonic()
        self._live = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> Callable[[str], None]:
        return self._tick

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _tick(self, words: str) -> None:
        if self._live and time.monotonic() - self._start > _AFTER:
            line = printable(f"check: {words}")
            sys.stderr.write(f"\r\x1b[K{line[: fitting(line, 70)]}")
            sys.stderr.flush()
            self._shown = True
