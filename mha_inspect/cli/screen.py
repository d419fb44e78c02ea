"""What the stream is that we print to: a terminal or not, in colour or not, and how wide."""

from __future__ import annotations

import os
from typing import IO

NOT_FORCED = ("", "0", "false")


def _forced() -> bool:
    return os.environ.get("FORCE_COLOR", "").casefold() not in NOT_FORCED


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether to print as on a terminal: it is one, or FORCE_COLOR says to take it for one."""
    if stream is None or stream.closed:
        return False
    return _forced() or stream.isatty()


def in_color(stream: IO[str] | None) -> bool:
    """Whether to print in colour: NO_COLOR forbids it, FORCE_COLOR asks for it, a dumb terminal has none."""
    if os.environ.get("NO_COLOR") or os.environ.get("FORCE_COLOR", "1").casefold() in NOT_FORCED[1:]:
        return False
    return _forced() or (is_terminal(stream) and os.environ.get("TERM") != "dumb")


def columns(stream: IO[str] | None) -> int | None:
    """Columns to fill: COLUMNS where it is set, else those of the terminal; None in a pipe, which has no edge."""
    typed = os.environ.get("COLUMNS", "")
    if typed.isascii() and typed.isdigit() and int(typed) > 0:
        return int(typed)
    if stream is None or stream.closed or not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None
