"""Ctrl-C while torch is inside one long product.

Python runs its signal handlers between two instructions of its own, and a product of large matrices is one instruction
that lasts minutes. The signal itself, though, arrives in C at once and writes a byte to the wakeup descriptor; torch
works without the interpreter's lock, so a thread that waits for this byte can end the process.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ExitCode


def leave() -> None:
    """End the process as interrupted, now: no handler, no flush, and no half-written file left behind."""
    export = sys.modules.get(f"{__package__.rpartition('.')[0]}.export")
    if export is not None:
        export.remove_unfinished()
    try:
        # A terminal has echoed ^C where the cursor was: the word goes on a line of its own.
        os.write(2, b"\nInterrupted.\n" if os.isatty(2) else b"Interrupted.\n")
    finally:
        os._exit(ExitCode.INTERRUPTED)


@contextmanager
def leave_on_interrupt() -> Iterator[None]:
    """Make Ctrl-C end the process with exit code 130 at once, wherever it is.

    Where Ctrl-C is ignored on purpose (a background job), or this is not the main thread, or the platform has no pipe
    that can be a wakeup descriptor, everything stays as it is, and Ctrl-C raises KeyboardInterrupt as ever.
    """
    if os.name != "posix" or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    waiting, woken = os.pipe()
    os.set_blocking(woken, False)

    def watch() -> None:
        while received := os.read(waiting, 64):
            if signal.SIGINT in received:
                leave()
        os.close(waiting)

    try:
        before = signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    except ValueError:
        os.close(woken)
        os.close(waiting)
        yield
        return
    # The thread answers alone: an exception in the main thread as well would race with it, and can end in the noise of
    # an import or a destructor that was cut in two.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    _thread.start_new_thread(watch, ())
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(woken)
