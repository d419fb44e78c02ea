"""The stream that is printed to: terminal or not, colour, width, height; and the progress line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from ..text import printable

_NO = ("", "0", "false")
_AFTER = 1.0
"""Seconds before the progress line appears."""
_LONG = 10.0
"""Seconds after which a stream that is no terminal gets one line on what is going on."""


def _forced() -> bool:
    return os.environ.get("FORCE_COLOR", "").casefold() not in _NO


def is_terminal(stream: IO[str] | None) -> bool:
    """Return whether to print as on a terminal: the stream is one, or FORCE_COLOR asks for it."""
    if stream is None or stream.closed:
        return False
    return _forced() or stream.isatty()


def in_color(stream: IO[str] | None) -> bool:
    """Return whether to print in colour: NO_COLOR forbids it, FORCE_COLOR asks for it; a dumb terminal has none."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "1").casefold() in _NO[1:]:
        return False
    return _forced() or (is_terminal(stream) and os.environ.get("TERM") != "dumb")


def markdown(text: str) -> str:
    """Return a page in Markdown as a terminal shows it; in a pipe as it is written."""
    if not is_terminal(sys.stdout):
        return text
    from rich.console import Console
    from rich.markdown import Markdown

    width = min(columns(sys.stdout) or 80, 100)
    console = Console(width=width, force_terminal=True, no_color=not in_color(sys.stdout), highlight=False)
    with console.capture() as captured:
        console.print(Markdown(text))
    return captured.get()


def clear(stream: IO[str] | None) -> None:
    """Clear a terminal; nothing happens to any other stream."""
    if not is_terminal(stream):
        return
    from rich.console import Console

    Console(file=stream).clear()


def columns(stream: IO[str] | None) -> int | None:
    """Return the columns to fill: COLUMNS if set, else the terminal's; None in a pipe, which has no limit."""
    return _typed("COLUMNS") or _size_of(stream).columns or None


def lines(stream: IO[str] | None) -> int | None:
    """Return the visible lines: LINES if set, else the terminal's; None in a pipe."""
    return _typed("LINES") or _size_of(stream).lines or None


def _typed(variable: str) -> int:
    """Return the number in a variable of the environment; 0 if there is none."""
    text = os.environ.get(variable, "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _size_of(stream: IO[str] | None) -> os.terminal_size:
    """Return the size of a terminal; 0 by 0 for any other stream."""
    if stream is not None and not stream.closed and stream.isatty():
        with suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno())
    return os.terminal_size((0, 0))


Tick = Callable[[str], None]
"""Shows the current step."""


@contextmanager
def progress(words: str, *, quiet: bool = False) -> Iterator[Tick]:
    """Show the current step on a terminal's stderr if it takes longer than a second, and remove it at the end.

    In a pipe one line says after ten seconds what is going on; if `quiet`, nothing is shown.
    """
    if quiet or sys.stderr is None:
        yield lambda _: None
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        with _said_once(words) as said:
            yield said
        return
    from threading import Lock, Timer

    lock, now, over = Lock(), words, False
    live: Any = None

    def show() -> None:
        nonlocal live
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner
        from rich.text import Text

        spinner = Spinner("dots")

        def drawn() -> Spinner:
            spinner.update(text=Text(printable(now, 200), overflow="ellipsis", no_wrap=True))
            return spinner

        console = Console(stderr=True, no_color=not in_color(sys.stderr), highlight=False)
        with lock:
            if not over:
                live = Live(get_renderable=drawn, console=console, transient=True, refresh_per_second=8)
                live._redirect_stdout = live._redirect_stderr = False  # the answer goes where it goes
                live.start()

    def tick(done: str) -> None:
        nonlocal now
        now = f"{words}: {done}"

    timer = Timer(_AFTER, show)
    timer.daemon = True
    timer.start()
    try:
        yield tick
    finally:
        timer.cancel()
        with lock:
            over = True
            if live is not None:
                live.stop()


@contextmanager
def _said_once(words: str) -> Iterator[Tick]:
    """Say on stderr what is going on, in one line, if it takes longer than ten seconds."""
    from threading import Timer

    now = words

    def tick(done: str) -> None:
        nonlocal now
        now = f"{words}: {done}"

    def say() -> None:
        with suppress(OSError, ValueError):
            print(f"mha-inspect: {_LONG:.0f} seconds so far, {printable(now, 200)}", file=sys.stderr, flush=True)

    timer = Timer(_LONG, say)
    timer.daemon = True
    timer.start()
    try:
        yield tick
    finally:
        timer.cancel()
